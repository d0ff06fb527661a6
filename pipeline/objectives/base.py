"""What every objective is: a loss of gathered features, its exact gradient, and state that outlives the step.

Shape legend: B global batch, b local batch, d feature dimension, n dataset size, K ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError


@section
class ObjectiveConfig:
    """Base of every method's section; `name` is the key under which the method is registered.

    drift_check_every: commits between two comparisons of the replicated state over the ranks, 0 = never.
    """

    name: str
    drift_check_every: int = Field(default=500, ge=0)


@dataclass(frozen=True)
class ObjectiveContext:
    """The facts of a run that an objective may need; all of them are known before the first batch.

    batch_size: pairs of the global batch, over all ranks. In somebody else's loop, dataset_size, steps_per_epoch and
    total_steps may be 0, unknown, where nothing needs them.
    """

    dim: int
    batch_size: int
    dataset_size: int
    steps_per_epoch: int
    total_steps: int
    world: World
    device: torch.device
    seed: int = 0
    dtype: torch.dtype = torch.float32  # of state and arithmetic; float64 serves tests
    table_rows: int | None = None  # rows of per-sample tables, if not n: for plans, which only weigh them

    def epochs(self, *, wanted_by: str) -> int:
        """Epochs of the run, the last one maybe not whole. Raises: UserError when the length of either is unknown."""
        if self.total_steps < 1 or self.steps_per_epoch < 1:
            raise UserError(
                f"{wanted_by} follows the epochs of the run: give build_objective total_steps, and dataset_size or "
                f"steps_per_epoch (total_steps = {self.total_steps}, steps_per_epoch = {self.steps_per_epoch})."
            )
        return -(-self.total_steps // self.steps_per_epoch)


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss of the global batch and its gradient with respect to this rank's features.

    loss: scalar, the same on every rank. grad_image, grad_text: [b, d] fp32, d(global loss)/d(local features): the
    true gradient, not divided by K. metrics: detached scalars, the same on every rank, left on the device.
    distributions: values per anchor that are worth a histogram, the tensors that were there anyway.
    """

    loss: Tensor
    grad_image: Tensor
    grad_text: Tensor
    metrics: Mapping[str, Tensor]
    distributions: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(ABC):
    """One training objective. Per step the trainer calls `compute`, then either `commit` or `discard`."""

    config: Any
    needs_sample_ids: ClassVar[bool] = False

    @abstractmethod
    def compute(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> ObjectiveOutput:
        """Loss and feature gradients of one batch; every lasting change of state is held back until `commit`.

        Args: image, text: [b, d] unit-norm fp32 features of this rank, without graph, b the same on all ranks.
          sample_ids: [b] int64.
        Raises: RuntimeError when the last batch was neither committed nor discarded.
        """

    @abstractmethod
    def commit(self, *, lr_scale: float = 1.0) -> None:
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
        """The small lasting state as tensors, the same on every rank and for any number of ranks.

        Methods with per-sample state have `row_state_dict` beside it, and are not restored without.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave. Raises: UserError on missing keys or other shapes."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of committed steps, part of the lasting state: what a method does every so often goes by it."""

    def loss(self, image: Tensor, text: Tensor, *, sample_ids: Tensor | None = None) -> Tensor:
        """The loss of the global batch, with a graph to this rank's features: for use in anybody's own loop.

        Call `backward()` on it, step the encoders, then `commit()` (or `discard()` when the step was skipped).
        Args: image, text: [b, d] unit-norm features, b the same on all ranks. sample_ids: [b] stable ids in [0, n), for
          methods with per-sample state. Raises: RuntimeError when the last batch was neither committed nor discarded.
        Gradients are scaled for DistributedDataParallel, which averages over the ranks; one rank changes nothing.
        """
        if sample_ids is None and self.needs_sample_ids:
            raise UserError(f"{self.config.name} keeps state per sample: call loss(..., sample_ids=ids), [b] int64.")
        ids = torch.full((image.shape[0],), -1, device=image.device) if sample_ids is None else sample_ids
        output = self.compute(image.detach(), text.detach(), sample_ids=ids)
        loss: Tensor = _WithGradient.apply(image, text, output, self.world_size)
        return loss

    @property
    def world_size(self) -> int:
        return 1

    def prefetch(self, sample_ids: Tensor) -> None:  # noqa: B027 (most methods have no rows to fetch)
        """Start fetching the per-sample state of the next batch; optional, before its forward pass.

        Args: sample_ids: [b] int64, the very tensor that `compute` will be given.
        """

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        """Rates of the method's own variables at this point of the encoders' schedule, by the name of their setting."""
        return {}

    def counters(self) -> dict[str, float]:
        """What went wrong and was repaired, counted since the process began, by name."""
        return {}

    def distributions(self) -> dict[str, Tensor]:
        """Values of the lasting state that are worth a histogram, computed when asked."""
        return {}

    def row_state_dict(self) -> dict[str, tuple[int, Tensor]]:
        """Per-sample state: name -> (first sample id, this rank's contiguous rows); together the ranks cover [0, n)."""
        return {}

    def row_blocks(self) -> dict[str, tuple[int, Iterable[Tensor]]]:
        """`row_state_dict` as it is now, rows in blocks one after the other, to be read once and from any thread.

        Training may go on meanwhile, and no second copy of the state is made.
        """
        return {name: (first, [rows.cpu().clone()]) for name, (first, rows) in self.row_state_dict().items()}

    def load_row_state_dict(self, read: Callable[[str, int, int], Tensor]) -> None:  # noqa: B027 (most methods have none)
        """Restore per-sample state on any number of ranks: `read(name, start, stop)` gives those rows."""


class _WithGradient(torch.autograd.Function):
    """Attach gradients that are known already to the features they belong to."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, text: Tensor, output: ObjectiveOutput, scale: int) -> Tensor:
        ctx.save_for_backward(output.grad_image, output.grad_text)
        ctx.scale, ctx.dtypes = scale, (image.dtype, text.dtype)
        return output.loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0] * ctx.scale
        image, text = ((g * scale).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return image, text, None, None


def load_tensors(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state[key]` into `own[key]` for every key of `own`, in place.

    Raises: UserError when a key is missing or a shape differs; then nothing has been changed.
    """
    for key, tensor in own.items():
        if key not in state:
            raise UserError(
                f"The saved objective state has no {key}; it holds {', '.join(sorted(state)) or 'nothing'}. "
                "Resume with the objective settings that the checkpoint was written with."
            )
        if state[key].shape != tensor.shape:
            raise UserError(
                f"The saved {key} has shape {tuple(state[key].shape)}, but these settings need {tuple(tensor.shape)}. "
                "Resume with the objective settings and the batch_size that the checkpoint was written with."
            )
    for key, tensor in own.items():
        tensor.copy_(state[key])
