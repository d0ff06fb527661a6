"""The interface of a training objective: a loss on gathered features, its exact gradient, and its own lasting state.

Shape legend: B global batch, b local batch, d feature dimension, n dataset size, K ranks. A pair of tensors is
(image side, text side).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives.drift import DriftGuard
from pipeline.objectives.objective_tensors import WithGradient, load_tensors
from pipeline.objectives.sample_table import PerSampleTable
from pipeline.precision import true_fp32

Pair = tuple[Tensor, Tensor]
ROWS = "per_sample"
"""Name of the per-sample rows in a checkpoint."""


@section
class ObjectiveConfig:
    """The settings that every method has."""

    name: str
    """Registered name of the method."""
    drift_check_every: int = Field(default=500, ge=0)
    """Steps between two comparisons of the replicated state over the ranks; 0 = never."""
    gather_precision: Literal["fp32", "bf16"] = "fp32"
    """How the ranks exchange features. `bf16` halves these bytes, a small part of a step's (2 b d numbers), and rounds
    the gathered features: at d = 512 and a temperature of 0.01, normalizers change by up to 4%."""


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

    def epochs(self, *, needed_by: str) -> int:
        """Number of epochs of the run, counting a partial last one.

        Args:
            needed_by: The setting that depends on it, for the message.

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
    """Bytes of an objective's state: on every rank, and per sample of the dataset, divided by the number of ranks."""

    replicated: int
    """With the rank's share of what is divided among the ranks."""
    per_sample: float
    rows_on_host: bool
    """Whether per-sample rows are in host memory rather than on the GPU."""


