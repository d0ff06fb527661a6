"""One training step: features, the exact gradient of the global loss, and backward, whole or in micro-batches.

Feature-cached accumulation (GradCache; open_clip's `--accum-freq`): with `engine.micro_batch` below the local batch,
the features of all micro-batches are computed without a graph, the objective sees the whole global batch once, and
every micro-batch then goes through the model again, with a graph, to receive its rows of the feature gradient. The
result is the gradient of the whole batch in the memory of one micro-batch, at the cost of one more forward pass.

`Trainer.train_step` takes a step from a batch to new weights, `TrainStep` its part on tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import Engine
from pipeline.engine.optim import ScheduleConfig
from pipeline.model.trimming import TextChunks
from pipeline.objectives.base import Objective
from pipeline.objectives.distill import Teacher
from pipeline.objectives.registry import ObjectiveOutput


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank."""

    output: ObjectiveOutput
    finite: bool
    """Loss and feature gradients held no inf or NaN."""
    applied: bool
    """The weights were updated."""
    stop: bool
    """Some rank has received a signal to stop."""
    missing: bool
    """Some rank had no batch: the step has changed nothing and does not count."""
    text_tokens: float
    """Tokens per text that this rank's towers computed."""
    lr_scale: float
    """The learning rate as a share of its peak."""


OnGradients = Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int], None]
"""Takes the inputs of a step, its feature gradients, and its number."""


@dataclass
class TrainStep:
    """Takes steps on tensors. Dropout and patch dropout draw from a stream named by (seed, step, rank, micro-batch).

    A step that must not be taken, because its loss or feature gradients are not finite or a rank has no batch, is
    queued like any other, so that the host need not wait for them: its feature gradients become NaN, and the engine
    skips it.
    """

    engine: Engine
    objective: Objective
    _: KW_ONLY
    world: World
    seed: int
    """Names the random streams."""
    chunks: Sequence[slice]
    """The rows of each micro-batch, from `micro_batches`."""
    on_gradients: OnGradients | None = field(default=None, init=False)
    """Called between backward and update, until a step is applied."""

    def __post_init__(self) -> None:
        self.cached = len(self.chunks) > 1
        self.phases = self.world.phases or Phases(self.world.device)
        self._batch_norms = batch_norms_of(self.engine.module)

    def __call__(
        self,
        inputs: tuple[Tensor, Tensor | TextChunks],
        *,
        sample_ids: Tensor,
        step: int,
        lr_scale: float,
        stop: bool = False,
        missing: bool = False,
        teacher: Teacher | None = None,
        keys: Tensor | None = None,
    ) -> StepResult:
        """Take one step. Collective.

        Args:
            inputs: This rank's normalized images [b, 3, H, W], and its texts: tokens [b, L], or cut or packed ones.
            sample_ids: int64 [b].
            step: Number of the step, from 0.
            lr_scale: The learning rate as a share of its peak.
            stop: Whether this rank has received a signal to stop.
            missing: This rank has no batch, and `inputs` stand in for it: no rank takes the step.
            teacher: A teacher's features of these samples, with `objective.distill`.
            keys: int64 [b, k] of equal pairs, with `objective.mask_equal`.
        """
        image, texts = inputs
        if isinstance(texts, Tensor):
            texts = TextChunks(texts, self.chunks)
        self.objective.prefetch(sample_ids)
        # Of batch norms, for a step that turns out to be skipped.
        statistics = [(x, x.clone()) for norm in self._batch_norms for x in norm.buffers(recurse=False)]
        with self.phases("forward"):
            if self.cached:
                features = self._cached_features(image, texts, step)
            else:
                with seeded(self.seed, step, self.world.rank, 0):
                    features = self.engine.forward(image, texts.tokens(0))
        with self.phases("objective"):
            f_image, f_text = (f.detach() for f in features)
            given: dict[str, Any] = {} if teacher is None else {"teacher": teacher}  # most objectives know of none
            given |= {} if keys is None else {"keys": keys}
            output = self.objective.compute(f_image, f_text, sample_ids=sample_ids, **given)
            total = output.loss + output.grad_image.sum() + output.grad_text.sum()
            flags = Flags(~torch.isfinite(total), stop, missing, world=self.world)
            to_skip = flags.values[::2].any()
            gradients = (
                output.grad_image.masked_fill(to_skip, torch.nan),
                output.grad_text.masked_fill(to_skip, torch.nan),
            )
        with self.phases("backward"):
            if self.cached:
                self._backward_cached(gradients, image, texts, step)
            else:
                self.engine.backward(features, gradients)
        if self.on_gradients is not None:
            self.on_gradients((image, texts.text), gradients, step)
        with self.phases("optimizer"):
            applied = self.engine.step(lr_scale=lr_scale)
            if applied:
                self.objective.commit(lr_scale=lr_scale)
                self.on_gradients = None
            else:
                self.objective.discard()
                for now, before in statistics:
                    now.copy_(before)
        bad, stop, skipped = flags.read()
        if applied and (bad or skipped):
            raise RuntimeError(
                f"{type(self.engine).__name__}.step applied a gradient of NaN at step {step} instead of returning "
                "False: the weights are lost, the last checkpoint is intact."
            )
        tokens = texts.computed_tokens / len(texts.text)
        return StepResult(output, not bad, applied, stop, missing=skipped, text_tokens=tokens, lr_scale=lr_scale)

    def _cached_features(self, image: Tensor, texts: TextChunks, step: int) -> tuple[Tensor, Tensor]:
        """[b, d] features of both sides, without a graph."""
        of_images, of_texts = [], []
        for index, rows in enumerate(self.chunks):
            # Running statistics move once per step, with the first micro-batch.
            statistics = contextlib.nullcontext() if index == 0 else frozen_statistics(self._batch_norms)
            with torch.no_grad(), seeded(self.seed, step, self.world.rank, index), statistics:
                f_image, f_text = self.engine.forward(image[rows], texts.tokens(index))
            of_images.append(f_image)
            of_texts.append(f_text)
        return torch.cat(of_images), texts.in_order(of_texts)

    def _backward_cached(self, gradients: tuple[Tensor, Tensor], image: Tensor, texts: TextChunks, step: int) -> None:
        """Compute the features of each micro-batch again, with a graph."""
        for index, rows in enumerate(self.chunks):
            with seeded(self.seed, step, self.world.rank, index), frozen_statistics(self._batch_norms):
                again = self.engine.forward(image[rows], texts.tokens(index))
            self.engine.backward(again, (gradients[0][rows], texts.rows(index, gradients[1])))


