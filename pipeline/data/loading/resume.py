"""The data's part of a checkpoint: valid for any number of ranks and workers, with a check of the order."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.data.loading.accounting import Position, Tally, merge
from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.loading.worker import StreamDataset
from pipeline.data.order.canonical_order import CANONICAL, Order, order_hash, planned_ids
from pipeline.data.order.hashing import MASK
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.versions import version_of

DECODERS = ("simplejpeg", "pillow", "torch")
# Settings of checkpoints that were written before these were recorded.
_UNRECORDED = {"data.caption": "txt", "crops are drawn by": "sample"}
ANOTHER_ORDER = (
    "Batch {batch} of epoch {epoch} would not hold the checkpoint's samples although all settings are equal: this "
    "program computes another order. Resume with the version that wrote the checkpoint."
)
log = logging.getLogger(__name__)


def save_position(position: Position, dataset: StreamDataset, *, world: World) -> dict[str, Any]:
    """A position as plain values: a collective whose result is the same on every rank and for any number of ranks."""
    hashed, corrupt = merge(position, world)
    return {
        "epoch": position.epoch,
        "batch": position.batch,
        "order_hash": f"{hashed:016x}",
        "corrupt": [[reason, shard, count] for (reason, shard), count in sorted(corrupt.items())],
        "proof": _shared_proof(dataset, position, world),
        "order": dataset.order.identity,
        "pixels": _sample_identity(dataset),
    }


def restore_position(state: Mapping[str, Any], dataset: StreamDataset, *, world: World) -> Position:
    """The position that `save_position` stored; rank 0 takes over the counts so far.

    A different decoding is allowed with a warning: it changes pixels, not the order.

    Raises:
        UserError: This run's order differs from that of the state.
    """
    corrupt = Counter({(reason, shard): count for reason, shard, count in state["corrupt"]})
    position = Position(
        epoch=state["epoch"],
        batch=state["batch"],
        order_hash=int(state["order_hash"], 16) if world.is_main else 0,
        corrupt=Tally().plus(corrupt if world.is_main else Counter()),
    )
    check_place(state, dataset.order)
    before = {**_UNRECORDED, **state["pixels"]}
    if world.is_main and (changed := _differences(before, _sample_identity(dataset))):
        log.warning("Samples are decoded differently than before the checkpoint: %s.", "; ".join(changed))
    return position


def place_of(order: Order, position: Position) -> dict[str, Any]:
    """A position as plain values without the counts of corrupt samples, which need no other rank."""
    proof = _proof(order, position, range(order.layout.streams))
    return {"epoch": position.epoch, "batch": position.batch, "proof": proof, "order": order.identity}


def check_place(state: Mapping[str, Any], order: Order) -> Position:
    """The position in a state of `save_position` or `place_of`, without counts.

    Raises:
        UserError: `order` differs from that of the state.
    """
    if changed := _differences({"data.order": CANONICAL, **state["order"]}, order.identity):
        raise UserError(
            f"The checkpoint's data order cannot be continued: {'; '.join(changed)}. Restore these settings, or start "
            "a new run."
        )
    position = Position(epoch=state["epoch"], batch=state["batch"])
    if _proof(order, position, range(order.layout.streams)) != state["proof"]:
        raise UserError(ANOTHER_ORDER.format(batch=position.batch - 1, epoch=position.epoch))
    return position


def with_batch_size(state: Mapping[str, Any], dataset: StreamDataset) -> tuple[dict[str, Any], int]:
    """A stored position for this run's batch size: the streams go on after their last sample that was in a batch.

    The order within streams does not depend on the batch size, so that no sample of the epoch is shown twice. New
    batches begin at multiples of their size: up to one of them is skipped.

    Returns:
        The state for `restore_position`, and the number of samples skipped.

    Raises:
        UserError: This program computes another order than the one that wrote the state.
    """
    layout, before = dataset.order.layout, int(state["order"]["global batch"])
    if before % layout.streams or state["order"]["data.streams"] != layout.streams:
        return dict(state), 0  # other streams: `restore_position` refuses the state with the reason
    old = replace(dataset.order, layout=replace(layout, global_batch=before))
    everywhere = range(layout.streams)
    if _proof(old, Position(epoch=state["epoch"], batch=state["batch"]), everywhere) != state["proof"]:
        raise UserError(ANOTHER_ORDER.format(batch=state["batch"] - 1, epoch=state["epoch"]))
    turn = state["batch"] * old.layout.rows
    batch = min(-(-turn // layout.rows), layout.steps)
    skipped = max(0, batch * layout.rows - turn) * layout.streams
    proof = _proof(dataset.order, Position(epoch=state["epoch"], batch=batch), everywhere)
    order = {**state["order"], "global batch": layout.global_batch}
    return {**state, "batch": batch, "proof": proof, "order": order}, skipped


def _shared_proof(dataset: StreamDataset, position: Position, world: World) -> str:
    """`_proof` of the whole batch: a collective in which every rank computes the rows of its own streams."""
    parts = world.gather_objects(_proof(dataset.order, position, dataset.streams))
    return f"{sum(int(part, 16) for part in parts) & MASK:016x}" if position.batch else ""


def _proof(order: Order, position: Position, streams: range) -> str:
    """The order hash of some streams' rows in the last batch before a position, computed without reading data."""
    if not position.batch:
        return ""
    epoch, batch = position.epoch, position.batch - 1
    ids = planned_ids(order, epoch=epoch, first=batch, last=batch + 1, streams=streams)[0]
    return f"{order_hash(ids, epoch=epoch, batch=batch, first_row=streams.start * order.layout.rows):016x}"


def _sample_identity(dataset: StreamDataset) -> dict[str, Any]:
    """Everything else that determines pixels and captions."""
    captions = " ".join(dict.fromkeys(str(field) for field in dataset.captions))
    return {**pixel_identity(dataset.decoder), "data.caption": captions, "crops are drawn by": "row"}


def pixel_identity(decoder: ImageDecoder) -> dict[str, Any]:
    """Plain values that determine the pixels of an encoded image and a crop."""
    return {
        "image size": decoder.size,
        "data.crop": [*decoder.crop.scale, *decoder.crop.ratio],
        "data.decoding": decoder.mode,
        "data.max_pixels": decoder.max_pixels,
        **{f"{name} version": version_of(name) for name in DECODERS},
    }


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    return [f"{name} was {saved.get(name)}, now {value}" for name, value in own.items() if saved.get(name) != value]