class Objective(ABC):
    """A training objective. In every step the trainer calls `compute`, then `commit`, or `discard` if it skips the
    step.

    A method implements `loss_and_gradients`, `update_state` and `logit_parameters`, and `replicated_state` if it has
    any.

    Args:
        config: The method's section.
        context: The facts of the run.
        table: Per-sample state, for methods that have some.
    """

    def __init__(self, config: Any, context: ObjectiveContext, *, table: PerSampleTable | None = None) -> None:
        if context.batch_size < 2:
            raise UserError(f"batch_size = {context.batch_size}: a contrastive loss needs a global batch of 2 or more.")
        self.config, self.context, self.world, self.table = config, context, context.world, table
        self.drift = DriftGuard(context.world, every=config.drift_check_every, device=context.device)
        self._steps = torch.zeros((), dtype=torch.int64)  # on the host: counting must not wait for the device
        self._pending: Any = None

    @abstractmethod
    def loss_and_gradients(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> tuple[ObjectiveOutput, Any]:
        """The output for this batch and what `update_state` needs later; must not change lasting state."""

    @abstractmethod
    def update_state(self, pending: Any, *, lr_scale: float) -> None:
        """Apply the pending changes of a batch: temperature, tables and networks."""

    @abstractmethod
    def logit_parameters(self) -> tuple[float, float]:
        """`(logit_scale, logit_bias)` as open_clip stores them: log(1/tau) and 0, or SigLIP's own."""

    def replicated_state(self) -> dict[str, Tensor]:
        """The state that every rank holds, by name: the tensors themselves, so that loading writes into them."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """This rank's share of state that is divided among the ranks, by name."""
        return {}

    def gathered_state(self) -> dict[str, Tensor]:
        """State that is divided among the ranks, whole on every rank, by name; collective."""
        return {}

    def divide_state(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027 (most methods have none)
        """Take this rank's part of what `gathered_state` returned, possibly on another number of ranks."""

    @torch.no_grad()
    def compute(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> ObjectiveOutput:
        """Loss and feature gradients of one batch. Lasting state changes only in `commit`.

        Args:
            image: [b, d] unit-norm features of this rank, without graph; b must be the same on all ranks.
            text: The same of the texts.
            sample_ids: [b] int64, stable ids in [0, n).

        Raises:
            RuntimeError: The previous batch was neither committed nor discarded.
            UserError: The global batch is too small or larger than the context's.
        """
        if self._pending is not None:
            raise RuntimeError(
                "A second batch before the step on the first was taken: call commit() after the optimizer's step, or "
                "discard() when there was none. The global batch goes into one compute() or loss(); gradients of "
                "several cannot be accumulated."
            )
        dtype = self.context.dtype
        with plain_arithmetic(self.context.device):
            output, self._pending = self.loss_and_gradients(image.to(dtype), text.to(dtype), sample_ids=sample_ids)
        return output

    @torch.no_grad()
    def commit(self, *, lr_scale: float = 1.0) -> None:
        """Update the objective's own state; call it after the encoders' step.

        Args:
            lr_scale: The encoders' learning-rate schedule at this step, in [0, 1].
        """
        if self._pending is None:
            raise RuntimeError("commit() without compute(): nothing is pending")
        pending, self._pending = self._pending, None
        with plain_arithmetic(self.context.device):
            self.update_state(pending, lr_scale=lr_scale)
        self._steps += 1
        if self.drift.due(self.steps):
            self.drift.check(self.replicated_state(), step=self.steps)

    def discard(self) -> None:
        """Drop the pending changes, because the encoders' step was skipped (overflow, NaN)."""
        self._pending = None

    def loss(self, image: Tensor, text: Tensor, *, sample_ids: Tensor | None = None) -> Tensor:
        """The loss of the global batch with a graph to this rank's features, for training loops outside this project.

        Call `backward()` on it, step the encoders, then call `commit()` (or `discard()` when the step was skipped).
        Gradients are scaled for DistributedDataParallel, which averages over the ranks.

        Args:
            image: [b, d] unit-norm features; b must be the same on all ranks.
            text: The same of the texts.
            sample_ids: [b] stable ids in [0, n), for methods with per-sample state.

        Raises:
            RuntimeError: The previous batch was neither committed nor discarded.
        """
        if sample_ids is None and self.table is not None:
            raise UserError(f"{self.config.name} keeps state per sample: call loss(..., sample_ids=ids), [b] int64.")
        ids = torch.full((image.shape[0],), -1, device=image.device) if sample_ids is None else sample_ids
        output = self.compute(image.detach(), text.detach(), sample_ids=ids)
        gradients = (output.grad_image, output.grad_text)
        loss: Tensor = WithGradient.apply(image, text, output.loss, gradients, self.world.size)
        return loss

    def gather_features(self, image: Tensor, text: Tensor) -> Pair:
        """[b, d] features of every rank -> the global batch's, [B, d] each.

        Raises:
            UserError: B is below 2 or above the context's batch size.
        """
        if self.config.gather_precision == "bf16" and self.world.size > 1:
            images, texts = (self.world.all_gather(x.bfloat16()).to(x.dtype) for x in (image, text))
        else:
            images, texts = self.world.all_gather(image), self.world.all_gather(text)
        if not 2 <= len(images) <= self.context.batch_size:
            raise UserError(
                f"The global batch holds {len(images)} pairs: a contrastive loss needs 2 or more, and batch_size = "
                f"{self.context.batch_size}, over all ranks, is what this objective was built for."
            )
        return images, texts

    def prefetch(self, sample_ids: Tensor) -> None:
        """Start fetching the per-sample state of the next batch; optional, before its forward pass.

        Args:
            sample_ids: [b] int64; `compute` must be given the same tensor object.
        """
        if self.table is not None:
            self.table.prefetch(sample_ids)

    @property
    def steps(self) -> int:
        """Number of committed steps, part of the lasting state; schedules and restarts follow it."""
        return int(self._steps)

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        """Current rates of the method's own variables, by the name of their setting."""
        return {}

    def counters(self) -> dict[str, float]:
        """Counts of repaired faults since the process began, by name."""
        return {"drift_events": float(self.drift.events)} if self.world.size > 1 else {}

    def distributions(self) -> dict[str, Tensor]:
        """Values of the lasting state for histograms, computed on each call."""
        return {}

    def memory(self) -> ObjectiveMemory:
        """Size of the lasting state; an objective built on the `meta` device knows it without holding the state."""
        tensors = (self._steps, *self.replicated_state().values(), *self.own_state().values())
        replicated = sum(value.nbytes for value in tensors)
        if self.table is None:
            return ObjectiveMemory(replicated, 0.0, rows_on_host=True)
        return ObjectiveMemory(replicated, float(4 * len(self.table.columns)), self.table.on_host)

    def state_dict(self) -> dict[str, Tensor]:
        """The lasting state without per-sample rows, the same for any number of ranks; collective."""
        lasting = {"steps": self._steps, **self.replicated_state()}
        return {key: value.detach().clone() for key, value in lasting.items()} | self.gathered_state()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; collective.

        Raises:
            UserError: A key is missing or a shape differs.
        """
        self._pending, divided = None, self.gathered_state()
        load_tensors({"steps": self._steps, **self.replicated_state(), **divided}, state)
        self.divide_state(divided)

    def row_state_dict(self) -> dict[str, tuple[int, Tensor]]:
        """Per-sample state: name -> (first sample id, this rank's contiguous rows); together the ranks cover [0, n)."""
        return {} if self.table is None else {ROWS: (self.table.start, self.table.owned())}

    def row_blocks(self) -> dict[str, tuple[int, Iterable[Tensor]]]:
        """`row_state_dict` as it is now, in successive blocks of rows that may be read once, from any thread.

        Training may continue meanwhile, and no second copy of the state is made.
        """
        return {} if self.table is None else {ROWS: (self.table.start, self.table.snapshot())}

    def load_row_state_dict(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Restore per-sample state on any number of ranks: `read(name, start, stop)` returns those rows."""
        if self.table is not None:
            self.table.load(ROWS, read)


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Neither TF32 nor autocast inside, even if the surrounding training loop uses them."""
    kind = "cpu" if device.type == "meta" else device.type  # there is no autocast for the meta device
    with true_fp32(), torch.autocast(kind, enabled=False):
        yield
