"""The held-out pairs of a validation: which pairs each rank reads, and their features."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.data_config import DataConfig
from pipeline.data.loading.stream_reader import SequentialReader
from pipeline.data.order.mixture import Mixture, Segments, load_mixture
from pipeline.data.shards.caption_field import CaptionField
from pipeline.data.shards.rgb_image import rgb_image
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.training.validation_config import ValidationConfig


@dataclass
class HeldOutPairs:
    """This rank's share of the validation pairs, read once and kept encoded in memory.

    The pairs are cut into batches of `config.batch_size`, and every rank has consecutive batches, so that features and
    loss are bit-identical on any number of ranks.
    """

    config: ValidationConfig
    data: DataConfig
    world: World
    dropped: Counter[str] = field(default_factory=Counter)
    """Pairs of this rank that cannot be used, by reason; known after the first validation."""

    def __post_init__(self) -> None:
        chosen = self.mixture  # raises if a manifest is missing
        if self.n < 2:
            raise UserError("validation.sources hold fewer than two pairs, which a contrastive loss needs.")
        shared = set(chosen.digests) & set(load_mixture(self.data).digests)
        if shared:
            raise UserError(
                "validation.sources has shards that are trained on (data.sources): their loss says nothing about "
                "unseen pairs. Set pairs aside, for example with `neuclip pairs` on a table of their own."
            )

    @cached_property
    def mixture(self) -> Mixture:
        return load_mixture(replace(self.data, sources=self.config.sources))

    @property
    def n(self) -> int:
        """Number of validation pairs over all ranks, unusable ones included."""
        held = self.mixture.manifest.n
        return held if self.config.samples is None else min(held, self.config.samples)

    def all_dropped(self) -> Counter[str]:
        """Unusable pairs of all ranks by reason. Collective."""
        return sum(self.world.gather_objects(self.dropped), Counter[str]())

    @torch.no_grad()
    def features(self, model: EvaluationModel) -> tuple[Tensor, Tensor]:
        """Unit-norm fp32 features of all usable pairs on the CPU, [n, d] of images and of texts. Collective."""
        device = next(model.towers.parameters()).device
        rows: list[tuple[Tensor, Tensor]] = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for pairs in self._batches:
                images = list(pool.map(lambda pair: model.preprocess(rgb_image(pair[0])), pairs))
                text = model.tokenize([caption for _, caption in pairs])
                image = model.encode_image(torch.stack(images).to(device))
                rows.append((image.float().cpu(), model.encode_text(text.to(device)).float().cpu()))
        empty = torch.empty(0, model.dim)
        sides = [torch.cat([empty, *side]) for side in zip(*rows, strict=True)] if rows else [empty, empty]
        return self._gather(sides[0]), self._gather(sides[1])

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, which may have different numbers of them, in rank order."""
        counts: list[int] = self.world.gather_objects(len(rows))
        padded = F.pad(rows, (0, 0, 0, max(counts) - len(rows))).to(self.world.device)
        parts = self.world.all_gather(padded).cpu().split(max(counts))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @cached_property
    def _batches(self) -> list[list[tuple[bytes, str]]]:
        """This rank's usable pairs, by batch."""
        size, captions = self.config.batch_size, self._captions()
        count = -(-self.n // size)
        first, last = (count * r // self.world.size for r in (self.world.rank, self.world.rank + 1))
        segments = self._chosen()
        reader = SequentialReader(
            self.mixture.manifest, segments, self.data.retries, captions=captions, bounds=self.mixture.bounds[:-1]
        )
        batches: list[list[tuple[bytes, str]]] = [[] for _ in range(first, last)]
        stop = min(last * size, self.n)
        records = reader.read(first * size)
        for position, record in zip(range(first * size, stop), records, strict=False):
            try:
                if record.image is None:
                    raise CorruptSample(record.problem or "image is missing")
                caption = reader.caption(segments.locate(position)[0]).read(record)
                rgb_image(record.image)
                batches[position // size - first].append((record.image, caption))
            except CorruptSample as error:
                self.dropped[str(error)] += 1
        records.close()  # type: ignore[attr-defined]
        return [batch for batch in batches if batch]

    def _captions(self) -> tuple[CaptionField, ...]:
        return tuple(CaptionField.parse(source.caption or self.data.caption) for source in self.config.sources)

    def _chosen(self) -> Segments:
        """The first pairs of every shard, in proportion to its size."""
        sizes = self.mixture.sizes
        ends = np.cumsum(sizes) * self.n // int(sizes.sum())
        counts = np.diff(ends, prepend=0)
        shard = np.flatnonzero(counts)
        return Segments(shard=shard, start=np.zeros_like(shard), position=(ends - counts)[shard], length=self.n)
