"""What an objective is given and what it returns: settings, the facts of a run, loss and gradients, memory.

Shape legend: b local batch, d feature dimension, K ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError


@section
class ObjectiveConfig:
    """The settings that every method has."""

    name: str
    """Registered name of the method."""
    distill: float = Field(default=0.0, ge=0)
    """Weight of a distillation loss that is added: the divergence of the similarities within the global batch from
    those of a teacher (MobileCLIP; open_clip's `--distill-model`), whose features `data.teacher_features` has. 0: no
    teacher. For the methods with a softmax, so not for `siglip`."""
    mask_equal: bool = False
    """Pairs with an equal text or image are not each other's negatives in a batch: texts with the same tokens, images
    with the same pixels after the crop (with a random crop, only an image that is in the batch under the same sample id
    counts as equal). In the methods' means over negatives their terms are 0; distillation and the normalizer networks'
    prototypes are not masked."""


@dataclass(frozen=True)
class ObjectiveContext:
    """The facts of a run that an objective may need; all of them are known before the first batch.

    Outside the trainer, dataset_size, steps_per_epoch and total_steps may be 0 (unknown) where the method needs none.
    """

    dim: int
    batch_size: int
    """Pairs of the global batch, over all ranks."""
    dataset_size: int
    steps_per_epoch: int
    total_steps: int
    world: World
    device: torch.device
    """`meta` builds an objective that only knows its sizes, see `Objective.memory`."""
    seed: int = 0
    dtype: torch.dtype = torch.float32
    """Of state and arithmetic; the tests use float64."""

    beta2: float = 0.98
    """Of the temperatures' Adam, as `adam_eps`: in a run those of the encoders' optimizer, as in open_clip, where the
    temperature is one of the model's parameters, and in FastCLIP (procedures 4 and 5)."""
    adam_eps: float = 1e-8

    def epochs(self, *, needed_by: str) -> int:
        """Number of epochs of the run, counting a partial last one; `needed_by` is the setting that depends on it.

        Raises:
            UserError: The length of the run is unknown.
        """
        if self.total_steps < 1 or self.steps_per_epoch < 1:
            raise UserError(
                f"{needed_by} follows the epochs of the run: give build_objective total_steps, and dataset_size or "
                f"steps_per_epoch (total_steps = {self.total_steps}, steps_per_epoch = {self.steps_per_epoch})."
            )
        return -(-self.total_steps // self.steps_per_epoch)


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss of the global batch and its gradient with respect to this rank's features."""

    loss: Tensor
    """Scalar, the same on every rank."""
    grad_image: Tensor
    """[b, d], d(global loss)/d(local features): the true gradient, not divided by K."""
    grad_text: Tensor
    metrics: Mapping[str, Tensor]
    """Detached scalars, the same on every rank, left on the device."""
    distributions: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per anchor for histograms."""


@dataclass(frozen=True)
class ObjectiveMemory:
    """Bytes of an objective's state: on every rank, and per sample of the dataset, in host memory, divided by the
    number of ranks."""

    replicated: int
    """With the rank's share of what is divided among the ranks."""
    per_sample: float
