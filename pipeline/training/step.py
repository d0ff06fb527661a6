"""One training step: features, the exact gradient of the global loss, and backward, whole or in micro-batches.

Feature-cached accumulation (GradCache; open_clip's `--accum-freq`): with `engine.micro_batch` below the local batch,
the features of all micro-batches are computed without a graph, the objective sees the whole global batch once, and
every micro-batch then goes through the model again, with a graph, to receive its rows of the feature gradient. The
result is the gradient of the whole batch in the memory of one micro-batch, at the cost of one more forward pass.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import Engine
from pipeline.errors import UserError
from pipeline.model.trimming import TextChunks
from pipeline.objectives.base import Objective, ObjectiveOutput


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
    text_tokens: float
    """Tokens per text that this rank's towers computed."""


@dataclass(frozen=True)
class StepHooks:
    """What is called in the middle of a step."""

    on_gradients: Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int], None] | None = None
    """Called with the inputs, the feature gradients and the step's number, between backward and update."""
    before_update: Callable[[int], None] | None = None
    """Called with the step's number when backward is queued on the device, before the update waits for it: the host has
    time then. Not called in a step that ends the run by a signal."""


class TrainStep:
    """Takes steps on one rank. Dropout and patch dropout draw from a stream named by (seed, step, rank, micro-batch).

    Args:
        engine: Runs the towers.
        objective: Gives loss and feature gradients.
        world: The ranks.
        seed: Names the random streams.
        chunks: The rows of each micro-batch, from `micro_batches`.
        hooks: What is called in the middle of a step.
    """

    def __init__(
        self,
        engine: Engine,
        objective: Objective,
        *,
        world: World,
        seed: int,
        chunks: Sequence[slice],
        hooks: StepHooks | None = None,
    ) -> None:
        self.engine, self.objective, self.world, self.seed = engine, objective, world, seed
        self.chunks, self.hooks = chunks, hooks or StepHooks()
        self.cached = len(self.chunks) > 1
        self.phases = world.phases or Phases(world.device)
        self._batch_norms = [m for m in engine.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]

    def __call__(
        self,
        inputs: tuple[Tensor, Tensor],
        *,
        sample_ids: Tensor,
        step: int,
        lr_scale: float,
        stop: bool = False,
        text_lengths: Tensor | None = None,
    ) -> StepResult:
        """Take one step. Collective.

        Args:
            inputs: This rank's normalized images [b, 3, H, W] and tokens [b, L].
            sample_ids: int64 [b].
            step: Number of the step, from 0.
            lr_scale: The learning rate as a share of its peak.
            stop: Whether this rank has received a signal to stop.
            text_lengths: int64 [b] on the host, from `TextTrimming`: the towers read trimmed texts. None: whole texts.
        """
        image, text = inputs
        texts = TextChunks(text, self.chunks, lengths=text_lengths)
        self.objective.prefetch(sample_ids)
        with self.phases("forward"):
            features = self._features(image, texts, step)
        with self.phases("objective"):
            f_image, f_text = (f.detach() for f in features)
            output = self.objective.compute(f_image, f_text, sample_ids=sample_ids)
            finite, stop = self._agree(output, stop)
        tokens = texts.computed_tokens / len(text)
        if not finite:  # decided before backward: some engines keep a gradient until they have applied it
            self.objective.discard()
            return StepResult(output, finite=False, applied=False, stop=stop, text_tokens=tokens)
        with self.phases("backward"):
            self._backward(features, output, (image, texts), step)
        if self.hooks.on_gradients is not None:
            self.hooks.on_gradients(inputs, (output.grad_image, output.grad_text), step)
        if self.hooks.before_update is not None and not stop:
            self.hooks.before_update(step)
        with self.phases("optimizer"):
            applied = self.engine.step(lr_scale=lr_scale)
            if applied:
                self.objective.commit(lr_scale=lr_scale)
            else:
                self.objective.discard()
        return StepResult(output, finite=True, applied=applied, stop=stop, text_tokens=tokens)

    def _features(self, image: Tensor, texts: TextChunks, step: int) -> tuple[Tensor, Tensor]:
        """[b, d] features of both sides: with a graph when there is one micro-batch, else without."""
        if not self.cached:
            with seeded(self.seed, step, self.world.rank, 0):
                return self.engine.forward(image, texts.tokens(0))
        of_images, of_texts = [], []
        for index, rows in enumerate(self.chunks):
            # Running statistics move once per step, with the first micro-batch.
            statistics = contextlib.nullcontext() if index == 0 else frozen_statistics(self._batch_norms)
            with torch.no_grad(), seeded(self.seed, step, self.world.rank, index), statistics:
                f_image, f_text = self.engine.forward(image[rows], texts.tokens(index))
            of_images.append(f_image)
            of_texts.append(f_text)
        return torch.cat(of_images), texts.in_order(of_texts)

    def _backward(
        self, features: tuple[Tensor, Tensor], output: ObjectiveOutput, inputs: tuple[Tensor, TextChunks], step: int
    ) -> None:
        gradients = (output.grad_image, output.grad_text)
        if not self.cached:
            self.engine.backward(features, gradients)
            return
        image, texts = inputs
        for index, rows in enumerate(self.chunks):
            with seeded(self.seed, step, self.world.rank, index), frozen_statistics(self._batch_norms):
                again = self.engine.forward(image[rows], texts.tokens(index))
            self.engine.backward(again, (gradients[0][rows], texts.rows(index, gradients[1])))

    def _agree(self, output: ObjectiveOutput, stop: bool) -> tuple[bool, bool]:
        """`(all finite, any stop)` over the ranks: one collective of two numbers and one host synchronisation."""
        total = output.loss + output.grad_image.sum() + output.grad_text.sum()
        flags = torch.stack([(~torch.isfinite(total)).float(), torch.full_like(total, float(stop))])
        bad, stopped = self.world.all_reduce(flags, "max").tolist()
        return not bad, bool(stopped)


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


def check_micro_batch(*, global_batch: int, world_size: int, micro_batch: int | None) -> int:
    """The local batch.

    Raises:
        UserError: The global batch is not divisible by the ranks, or the local batch not by the micro-batch.
    """
    if global_batch % world_size:
        raise UserError(
            f"batch_size = {global_batch} is not divisible by the {world_size} ranks of this run: use a multiple of "
            f"{world_size}, for example {max(1, round(global_batch / world_size)) * world_size}."
        )
    local = global_batch // world_size
    if micro_batch is not None and local % min(micro_batch, local):
        raise UserError(
            f"engine.micro_batch = {micro_batch} does not divide the local batch {local} "
            f"(batch_size {global_batch} on {world_size} ranks)."
        )
    return local
