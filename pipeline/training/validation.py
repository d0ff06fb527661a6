"""The loss on held-out pairs: which pairs each rank reads, their features, and when the loss ends a run early."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.data.data_config import DataConfig
from pipeline.data.loading.stream_reader import SequentialReader
from pipeline.data.order.mixture import Segments, load_mixture
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, rgb_image
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.pictures.pixels import colour_of
from pipeline.training.recipe import ValidationConfig


class HeldOutPairs:
    """This rank's share of the validation pairs, read once and kept encoded in memory.

    The pairs are cut into batches of `BATCH_SIZE`, and every rank has consecutive batches, so that features and
    loss are bit-identical on any number of ranks.

    Args:
        config: Which pairs.
        data: What is trained on, and how captions and images are read.
        world: The ranks.
        report: Gets a sentence on rank 0, with the first validation.

    Raises:
        UserError: There are fewer than two pairs, a manifest is missing, or shards are trained on.
    """

    def __init__(
        self,
        config: ValidationConfig,
        data: DataConfig,
        world: World,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.data, self.world, self.report = config, data, world, report
        self.dropped: Counter[str] = Counter()
        """Pairs of this rank that cannot be used, by reason; known after the first validation."""
        self.mixture = load_mixture(replace(data, sources=config.sources))
        held = self.mixture.manifest.n
        self.n = held if config.samples is None else min(held, config.samples)
        """Pairs over all ranks, unusable ones included."""
        if self.n < 2:
            raise UserError("validation.sources hold fewer than two pairs, which a contrastive loss needs.")
        if set(self.mixture.digests) & set(load_mixture(data).digests):
            raise UserError(
                "validation.sources has shards that are trained on (data.sources): their loss says nothing about "
                "unseen pairs. Set pairs aside, for example with `neuclip pairs` on a table of their own."
            )

    def scores(self, model: EvaluationModel, *, tau: float) -> dict[str, float]:
        """The `validation_scores` of a model. Collective; the same on all ranks.

        Raises:
            UserError: Fewer than two pairs can be used.
        """
        is_first = "_batches" not in vars(self)
        image, text = self.features(model)
        if is_first:
            dropped = sum(self.world.gather_objects(self.dropped), Counter[str]())
            reasons = "".join(f", {count:,} dropped: {reason}" for reason, count in dropped.most_common())
            if len(image) < 2:
                raise UserError(
                    f"validation.sources have {len(image)} usable pairs{reasons}. A contrastive loss needs two: name "
                    "other shards, or validation.sources=[] for no validation."
                )
            self.report(f"Validation: {len(image):,} held-out pairs at temperature {tau:.4g}{reasons}.")
        return validation_scores(image, text, tau=tau, world=self.world)

    @torch.no_grad()
    def features(self, model: EvaluationModel) -> tuple[Tensor, Tensor]:
        """Unit-norm fp32 features of all usable pairs on the CPU, [n, d] of images and of texts. Collective."""
        device, background = next(model.towers.parameters()).device, colour_of(self.data.background)
        empty = torch.empty(0, model.dim)
        rows = [(empty, empty)]
        with ThreadPoolExecutor(min(8, self.world.cores)) as pool:
            for pairs in self._batches:
                images = list(pool.map(lambda pair: model.preprocess(rgb_image(pair[0], background=background)), pairs))
                text = model.tokenize([caption for _, caption in pairs])
                image = model.encode_image(torch.stack(images).to(device))
                rows.append((image.float().cpu(), model.encode_text(text.to(device)).float().cpu()))
                self.world.progress()
        sides = torch.stack([torch.cat(side) for side in zip(*rows, strict=True)], dim=1)
        # The ranks may have different numbers of rows.
        self.world.wait_for_all()
        counts: list[int] = self.world.gather_objects(len(sides))
        padded = F.pad(sides, (0, 0, 0, 0, 0, max(counts) - len(sides))).to(self.world.device)
        parts = self.world.all_gather(padded).cpu().split(max(counts))
        image, text = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).unbind(1)
        return image.contiguous(), text.contiguous()

    @cached_property
    def _batches(self) -> list[list[tuple[bytes, str]]]:
        """This rank's usable pairs, by batch."""
        size, segments = BATCH_SIZE, self._chosen()
        captions = tuple(CaptionField.parse(source.caption or self.data.caption) for source in self.config.sources)
        count = -(-self.n // size)
        first, last = (count * r // self.world.size for r in (self.world.rank, self.world.rank + 1))
        reader = SequentialReader(self.mixture, segments, self.data.retries, captions=captions)
        batches: list[list[tuple[bytes, str]]] = [[] for _ in range(first, last)]
        stop = min(last * size, self.n)
        records = reader.read(first * size)
        shards, _ = segments.locate(np.arange(first * size, stop))
        for position, (shard, record) in enumerate(zip(shards.tolist(), records, strict=False), first * size):
            try:
                if record.image is None:
                    raise CorruptSample(record.problem or "image is missing")
                caption = reader.caption(shard).read(record)
                rgb_image(record.image)
                self.world.progress()
                batches[position // size - first].append((record.image, caption))
            except CorruptSample as error:
                self.dropped[str(error)] += 1
        records.close()  # type: ignore[attr-defined]
        return [batch for batch in batches if batch]

    def _chosen(self) -> Segments:
        """The first pairs of every shard, in proportion to its size."""
        sizes = self.mixture.sizes
        ends = np.cumsum(sizes) * self.n // int(sizes.sum())
        counts = np.diff(ends, prepend=0)
        shard = np.flatnonzero(counts)
        return Segments(shard=shard, start=np.zeros_like(shard), position=(ends - counts)[shard], length=self.n)


ROWS = 1024
"""Rows of the similarity matrix that are computed at a time."""
BATCH_SIZE = 64
"""Pairs that a rank encodes at a time."""
STOPPED_EARLY = "Stopped early"
"""Beginning of the message when `validation.patience` ends a run."""


@dataclass
class ValidationHistory:
    """The best validation so far; part of every checkpoint."""

    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0
    """Validations since the best one."""
    step: int = 0
    """Step of the last validation."""

    def add(self, loss: float, *, step: int) -> None:
        """Record a validation; a loss that is not finite is never the best."""
        self.step = step
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.since_best = loss, step, 0
        else:
            self.since_best += 1

    def ends_run(self, patience: int | None) -> bool:
        return patience is not None and self.since_best >= patience

    def describe_end(self) -> str:
        """A message for the log when `ends_run`."""
        wanted = "finite loss"
        if self.best_loss is not None:
            wanted = f"lower loss than {self.best_loss:.4f} at step {self.best_step}"
        return (
            f"{STOPPED_EARLY}: {self.since_best} validations in a row without a {wanted} (validation.patience). To "
            "train on: --resume latest validation.patience=null."
        )


def validation_scores(image: Tensor, text: Tensor, *, tau: float, world: World | None = None) -> dict[str, float]:
    """The loss of all pairs against each other, and the share whose own partner is the nearest. Collective.

    Args:
        image: [n, d] unit-norm features, the same on all ranks.
        text: [n, d]; row i belongs to image i.
        tau: Temperature.
        world: The ranks, which take the blocks of rows in turn; None: this one.

    Returns:
        `loss`, the mean of both directions' cross-entropies (CLIP, arXiv:2103.00020, figure 3, with n for the batch);
        `image_to_text_r1`, `text_to_image_r1`; and `pairs`, which is n. Bit-identical on any number of ranks.
    """
    world = world or World()
    blocks, own = range(0, len(image), ROWS), []
    for start in blocks[world.rank :: world.size]:
        own.append([_block(*side, start, tau=tau) for side in ((image, text), (text, image))])
        world.progress()
    world.wait_for_all()
    gathered = world.gather_objects(own)
    parts = [gathered[number % world.size][number // world.size] for number in range(len(blocks))]
    losses, hits = ([sum(part[side][k] for part in parts) / len(image) for side in (0, 1)] for k in (0, 1))
    return {
        "loss": sum(losses) / 2,
        "image_to_text_r1": hits[0],
        "text_to_image_r1": hits[1],
        "pairs": float(len(image)),
    }


def _block(queries: Tensor, candidates: Tensor, start: int, *, tau: float) -> tuple[float, int]:
    """Summed cross-entropy and number of hits of the block of queries from `start` on."""
    logits = queries[start : start + ROWS] @ candidates.T / tau
    target = torch.arange(start, start + len(logits))
    loss = F.cross_entropy(logits.double(), target, reduction="sum")
    return float(loss), int((logits.argmax(1) == target).sum())
