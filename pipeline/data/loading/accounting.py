"""Where a run stands in its data, what it has used and what it had to leave out: counted per rank, merged on demand."""

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
    """Counts of which every state stays valid while they grow: a batch copies few of them, not all.

    chunks: addends, each more than twice as large as the next.
    """

    chunks: tuple[Counts, ...] = ()
    total: int = 0

    def plus(self, fresh: Counts) -> Tally:
        if not fresh:
            return self
        chunks = [*self.chunks, fresh]
        while len(chunks) > 1 and len(chunks[-2]) <= 2 * len(chunks[-1]):
            chunks[-2:] = [chunks[-2] + chunks[-1]]
        return Tally(tuple(chunks), self.total + fresh.total())

    def counts(self) -> Counts:
        return sum(self.chunks, Counts())


@dataclass(frozen=True)
class Position:
    """Where a run stands after a batch: the next batch is number `batch` of epoch `epoch`, or the first of the next
    one.

    order_hash: of all batches of this epoch so far; this rank's addend. corrupt: (reason, shard) -> corrupt samples of
    this epoch so far, seen by this rank; each was replaced by another sample.
    """

    epoch: int = 0
    batch: int = 0
    order_hash: int = 0
    corrupt: Tally = field(default_factory=Tally)


@dataclass(frozen=True)
class DataReport:
    """The accounts of an epoch up to a position, over all ranks; every value is plain.

    samples: rows handed out so far. planned_samples: rows of the whole epoch. dropped: samples of the epoch that fill
      no batch. replaced: rows whose own sample was corrupt and that show another one again; also the number of corrupt
      samples. order_hash: which samples were in which rows. corrupt_by_shard: the worst shards.
    """

    epoch: int
    batch: int
    samples: int
    planned_samples: int
    dropped: int
    replaced: int
    corrupt_by_reason: dict[str, int]
    corrupt_by_shard: dict[str, int]
    order_hash: str

    def check(self, limit: float) -> DataReport:
        """This report. Raises: UserError when more than `limit` of the samples so far are corrupt, naming shards."""
        if too_many(self.replaced, samples=self.samples, planned=self.planned_samples, limit=limit):
            raise UserError(
                f"{self.replaced} of the first {self.samples} samples of epoch {self.epoch} are corrupt, more than "
                f"data.corrupt_limit = {limit:g} allows: "
                f"{_named(self.corrupt_by_reason)}. Worst shards: {_named(self.corrupt_by_shard)}. "
                "Check them with `neuclip verify`, fetch them again, or raise the limit."
            )
        return self


def too_many(corrupt: int, *, samples: int, planned: int, limit: float) -> bool:
    """Whether more than `limit` of an epoch's samples so far are corrupt.

    Early in an epoch one lost shard weighs much: a share is of its first tenth at least, or of 10,000 samples.
    """
    return corrupt > limit * max(samples, min(planned, max(planned // 10, LEAST_JUDGED)))


def replaced(position: Position, layout: Layout, world: World, *, limit: float) -> int:
    """Corrupt samples of the epoch so far: a collective of one number, and a whole report when they are too many.

    Raises: UserError on every rank, as `DataReport.check`.
    """
    total = sum(world.gather_objects(position.corrupt.total))
    samples, planned = position.batch * layout.global_batch, layout.steps * layout.global_batch
    if too_many(total, samples=samples, planned=planned, limit=limit):
        report(position, layout, world).check(limit)
    return total


def merge(position: Position, world: World) -> tuple[int, Counter[tuple[str, str]]]:
    """Order hash and corrupt samples of all ranks: a collective, the same result on every rank."""
    everyone = world.gather_objects((position.order_hash, position.corrupt.counts()))
    corrupt = sum((counts for _, counts in everyone), Counts())
    return sum(hashed for hashed, _ in everyone) & MASK, corrupt


def report(position: Position, layout: Layout, world: World) -> DataReport:
    """The accounts of all ranks at a position: a collective."""
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
