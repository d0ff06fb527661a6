"""The interface of a training objective: a loss on gathered features, its exact gradient, and its own lasting state.

Shape legend: B global batch, b local batch, d feature dimension, n dataset size, K ranks. A pair of tensors is
(image side, text side).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.distributed.devices import true_fp32
from pipeline.errors import UserError
from pipeline.objectives.distill import Teacher
from pipeline.objectives.drift import DriftGuard
from pipeline.objectives.registry import (
    ObjectiveConfig,
    ObjectiveContext,
    ObjectiveMemory,
    ObjectiveOutput,
    Pair,
    StatefulPart,
)
from pipeline.objectives.sample_table import PerSampleTable

ROWS = "per_sample"  # their name in a checkpoint
_NOTHING: Any = object()
"""Marks that no batch is pending; what `update_state` needs may be None."""


class Objective(ABC):
    """A training objective. In every step the trainer calls `compute`, then `commit`, or `discard` if it skips the
    step.

    A method implements `loss_and_gradients`, `update_state` and `logit_parameters`; what has state are its `parts`,
    which are saved, loaded, compared over the ranks and logged.
    """

    table: PerSampleTable | None = None
    """Per-sample state."""
    distills = False
    """Whether `loss_and_gradients` takes `teacher`."""
    masks = False
    """Whether `loss_and_gradients` takes `keys`."""

    def __init__(
        self, config: ObjectiveConfig, context: ObjectiveContext, *, parts: Sequence[StatefulPart] = ()
    ) -> None:
        for setting, able, lacking in (
            ("distill", self.distills, "has no softmax that could follow a teacher's"),
            ("mask_equal", self.masks, "cannot leave out negatives"),
        ):
            if getattr(config, setting) and not able:
                raise UserError(
                    f"objective.{setting}: {config.name} {lacking}. Use another objective.name, or leave it out."
                )
        if context.batch_size < 2:
            raise UserError(f"batch_size = {context.batch_size}: a contrastive loss needs a global batch of 2 or more.")
        self.config, self.context, self.world, self.parts = config, context, context.world, parts
        self.drift = DriftGuard(context.world, device=context.device)
        self._steps = torch.zeros((), dtype=torch.int64)  # on the host: counting must not wait for the device
        self._pending, self._lengths_checked = _NOTHING, False

    @abstractmethod
    def loss_and_gradients(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> tuple[ObjectiveOutput, Any]:
        """The output for this batch and what `update_state` needs later; must not change lasting state."""

    @abstractmethod
    def update_state(self, pending: Any, *, lr_scale: float) -> None:
        """Apply the pending changes of a batch: temperature, tables and networks."""

    @abstractmethod
    def logit_parameters(self) -> tuple[float, float | None]:
        """`(logit_scale, logit_bias)` as open_clip stores them: log(1/tau), and None where the loss has no bias."""

    @torch.no_grad()
    def compute(
        self,
        image: Tensor,
        text: Tensor,
        *,
        sample_ids: Tensor,
        teacher: Teacher | None = None,
        keys: Tensor | None = None,
    ) -> ObjectiveOutput:
        """Loss and feature gradients of one batch. Lasting state changes only in `commit`.

        Args:
            image: [b, d] unit-norm features of this rank, without graph; b must be the same on all ranks.
            text: The same of the texts.
            sample_ids: [b] int64, stable ids in [0, n).
            teacher: Features of a teacher, which the setting `distill` needs.
            keys: [b, k] int64, which the setting `mask_equal` needs: pairs with an equal key in a column are not each
                other's negatives. `pairwise.batch_keys` makes them.

        Raises:
            RuntimeError: The previous batch was neither committed nor discarded.
            UserError: The global batch is too small or larger than the context's, or there is a teacher without
                `distill`, keys without `mask_equal`, or the reverse.
        """
        if self.is_pending:
            raise RuntimeError(
                "A second batch before the step on the first was taken: call commit() after the optimizer's step, or "
                "discard() when there was none. The global batch goes into one compute() or loss(); gradients of "
                "several cannot be accumulated."
            )
        given = {name: value for name, value in (("teacher", teacher), ("keys", keys)) if value is not None}
        for setting, name in (("distill", "teacher"), ("mask_equal", "keys")):
            value = getattr(self.config, setting)
            if bool(value) != (name in given) and self.context.device.type != "meta":
                raise UserError(
                    f"objective.{setting} = {str(value).lower()}, and compute() was given {'no ' * bool(value)}{name}: "
                    "the setting and the argument need each other."
                )
        dtype = self.context.dtype
        image, text = image.to(dtype), text.to(dtype)
        with true_fp32(self.context.device):
            output, self._pending = self.loss_and_gradients(image, text, sample_ids=sample_ids, **given)
        return output

    @torch.no_grad()
    def commit(self, *, lr_scale: float = 1.0) -> None:
        """Update the objective's own state; call it after the encoders' step.

        Args:
            lr_scale: The encoders' learning-rate schedule at this step, in [0, 1].
        """
        if not self.is_pending:
            raise RuntimeError("commit() without compute(): nothing is pending")
        pending, self._pending = self._pending, _NOTHING
        with true_fp32(self.context.device):
            self.update_state(pending, lr_scale=lr_scale)
        self._steps += 1
        if self.drift.every and self.steps % self.drift.every == 0:
            self.drift.check(self.replicated_state(), step=self.steps)

    def discard(self) -> None:
        """Drop the pending changes, because the encoders' step was skipped (overflow, NaN)."""
        self._pending = _NOTHING

    @property
    def is_pending(self) -> bool:
        """Whether a batch was computed and neither committed nor discarded."""
        return self._pending is not _NOTHING

    def loss(self, image: Tensor, text: Tensor, *, sample_ids: Tensor | None = None, **given: Any) -> Tensor:
        """The loss of the global batch with a graph to this rank's features, for training loops outside this project.

        Call `backward()` on it, step the encoders, then call `commit()` (or `discard()` when the step was skipped).
        Gradients are scaled for DistributedDataParallel, which averages over the ranks.

        Args:
            image: [b, d] unit-norm features; b must be the same on all ranks.
            text: The same of the texts.
            sample_ids: [b] stable ids in [0, n), for methods with per-sample state and for `neuclip_plus`, which
                without them cannot exclude a sample's own features of earlier batches.
            given: `teacher` and `keys`, as `compute` takes them.

        Raises:
            RuntimeError: The previous batch was neither committed nor discarded.
            UserError: Shapes, sizes or types are wrong.
        """
        self._check_batch(image, text, sample_ids)
        if sample_ids is None:  # distinct negative ones
            rows, first = self.world.rows(len(image)), self.steps * self.context.batch_size + 1
            sample_ids = -torch.arange(first + rows.start, first + rows.stop, device=image.device)
        output = self.compute(image.detach(), text.detach(), sample_ids=sample_ids, **given)
        gradients = (output.grad_image, output.grad_text)
        loss: Tensor = _WithGradient.apply(image, text, output.loss, gradients, self.world.size)
        return loss

    def _check_batch(self, image: Tensor, text: Tensor, sample_ids: Tensor | None) -> None:
        """Refuse wrong shapes and types; warn once if the features do not have length 1."""
        dim = self.context.dim
        if wrong := [type(x).__name__ for x in (image, text) if not isinstance(x, Tensor)]:
            raise UserError(f"Features are {' and '.join(wrong)}: both have to be tensors of torch, [b, {dim}].")
        shapes = [tuple(x.shape) for x in (image, text)]
        if image.ndim != 2 or shapes[0] != shapes[1] or shapes[0][1] != dim:
            raise UserError(
                f"Features have shapes {shapes[0]} (image) and {shapes[1]} (text): both need [b, {dim}], b pairs of "
                f"this rank and the dim={dim} that the objective was built for."
            )
        if not self._lengths_checked:
            self._lengths_checked = True
            length = float(torch.stack([image, text]).detach().float().norm(dim=2).sub(1).abs().max()) + 1
            if not length < 1.02:
                warnings.warn(
                    f"Features have to have length 1, and those of the first batch differ by up to {length - 1:.3g}: "
                    "use torch.nn.functional.normalize(features, dim=-1), or encode_image(images, normalize=True).",
                    stacklevel=3,
                )
        if sample_ids is None:
            if self.table is not None:
                raise UserError(f"{self.config.name} keeps state per sample: call loss(..., sample_ids=ids).")
            return
        kind = sample_ids.dtype if isinstance(sample_ids, Tensor) else type(sample_ids).__name__
        if kind is not torch.int64 or sample_ids.shape != (len(image),):
            shape = f" of shape {tuple(sample_ids.shape)}" if isinstance(sample_ids, Tensor) else ""
            raise UserError(f"sample_ids is {kind}{shape}: it has to be a torch.int64 tensor of shape ({len(image)},).")

    @torch.no_grad()
    def apply_to(self, model: torch.nn.Module) -> None:
        """Copy the temperature, and SigLIP's bias, into an open_clip model, as its `logit_scale` and `logit_bias`.

        Call it before you save the model of your own training loop: predictions with `logit_scale` need it.

        Raises:
            UserError: The model has no `logit_scale`, or the bias has no place in it.
        """
        for name, value in zip(("logit_scale", "logit_bias"), self.logit_parameters(), strict=True):
            parameter = getattr(model, name, None)
            if isinstance(parameter, Tensor):
                parameter.fill_(value or 0.0)
            elif value:  # a bias of 0 needs no place
                raise UserError(f"The {type(model).__name__} has no {name}, which would be {value:.4f}.")

    def gather_features(self, image: Tensor, text: Tensor) -> Pair:
        """[b, d] features of every rank -> the global batch's, [B, d] each.

        Raises:
            UserError: B is below 2 or above the context's batch size.
        """
        images, texts = (self.world.all_gather(x) for x in (image, text))
        if not 2 <= len(images) <= self.context.batch_size:
            raise UserError(
                f"The global batch holds {len(images)} pairs: a contrastive loss needs 2 or more, and batch_size = "
                f"{self.context.batch_size}, over all ranks, is what this objective was built for."
            )
        return images, texts

    def prefetch(self, sample_ids: Tensor) -> None:
        """Start fetching the per-sample state of the next batch, ids [b] int64; optional, before its forward pass.

        `compute` must be given the same tensor object.
        """
        if self.table is not None:
            self.table.prefetch(sample_ids)

    @property
    def steps(self) -> int:
        """Number of committed steps, part of the lasting state; schedules and restarts follow it."""
        return int(self._steps)

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        """Current rates of the method's own variables, by the name of their setting."""
        return _joined(part.learning_rates(lr_scale=lr_scale) for part in self.parts)

    def counters(self) -> dict[str, float]:
        """Counts of repaired faults since the process began, by name."""
        return {"drift_events": float(self.drift.events)} if self.world.size > 1 else {}

    def distributions(self) -> dict[str, Tensor]:
        """Values of the lasting state for histograms, computed on each call."""
        return _joined(part.distributions() for part in self.parts)

    def memory(self) -> ObjectiveMemory:
        """Size of the lasting state; an objective built on the `meta` device knows it without holding the state."""
        own = _joined(part.own_state() for part in self.parts)
        replicated = sum(x.nbytes for x in (self._steps, *self.replicated_state().values(), *own.values()))
        return ObjectiveMemory(replicated, 0.0 if self.table is None else 4.0 * len(self.table.columns))

    def replicated_state(self) -> dict[str, Tensor]:
        """The state that every rank holds, by name: the tensors themselves."""
        return _joined(part.replicated_state() for part in self.parts)

    def state_dict(self) -> dict[str, Tensor]:
        """The lasting state without per-sample rows, the same for any number of ranks; collective."""
        lasting = {"steps": self._steps, **self.replicated_state()}
        return {key: value.detach().clone() for key, value in lasting.items()} | self._gathered()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; collective.

        Raises:
            UserError: A key is missing or a shape differs; then nothing has been changed.
        """
        self._pending, divided = _NOTHING, self._gathered()
        own = {"steps": self._steps, **self.replicated_state(), **divided}
        for key, tensor in own.items():
            if key not in state or state[key].shape != tensor.shape:
                wrong = f"no {key}"
                if key in state:
                    shape, needed = tuple(state[key].shape), tuple(tensor.shape)
                    wrong = f"{key} of shape {shape}, but these settings need {needed}"
                raise UserError(
                    f"The saved objective state has {wrong}. Resume with the objective settings and the batch_size "
                    "that the checkpoint was written with."
                )
        for key, tensor in own.items():
            tensor.copy_(state[key])
        for part in self.parts:
            part.divide_state(divided)

    def _gathered(self) -> dict[str, Tensor]:
        return _joined(part.gathered_state() for part in self.parts)

    def row_blocks(self) -> dict[str, tuple[int, Iterable[Tensor]]]:
        """Per-sample state as it is now: name -> (first sample id, this rank's contiguous rows, in blocks).

        Together the ranks cover [0, n). The blocks may be read once, from any thread, while training continues; no
        second copy of the state is made.
        """
        return {} if self.table is None else {ROWS: (self.table.start, self.table.snapshot())}

    def load_row_state_dict(self, read: Callable[[str, int, int], Tensor]) -> None:
        """Restore per-sample state on any number of ranks: `read(name, start, stop)` returns those rows."""
        if self.table is not None:
            self.table.load(ROWS, read)


def _joined(dictionaries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: value for dictionary in dictionaries for key, value in dictionary.items()}


class _WithGradient(torch.autograd.Function):
    """A loss whose gradients with respect to the features are known already."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, loss: Tensor, gradients: tuple[Tensor, Tensor], scale: int
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.scale, ctx.dtypes = scale, (image.dtype, text.dtype)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0] * ctx.scale
        image, text = ((g * scale).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return image, text, None, None, None
