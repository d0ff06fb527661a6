"""Selects the pairs of each step from those that were read (`selection`), on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.loading.loader import Batch
from pipeline.distributed.precision import true_fp32
from pipeline.errors import UserError
from pipeline.model.starting_weights import resized
from pipeline.model.trimming import TextChunks, TextTrimming
from pipeline.objectives.distill import Teacher
from pipeline.objectives.selection import View, gumbel_noise, select
from pipeline.training.run_state import RunState
from pipeline.training.step import batch_norms_of, frozen_statistics, micro_batches, seeded
from pipeline.training.teacher import StoredTeacher, open_features


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Scores super-batches and keeps this rank's share of the selected pairs; made by `open_selection`."""

    state: RunState
    reference: StoredTeacher
    normalized: Callable[[Tensor], Tensor]
    trimming: TextTrimming | None
    image_size: int | None
    """At which the learner is scored; None: at that of training."""

    def choose(
        self, batch: Batch, image: Tensor, *, step: int, guide: Teacher
    ) -> tuple[Batch, Tensor, dict[str, Tensor]]:
        """The selected pairs of a super-batch, in its order and divided among the ranks. Collective.

        Args:
            batch: This rank's part of the super-batch.
            image: Its images on the device.
            step: Number of the step.
            guide: The reference's features of the batch.

        Returns:
            This rank's part of the batch to train on, its images on the device, and metrics.
        """
        world, config = self.state.world, self.state.run.selection
        count, super_batch = self.state.run.batch_size, self.state.run.read_batch
        scale, bias = self.state.objective.logit()
        own = self._features(image, batch.text, step=step)
        with true_fp32(world.device):
            features = [world.all_gather(values.float()) for values in (*own, guide.image, guide.text)]
            learner = View(features[0], features[1], math.exp(-scale), bias)
            reference = View(features[2], features[3], guide.tau, None if bias is None else self.reference.facts.bias)
            noise = gumbel_noise(config.chunks, super_batch, seed=self.state.run.seed, step=step).to(world.device)
            rows, learnability = select(learner, reference, count=count, chunks=config.chunks, noise=noise)
        metrics = {"learnability": learnability.mean(), "selected_learnability": learnability[rows].mean()}
        rows = world.broadcast(rows).cpu()  # other GPUs may round otherwise

        first, held, share = world.rank * len(image), len(image), count // world.size
        mine = ((rows >= first) & (rows < first + held)).nonzero()[:, 0]
        sends = (mine // share).bincount(minlength=world.size).tolist()
        receives = (rows[world.rows(share)] // held).bincount(minlength=world.size).tolist()
        here = rows[mine] - first

        def moved(values: Tensor) -> Tensor:
            return world.exchange(values[here.to(values.device)].to(world.device), sends=sends, receives=receives)

        kept = moved(image.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        text, ids = moved(batch.text).cpu(), moved(batch.sample_id).cpu()
        return replace(batch, image=kept, text=text, sample_id=ids), kept, metrics

    def _features(self, image: Tensor, text: Tensor, *, step: int) -> tuple[Tensor, Tensor]:
        """The learner's features of this rank's part, without a graph."""
        run, engine, device = self.state.run, self.state.engine, self.state.world.device
        lengths = None
        if self.trimming is not None:
            text, lengths = self.trimming.cut(text)
        micro_batch = run.engine.micro_batch or run.batch_size // self.state.world.size  # which fits the memory
        chunks = micro_batches(len(image), micro_batch)
        packed = run.model.text_batching == "packed"
        texts = TextChunks(text.to(device, non_blocking=True), chunks, lengths=lengths, packed=packed)
        of_images, of_texts, size = [], [], self.image_size
        smaller = nullcontext() if size is None else _at_size(engine.module.clip.visual, size)
        with torch.no_grad(), smaller, frozen_statistics(batch_norms_of(engine.module)):
            for index, rows in enumerate(chunks):
                part = self.normalized(image[rows])
                if size is not None:
                    part = F.interpolate(part, size=(size, size), mode="area")
                with seeded(run.seed, step, self.state.world.rank, index):
                    f_image, f_text = engine.forward(part, texts.tokens(index))
                of_images.append(f_image)
                of_texts.append(f_text)
        return torch.cat(of_images), texts.in_order(of_texts)


def open_selection(
    state: RunState, *, image_size: int, normalized: Callable[[Tensor], Tensor], trimming: TextTrimming | None
) -> Selection | None:
    """The selection of a run, which trains on images of `image_size`; None without one.

    Raises:
        UserError: The reference's features do not fit the run, or its images cannot have the size.
    """
    run, config = state.run, state.run.selection
    if config.ratio is None:
        return None
    digests = state.loader.mixture.digests
    reference = open_features(str(config.features), run, digests, setting="selection.features")
    if state.objective.logit()[1] is not None and reference.facts.bias is None:
        raise UserError(
            f"selection.features={config.features}: {run.objective.name} is scored by its sigmoid loss, for which the "
            "reference needs a bias, and its model has none. Use the features of a model that was trained with such a "
            "loss, or another objective.name."
        )
    size = config.image_size
    if size is not None:
        if size % (patch := _patch_of(state.engine.module.clip.visual)):
            raise UserError(
                f"selection.image_size={size} is not a multiple of this tower's patches of {patch} px: use "
                f"{max(patch, size // patch * patch)}, for example."
            )
        size = size if size < image_size else None
    return Selection(state=state, reference=reference, normalized=normalized, trimming=trimming, image_size=size)


def _patch_of(visual: Any) -> int:
    """Side of a ViT's patches in pixels, where `_at_size` can change the size of its images."""
    from open_clip.transformer import VisionTransformer

    if isinstance(visual, VisionTransformer) and visual.attn_pool is None:
        rows, columns = visual.patch_size
        if rows == columns and visual.positional_embedding.shape[0] == visual.grid_size[0] ** 2 + 1:
            return int(rows)
    raise UserError(
        "selection.image_size needs one of open_clip's own vision transformers on square images: leave it out."
    )


@contextmanager
def _at_size(visual: Any, size: int) -> Iterator[None]:
    """Inside, a ViT that `_patch_of` accepts takes images of `size` x `size` pixels."""
    embedding, side = visual.positional_embedding, size // _patch_of(visual)
    whole = embedding.data
    shape = torch.Size([side * side + 1, whole.shape[1]])
    embedding.data = resized("visual.positional_embedding", whole, shape=shape)
    try:
        yield
    finally:
        embedding.data = whole
