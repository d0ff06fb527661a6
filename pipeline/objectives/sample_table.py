"""Per-sample state: one row of fp32 numbers for every sample of the dataset, sharded over the ranks by sample id.

Rank k owns the contiguous ids `[k c, (k + 1) c)`, c = ceil(n / K). A lookup is one all-gather of the batch's ids and
one all-reduce of its rows, O(B) scalars; a write needs no communication, because every rank computes the new rows of
the whole batch and keeps those that it owns. Memory: 4 bytes per column and sample over all ranks together: at n = 1
billion 8 GB with two columns and 36 GB with nine, divided by K.

Rows are in host memory. `prefetch` starts to copy the ids to the host before the encoders' forward pass; a
write is copied to pinned memory at commit and enters the table before the next lookup, so the device never waits.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import UserError

BLOCK = 2**22
"""Rows that are read or written at once."""


class PerSampleTable:
    """A row of fp32 columns (name -> initial value) for each of `dataset_size` samples; this rank holds those of its
    own ids. Lookups and writes happen on `device`."""

    def __init__(self, columns: Mapping[str, float], *, dataset_size: int, world: World, device: torch.device) -> None:
        if dataset_size < 1:
            raise UserError(f"dataset_size = {dataset_size}: methods with per-sample state need the number of samples.")
        self.columns, self.dataset_size, self.world, self.device = tuple(columns), dataset_size, world, device
        share = -(-dataset_size // world.size)
        self.start = min(world.rank * share, dataset_size)
        self.stop = min(self.start + share, dataset_size)
        self.home = device if device.type == "meta" else torch.device("cpu")
        self._pinned = self.home.type == "cpu" and device.type == "cuda"
        # One extra row receives the writes and reads of other ranks' ids, which keeps shapes static.
        shape = (self.stop - self.start + 1, len(columns))
        self.values = torch.empty(shape, dtype=torch.float32, device=self.home)
        self.values[:] = torch.tensor(list(columns.values()), dtype=torch.float32, device=self.home)
        self._copies = torch.cuda.Stream(device) if self._pinned else None
        self._fetching: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None
        self._unwritten: tuple[Tensor, Tensor, torch.cuda.Event | None] | None = None
        self._places: Tensor | None = None
        self._lock = threading.Lock()
        self._snapshots: weakref.WeakSet[TableSnapshot] = weakref.WeakSet()

    def prefetch(self, sample_ids: Tensor) -> None:
        """Gather the next batch's ids, [b] int64, and start to copy them to the table's device.

        Only a `lookup` of the same tensor object uses them.
        """
        ids = self.world.all_gather(sample_ids.to(self.device, non_blocking=True))
        self._fetching = (sample_ids, *self._send_home(ids))

    def lookup(self, sample_ids: Tensor) -> Tensor:
        """The rows of the global batch, [B, columns], the same on every rank, by this rank's ids, [b] int64.

        Raises:
            UserError: An id is outside [0, n).
        """
        if self._fetching is None or self._fetching[0] is not sample_ids:
            self.prefetch(sample_ids)
        assert self._fetching is not None
        (_, ids, arrived), self._fetching = self._fetching, None
        if arrived is not None:
            arrived.synchronize()
        if ids.device.type == "cpu":  # elsewhere, a check would wait for the device
            lowest, highest = int(ids.min()), int(ids.max())
            if lowest < 0 or highest >= self.dataset_size:
                raise UserError(
                    f"Sample ids from {lowest} to {highest} do not fit a dataset of {self.dataset_size} samples: ids "
                    "must be in [0, n), where n is the size in the manifest."
                )
        self._flush()
        owned = (ids >= self.start) & (ids < self.stop)
        self._places = torch.where(owned, ids - self.start, self.values.shape[0] - 1)
        rows = torch.where(owned[:, None], self.values[self._places], 0.0)
        rows = rows.pin_memory() if self._pinned else rows
        return self.world.all_reduce(rows.to(self.device, non_blocking=True))

    def write(self, rows: Tensor) -> None:
        """Replace the rows of the batch last looked up, [B, columns]; of an id that occurs twice the later row
        counts."""
        assert self._places is not None, "write() follows lookup()"
        self._flush()
        self._unwritten = (self._places, *self._send_home(rows.to(torch.float32)))

    def owned(self) -> Tensor:
        """This rank's rows, `[stop - start, columns]`: a view of the table."""
        self._flush()
        return self.values[:-1]

    def snapshot(self) -> TableSnapshot:
        """The owned rows as they are now, to be read block by block from any thread while training continues."""
        self._flush()
        snapshot = TableSnapshot(self.values, self._lock)
        self._snapshots.add(snapshot)
        return snapshot

    def load(self, name: str, read: Callable[[str, int, int], Tensor]) -> None:
        """Replace the owned rows with `read(name, start, stop)`, in blocks.

        Raises:
            UserError: The rows have other columns.
        """
        self._unwritten = self._fetching = None
        if any(not snapshot.finished for snapshot in self._snapshots):
            raise RuntimeError("rows are being saved: wait for the checkpoint before loading another")
        for start in range(self.start, self.stop, BLOCK):
            stop = min(start + BLOCK, self.stop)
            rows = read(name, start, stop)
            if tuple(rows.shape) != (stop - start, len(self.columns)):
                raise UserError(
                    f"The saved {name} gave {tuple(rows.shape)} for {stop - start} samples, but this method keeps "
                    f"{len(self.columns)} columns ({', '.join(self.columns)}). Resume with the method and the "
                    "dataset that the checkpoint was written with."
                )
            self.values[start - self.start : stop - self.start] = rows.to(self.values)

    def _send_home(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """A copy on the table's device, and the event that marks its arrival."""
        if self._copies is None:
            return tensor.to(self.home), None
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._copies):
            home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            home.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._copies)
            return home, self._copies.record_event()

    def _flush(self) -> None:
        """Apply the last write to the table."""
        if self._unwritten is None:
            return
        (places, rows, arrived), self._unwritten = self._unwritten, None
        if arrived is not None:
            arrived.synchronize()
        order = places.argsort(stable=True)
        places, rows = places[order], rows[order]
        last = torch.ones_like(places, dtype=torch.bool)
        last[:-1] = places[1:] != places[:-1]
        with self._lock:
            for snapshot in self._snapshots:
                snapshot.keep(places)
            self.values[torch.where(last, places, self.values.shape[0] - 1)] = rows


class TableSnapshot:
    """A table's rows at one moment, without a second table: rows that are about to change are copied first.

    It can be iterated once and yields blocks of rows as copies on the host. Memory: one block, and the rows that
    training writes meanwhile.
    """

    def __init__(self, values: Tensor, lock: threading.Lock) -> None:
        self._values, self._lock = values, lock
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._next = 0  # first row that has not been read
        self.finished = False

    def keep(self, places: Tensor) -> None:
        """Copy rows of the table that are about to change; the caller holds the lock."""
        if not self.finished:
            ahead = places[(places >= self._next) & (places < len(self._values) - 1)]
            self._kept.append((ahead, self._values[ahead]))

    def __iter__(self) -> Iterator[Tensor]:
        try:
            for start in range(0, len(self._values) - 1, BLOCK):
                stop = min(start + BLOCK, len(self._values) - 1)
                with self._lock:
                    rows = self._values[start:stop].to("cpu", copy=True)
                    self._next, kept = stop, list(self._kept)
                for places, before in reversed(kept):  # the oldest copy of a row wins
                    here = (places >= start) & (places < stop)
                    rows[(places[here] - start).cpu()] = before[here].cpu()
                yield rows
        finally:
            with self._lock:
                self.finished = True
                self._kept.clear()
