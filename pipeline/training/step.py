"""One training step: features, one exact gradient of the global loss, and backward, whole or in micro-batches.

Feature-cached accumulation: with `engine.micro_batch` below the local batch, the features of all micro-batches are
computed without graph, the objective sees the whole global batch once, and every micro-batch is then forwarded again
with graph and given its rows of the feature gradient. The result is the gradient of the whole batch, in the memory
of one micro-batch and for one more forward pass.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.errors import UserError
from pipeline.model.trimming import TextChunks
from pipeline.objectives.base import Objective, ObjectiveOutput


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank.

    finite: loss and feature gradients held no inf or NaN. applied: the weights moved. stop: some rank was asked to.
    text_tokens: tokens per text that this rank's towers computed.
    """

    output: ObjectiveOutput
    finite: bool
    applied: bool
    stop: bool
    text_tokens: float


class TrainStep:
    """Runs steps on one rank. Dropout and patch dropout draw from a stream named by (seed, step, rank, micro-batch)."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        objective: Objective,
        *,
        world: World,
        seed: int,
        local_batch: int,
        micro_batch: int | None,
    ) -> None:
        self.engine, self.objective, self.world, self.seed = engine, objective, world, seed
        size = micro_batch or local_batch
        self.chunks = [slice(i, min(i + size, local_batch)) for i in range(0, local_batch, size)]
        self.cached = len(self.chunks) > 1
        self.phases = world.phases or Phases(world.device)
        self.on_gradients: Callable[[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int], None] | None = None
        self.before_update: Callable[[], None] = lambda: None
        """Called when backward is queued, before the update waits for it: time of the host that costs nothing."""
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
        """Take one step on this rank's [b, 3, H, W] normalised images and [b, L] tokens, and their [b] sample ids.

        With the [b] lengths of the texts (on the host, from `TextTrimming`), the towers read trimmed texts.
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
        if not finite:  # known before backward: some engines keep what a backward pass left until they have used it
            self.objective.discard()
            return StepResult(output, finite=False, applied=False, stop=stop, text_tokens=tokens)
        with self.phases("backward"):
            self._backward(features, output, (image, texts), step)
        if self.on_gradients is not None:
            self.on_gradients(inputs, (output.grad_image, output.grad_text), step)
        if not stop:
            self.before_update()
        with self.phases("optimizer"):
            applied = self.engine.step(lr_scale=lr_scale)
            if applied:
                self.objective.commit(lr_scale=lr_scale)
            else:
                self.objective.discard()
        return StepResult(output, finite=True, applied=applied, stop=stop, text_tokens=tokens)

    def _features(self, image: Tensor, texts: TextChunks, step: int) -> tuple[Tensor, Tensor]:
        """[b, d] features of both sides: with graph when they fit at once, without when they are cached."""
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
    """Global random state as a pure function of its arguments inside, and as it was before outside.

    A re-forward under the same arguments drops the same units, and nothing about it needs to be in a checkpoint.
    """
    name = f"forward {seed} {step} {rank} {micro_batch}".encode()
    value = int.from_bytes(hashlib.blake2b(name, digest_size=7).digest(), "big")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(value)
        yield


@contextlib.contextmanager
def frozen_statistics(batch_norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Batch norms normalise with the batch's statistics inside, but their running statistics do not move."""
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


def check_micro_batch(*, global_batch: int, world_size: int, micro_batch: int | None) -> int:
    """The local batch. Raises: UserError when ranks or micro-batches do not divide it."""
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
