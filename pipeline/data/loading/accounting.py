"""Position in the data and counts of corrupt samples: kept per rank, merged over ranks on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.data.order.hashing import MASK
from pipeline.data.order.streams import Layout
from pipeline.distributed.world import World
from pipeline.errors import UserError

Counts = Counter[tuple[str, str]]
NAMED_SHARDS = 10
LEAST_JUDGED = 10_000


@dataclass(frozen=True)
class Tally:
    """An immutable sum of counters. Adding a batch's counts copies few of the earlier ones, not all."""

    chunks: tuple[Counts, ...] = ()
    """The summands, each more than twice as large as the next."""
    total: int = 0

    def plus(self, fresh: Counts) -> Tally:
        """This tally and `fresh`; this one stays valid."""
        if not fresh:
            return self
        chunks = [*self.chunks, fresh]
        while len(chunks) > 1 and len(chunks[-2]) <= 2 * len(chunks[-1]):
            chunks[-2:] = [chunks[-2] + chunks[-1]]
        return Tally(tuple(chunks), self.total + fresh.total())

    def counts(self) -> Counts:
        """All counts as one counter."""
        return sum(self.chunks, Counts())


@dataclass(frozen=True)
class Position:
    """The position after a batch: the next one is number `batch` of `epoch`, or the first of the next epoch."""

    epoch: int = 0
    batch: int = 0
    order_hash: int = 0
    """This rank's summand of the hash of all batches of this epoch so far."""
    corrupt: Tally = field(default_factory=Tally)
    """Corrupt samples that this rank replaced in this epoch so far, by (reason, shard)."""


@dataclass(frozen=True)
class DataReport:
    """Counts of an epoch up to a position, over all ranks, as plain values."""

    epoch: int
    batch: int
    samples: int
    """Rows returned so far."""
    planned_samples: int
    """Rows of the whole epoch."""
    dropped: int
    """Samples of the epoch that are in no batch."""
    replaced: int
    """Corrupt samples; the row of each showed another sample."""
    corrupt_by_reason: dict[str, int]
    corrupt_by_shard: dict[str, int]
    """The shards with the most corrupt samples."""
    order_hash: str
    """Hash of which samples were in which rows."""

    def check(self, limit: float) -> DataReport:
        """Return this report if at most `limit` of the samples so far are corrupt.

        Raises:
            UserError: More are; the message names the reasons and the worst shards.
        """
        if too_many(self.replaced, samples=self.samples, planned=self.planned_samples, limit=limit):
            raise UserError(
                f"{self.replaced} of the first {self.samples} samples of epoch {self.epoch} are corrupt, more than "
                f"data.corrupt_limit = {limit:g} allows: {_named(self.corrupt_by_reason)}. Worst shards: "
                f"{_named(self.corrupt_by_shard)}. Check them with `neuclip verify`, download them again, or raise the "
                "limit."
            )
        return self


def too_many(corrupt: int, *, samples: int, planned: int, limit: float) -> bool:
    """Whether more than `limit` of an epoch's samples so far are corrupt.

    Early in an epoch a single lost shard would be a large share, so the share is taken of at least a tenth of the epoch
    or 10,000 samples.
    """
    return corrupt > limit * max(samples, min(planned, max(planned // 10, LEAST_JUDGED)))


def replaced(position: Position, layout: Layout, world: World, *, limit: float) -> int:
    """Corrupt samples of the epoch so far: a collective of one number, plus a full report if there are too many.

    Raises:
        UserError: Too many samples are corrupt; raised on every rank.
    """
    total = sum(world.gather_objects(position.corrupt.total))
    samples, planned = position.batch * layout.global_batch, layout.steps * layout.global_batch
    if too_many(total, samples=samples, planned=planned, limit=limit):
        report(position, layout, world).check(limit)
    return total


def merge(position: Position, world: World) -> tuple[int, Counter[tuple[str, str]]]:
    """Order hash and corrupt samples of all ranks: a collective with the same result on every rank."""
    everyone = world.gather_objects((position.order_hash, position.corrupt.counts()))
    corrupt = sum((counts for _, counts in everyone), Counts())
    return sum(hashed for hashed, _ in everyone) & MASK, corrupt


def report(position: Position, layout: Layout, world: World) -> DataReport:
    """The counts of all ranks at a position: a collective."""
    hashed, corrupt = merge(position, world)
    reasons: Counter[str] = Counter()
    shards: Counter[str] = Counter()
    for (reason, shard), count in corrupt.items():
        reasons[reason] += count
        shards[shard] += count
    return DataReport(
        epoch=position.epoch,
        batch=position.batch,
        samples=position.batch * layout.global_batch,
        planned_samples=layout.steps * layout.global_batch,
        dropped=layout.dropped,
        replaced=reasons.total(),
        corrupt_by_reason=dict(_ranked(reasons)),
        corrupt_by_shard=dict(_ranked(shards)[:NAMED_SHARDS]),
        order_hash=f"{hashed:016x}",
    )


def _ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())