@contextlib.contextmanager
def seeded(seed: int, step: int, rank: int, micro_batch: int) -> Iterator[None]:
    """Inside, the global random state is a function of the arguments only; it is restored at the end.

    A second forward pass under the same arguments drops the same units, and no random state is in a checkpoint.
    """
    name = f"forward {seed} {step} {rank} {micro_batch}".encode()
    value = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(value)
        yield


def batch_norms_of(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The batch norms of a model."""
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@contextlib.contextmanager
def frozen_statistics(batch_norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Inside, batch norms normalize with the batch's statistics, but do not update their running statistics."""
    before = [(norm.track_running_stats, norm.running_mean, norm.running_var) for norm in batch_norms]
    counters = [norm.num_batches_tracked for norm in batch_norms]
    for norm in batch_norms:
        norm.track_running_stats = False
        norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, (tracks, mean, var), counter in zip(batch_norms, before, counters, strict=True):
            norm.track_running_stats, norm.running_mean, norm.running_var = tracks, mean, var
            norm.num_batches_tracked = counter


def micro_batches(local_batch: int, micro_batch: int | None) -> list[slice]:
    """The rows of each micro-batch of a rank; None makes one of the whole local batch."""
    size = micro_batch or local_batch
    return [slice(i, min(i + size, local_batch)) for i in range(0, local_batch, size)]


def lr_scale(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) as a share of its peak: warm-up and decay, times the stage's factor."""
    factor = next((stage.lr_scale for stage in config.stages if step < round(stage.until * total_steps)), 1.0)
    if step < config.warmup_steps:
        return factor * ((step + 1) / config.warmup_steps)
    if config.kind == "constant":
        cooldown = config.cooldown_steps(total_steps=total_steps)
        past = max(0, step - (total_steps - cooldown))
        return factor * (1.0 - math.sqrt(past / cooldown)) if past else factor
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return factor * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class Flags:
    """Which flags are set on any rank, by one collective. Reading them waits for nothing that is queued after it.

    `first` is a scalar on the device, `others` are flags of the host.
    """

    def __init__(self, first: Tensor, *others: bool, world: World) -> None:
        flags = [first.float(), *(torch.full_like(first, flag, dtype=torch.float32) for flag in others)]
        self.values = values = world.all_reduce(torch.stack(flags), "max")
        self._on_host, self._arrived = values, None
        if values.is_cuda:
            self._on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._on_host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.current_stream(values.device).record_event(torch.cuda.Event(blocking=True))

    def read(self) -> list[bool]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return [bool(value) for value in self._on_host.tolist()]
