"""What every objective is: a loss of gathered features, its exact gradient, and state that outlives the step.

Shape legend: B global batch, b local batch, d feature dimension, n dataset size, K ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.config import section
from pipeline.world import World


@section
class ObjectiveConfig:
    """Base of every method's section; `name` is the key under which the method is registered."""

    name: str


@dataclass(frozen=True)
class ObjectiveContext:
    """The facts of a run that an objective may need; all of them are known before the first batch."""

    dim: int
    batch_size: int
    dataset_size: int
    steps_per_epoch: int
    total_steps: int
    world: World
    device: torch.device
    seed: int = 0


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss of the global batch and its gradient with respect to this rank's features.

    loss: scalar, the same on every rank. grad_image, grad_text: [b, d] fp32, d(global loss)/d(local features): the
    true gradient, not divided by K. metrics: detached scalars, the same on every rank, left on the device.
    """

    loss: Tensor
    grad_image: Tensor
    grad_text: Tensor
    metrics: Mapping[str, Tensor]


class Objective(ABC):
    """One training objective. Per step the trainer calls `compute`, then either `commit` or `discard`."""

    config: Any

    @abstractmethod
    def compute(self, image: Tensor, text: Tensor, *, sample_ids: Tensor, step: int) -> ObjectiveOutput:
        """Loss and feature gradients of one batch; every lasting change of state is held back until `commit`.

        Args: image, text: [b, d] unit-norm fp32 features of this rank, without graph. sample_ids: [b] int64.
          step: number of steps applied so far, from 0.
        """

    @abstractmethod
    def commit(self, *, lr_scale: float) -> None:
        """The encoders' step was applied: update temperature, tables and networks with the pending gradients.

        Args: lr_scale: the encoders' learning-rate schedule at this step, in [0, 1].
        """

    @abstractmethod
    def discard(self) -> None:
        """The encoders' step was skipped (overflow, NaN): drop the pending changes, keep the state as before."""

    @abstractmethod
    def logit_parameters(self) -> tuple[float, float]:
        """`(logit_scale, logit_bias)` as open_clip stores them: log(1/tau) and 0, or SigLIP's own."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]:
        """The small lasting state as tensors, the same on every rank and for any number of ranks."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave. Raises: UserError on missing keys or other shapes."""

    def row_state_dict(self) -> dict[str, tuple[int, Tensor]]:
        """Per-sample state: name -> (first sample id, this rank's contiguous rows); together the ranks cover [0, n)."""
        return {}

    def load_row_state_dict(self, read: Callable[[str, int, int], Tensor]) -> None:  # noqa: B027 (most methods have none)
        """Restore per-sample state on any number of ranks: `read(name, start, stop)` gives those rows."""
