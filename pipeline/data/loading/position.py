"""The position in the data, with counts of corrupt samples, and what has to be equal for a run to continue from it.

Every rank keeps its own counts, which are merged on request. A saved position is valid for any number of ranks and
workers, and proves its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.order.canonical_order import CANONICAL, Layout, Order, planned_ids
from pipeline.data.order.mixture import MASK, order_hash
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.pictures.pixels import colour_name
from pipeline.versions import version_of

Counts = Counter[tuple[str, str]]
NAMED_SHARDS = 10
LEAST_JUDGED = 10_000


@dataclass(frozen=True)
class Position:
    """The position after a batch: the next one is number `batch` of `epoch`, or the first of the next epoch."""

    epoch: int = 0
    batch: int = 0
    order_hash: int = 0
    """This rank's summand of the hash of all batches of this epoch so far."""
    corrupt: Counts = field(default_factory=Counts)
    """Corrupt samples that this rank replaced in this epoch so far, by (reason, shard)."""
    judged: int = 0
    """Corrupt samples of all ranks in this epoch for which an earlier start has stopped: only further ones stop it."""


@dataclass(frozen=True)
class DataReport:
    """Counts of an epoch up to a position, over all ranks, as plain values."""

    epoch: int
    batch: int
    samples: int
    """Rows returned so far, of `planned_samples` of the whole epoch."""
    planned_samples: int
    dropped: int
    """Samples of the epoch that are in no batch."""
    replaced: int
    """Corrupt samples; the row of each showed another sample."""
    corrupt_by_reason: dict[str, int]
    corrupt_by_shard: dict[str, int]
    """The shards with the most corrupt samples."""
    order_hash: str
    """Hash of which samples were in which rows."""


def has_too_many(corrupt: int, position: Position, layout: Layout, *, limit: float) -> bool:
    """Whether more than `limit` of an epoch's samples up to a position are corrupt: of at least a tenth of the epoch or
    10,000, since a single lost shard would be a large share early in an epoch.
    """
    samples, planned = (batches * layout.global_batch for batches in (position.batch, layout.steps))
    return corrupt > limit * max(samples, min(planned, max(planned // 10, LEAST_JUDGED)))


def merged(position: Position, world: World) -> tuple[str, Counts]:
    """Order hash and corrupt samples of all ranks: a collective with the same result on every rank."""
    everyone = world.gather_objects((position.order_hash, position.corrupt))
    hashed = sum(hashed for hashed, _ in everyone) & MASK
    return f"{hashed:016x}", sum((counts for _, counts in everyone), Counts())


def report(position: Position, layout: Layout, world: World, *, limit: float) -> DataReport:
    """The counts of all ranks at a position: a collective. UserError with reasons and the worst shards if more than
    `limit` of the samples so far are corrupt.
    """
    hashed, corrupt = merged(position, world)
    reasons, shards = Counter[str](), Counter[str]()
    for (reason, shard), count in corrupt.items():
        reasons[reason] += count
        shards[shard] += count
    result = DataReport(
        epoch=position.epoch,
        batch=position.batch,
        samples=position.batch * layout.global_batch,
        planned_samples=layout.steps * layout.global_batch,
        dropped=layout.dropped,
        replaced=reasons.total(),
        corrupt_by_reason=dict(_ranked(reasons)),
        corrupt_by_shard=dict(_ranked(shards)[:NAMED_SHARDS]),
        order_hash=hashed,
    )
    new = result.replaced - position.judged
    if has_too_many(new, position, layout, limit=limit):
        since = f" ({new} of them since this start)" if position.judged else ""
        raise UserError(
            f"{result.replaced} of the first {result.samples} samples of epoch {result.epoch}{since} are corrupt, more "
            f"than data.corrupt_limit = {limit:g} allows: {_named(result.corrupt_by_reason)}. Worst shards: "
            f"{_named(result.corrupt_by_shard)}. Check them with `neuclip verify`, download them again, or raise the "
            "limit."
        )
    return result


def _ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _named(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


DECODERS = ("simplejpeg", "pillow", "torch")


def place_of(order: Order, position: Position) -> dict[str, Any]:
    """A position as plain values, but for the counts of corrupt samples."""
    proof = _proof(order, position)
    return {"epoch": position.epoch, "batch": position.batch, "proof": proof, "order": order.identity}


def check_place(state: Mapping[str, Any], order: Order) -> Position:
    """The position in what `place_of` returned, without counts; UserError if it is of another order."""
    before = {"data.order": CANONICAL, "data.replacement": False, **state["order"]}  # earlier versions had the second
    if changed := differences(before, {**order.identity, "data.replacement": False}):
        raise UserError(
            f"The checkpoint's data order cannot be continued: {'; '.join(changed)}. Restore these settings, or start "
            "a new run."
        )
    position = Position(epoch=index(state["epoch"]), batch=index(state["batch"]))
    is_valid = position.epoch >= 0 and 0 <= position.batch <= order.layout.steps
    if not is_valid or _proof(order, position) != state["proof"]:
        raise UserError(
            f"Batch {position.batch - 1} of epoch {position.epoch} would not hold the checkpoint's samples although "
            "all settings are equal: this program computes another order. Resume with the version that wrote the "
            "checkpoint."
        )
    return position


def _proof(order: Order, position: Position) -> str:
    """The order hash of the last batch before a position, computed without reading data."""
    if not position.batch:
        return ""
    epoch, batch = position.epoch, position.batch - 1
    ids = planned_ids(order, epoch=epoch, first=batch, last=batch + 1)[0]
    return f"{order_hash(ids, epoch=epoch, batch=batch, first_row=0):016x}"


def pixel_identity(decoder: ImageDecoder) -> dict[str, Any]:
    """Plain values that determine the pixels of an encoded image and a crop."""
    augment, colours = decoder.augment, []
    if augment is not None:
        colours = [*augment.color_jitter, augment.color_jitter_prob, augment.gray_scale_prob]
    return {
        "image size": decoder.size,
        "data.crop": [*decoder.crop.scale, *decoder.crop.ratio],
        "data.background": colour_name(decoder.background),
        "data.decoding": f"gpu ({decoder.gpu})" if decoder.gpu else decoder.mode,
        "data.augment": colours or "off",
        **{f"{name} version": version_of(name) for name in DECODERS},
    }


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What has changed since a checkpoint, in words; those of earlier versions have neither of the first two."""
    saved = {"data.background": "white", "data.augment": "off", **saved}
    return [f"{name} was {saved.get(name)}, now {value}" for name, value in own.items() if saved.get(name) != value]
