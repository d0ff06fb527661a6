"""Read the records of one stream: sequentially, with retries, into the bounded buffer that its shuffle needs."""

from __future__ import annotations

import bisect
import errno
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pipeline.data.order.canonical_order import StreamOrder
from pipeline.data.order.mixture import Mixture, Segments
from pipeline.data.shards.manifest_format import Shard
from pipeline.data.shards.storage import StreamHash, is_local, load_index, open_records
from pipeline.data.shards.tar_reader import CaptionField, DamagedTar, TarRecord
from pipeline.errors import UserError

TRUNCATED = "shard is damaged or shorter than its manifest says"
ALTERED = "shard has other bytes than its manifest says"
READ_AHEAD = 2  # shuffle buffers that a search for a substitute may read ahead
log = logging.getLogger(__name__)


@dataclass
class SequentialReader:
    """Samples at consecutive positions of an epoch, across shards. Bad data does not raise: the record says why.

    A shard that fails is opened again at the sample where it failed. After `retries` further failures without a new
    sample, with growing pauses, its remaining samples are lost for the rest of the epoch.
    """

    mixture: Mixture
    segments: Segments
    retries: int
    captions: tuple[CaptionField, ...]
    """Where captions are, by source."""
    altered_shards: Literal["stop", "skip", "ignore"] = "ignore"
    """See DataConfig."""
    pause: Callable[[float], None] = time.sleep
    on_sample: Callable[[int], None] = lambda sample_id: None
    """Called with the id of each sample that a `StreamReader` is about to read."""
    lost: dict[int, tuple[int, str]] = field(default_factory=dict)
    """Shard number -> first lost sample, and the reason."""
    altered: set[int] = field(default_factory=set)
    """Numbers of shards whose bytes differ from their manifest."""

    def read(self, position: int) -> Iterator[TarRecord]:
        """Records from `position` to the end of the epoch, read as they are taken."""
        segments, m = self.segments, len(self.segments.position)
        for i in range(int(segments.position.searchsorted(position, side="right")) - 1, m):
            start = int(segments.start[i]) + position - int(segments.position[i])
            stop = int(segments.position[i + 1]) if i + 1 < m else segments.length
            yield from self._read_shard(int(segments.shard[i]), start, stop - position)
            position = stop

    def caption(self, shard: int) -> CaptionField:
        """Where the captions of a shard's samples are."""
        return self.captions[self._source(shard)]

    def _source(self, shard: int) -> int:
        return bisect.bisect_right(self.mixture.bounds, shard) - 1

    def _read_shard(self, shard: int, start: int, count: int) -> Iterator[TarRecord]:
        """`count` records of one shard from sample `start` on."""
        stored, source = self.mixture.manifest.shards[shard], self._source(shard)
        url = self.mixture.manifest.url(stored)
        index = load_index(self.mixture.folders[source], sha256=stored.sha256, samples=stored.samples)
        suffix, size = self.captions[source].suffix, stored.bytes / stored.samples
        common: dict[str, Any] = {"caption_suffix": suffix, "sample_bytes": size, "index": index}
        stop, failures, opened = start + count, 0, start
        while start < stop and start < self.lost.get(shard, (stop, ""))[0]:
            stream_hash = StreamHash() if stored.sha256 and self.altered_shards != "ignore" else None
            try:
                with open_records(url, skip=start, stream_hash=stream_hash, **common) as records:
                    for record in records:
                        start += 1
                        # Before the last sample is passed on: a stream is not read any further at the end of an epoch.
                        if start == stored.samples and stream_hash is not None:
                            self._check(shard, stored, stream_hash.finish())
                        yield TarRecord(problem=ALTERED) if shard in self.altered else record
                        if start == stop:
                            return
                raise DamagedTar("ends too early")
            except UserError:
                raise
            except Exception as error:  # every remote file system has exceptions of its own
                if is_local(url) and not isinstance(error, (OSError, DamagedTar)):
                    raise
                if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                    raise UserError(  # a limit of this machine, not the shard
                        f"This process cannot open more shards ({error.strerror}). Every stream keeps one open: raise "
                        "`ulimit -n`, lower data.streams, or raise data.workers, which share the streams."
                    ) from error
                failures, opened = (failures if start == opened else 0), start
                is_damaged = isinstance(error, DamagedTar)
                reason = TRUNCATED if is_damaged else f"shard cannot be read ({type(error).__name__})"
                if failures < self.retries:
                    self.pause(min((0.1 if is_local(url) else 1.0) * 4**failures, 30.0))
                else:
                    self.lost[shard] = (start, reason)
                    log.warning("%s: %s from sample %d on: %s", url, reason, start, error)
                failures += 1
        for _ in range(stop - start):
            yield TarRecord(problem=self.lost[shard][1])

    def _check(self, number: int, shard: Shard, digest: str | None) -> None:
        if digest in (None, shard.sha256):
            return
        message = (
            f"The bytes of the shard {self.mixture.manifest.url(shard)} are not those of its manifest: SHA-256 "
            f"{digest} instead of {shard.sha256}. Each of its {shard.samples} samples, ids {shard.offset} to "
            f"{shard.offset + shard.samples - 1}, may have another image or caption than was stored, also where this "
            "run has used it."
        )
        if self.altered_shards == "stop":
            raise UserError(
                f"{message} Restore the shard (`neuclip verify` says how), write a new manifest (`neuclip manifest "
                "--replace`), or set data.altered_shards=skip."
            )
        self.altered.add(number)
        self.lost[number] = (0, ALTERED)
        log.warning("%s Those that were not shown yet are replaced.", message)


class StreamSample(NamedTuple):
    """A sample of a stream. It may have been read before its shard turned out to be altered."""

    id: int
    shard: int
    record: TarRecord


class StreamReader:
    """The samples of one stream in its shuffled order; each is read once.

    The stream's place 0 is at the position `first` of the epoch. Samples before `turn` are skipped.
    """

    def __init__(self, source: SequentialReader, *, order: StreamOrder, first: int, turn: int) -> None:
        self._order, self._first = order, first
        self._source, self._offsets = source, source.mixture.manifest.shards.offsets
        self._next, self._used = order.resume(turn)
        self._records = source.read(first + self._next)
        self._buffer: dict[int, TarRecord] = {}
        self._readable = 0

    def take(self, first: int, last: int) -> Iterator[StreamSample]:
        """The samples at the turns [first, last), each removed from the buffer when it is taken."""
        for place, sample_id, shard in self._located(first, last):
            self._source.on_sample(sample_id)
            while self._next <= place:
                self._read_one()
            record = self._buffer.pop(place)
            self._readable -= not record.problem
            yield StreamSample(sample_id, shard, record)

    def peek(self, turn: int) -> StreamSample:
        """The sample at a turn, kept for it.

        It is read separately from its shard if its turn has passed, or if it is so far ahead that the buffer would grow
        beyond its limit.
        """
        ((place, sample_id, shard),) = self._located(turn, turn + 1)
        self._source.on_sample(sample_id)
        while self._next <= place and self._readable < READ_AHEAD * self._order.buffer:
            self._read_one()
        record = self._buffer[place] if place in self._buffer else next(self._source.read(self._first + place))
        return StreamSample(sample_id, shard, record)

    def _located(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Place, sample id and shard of what is at the turns [first, last)."""
        places = self._order.places(first, last)
        shards, numbers = self._source.segments.locate(self._first + places)
        return zip(places.tolist(), (self._offsets[shards] + numbers).tolist(), shards.tolist(), strict=True)

    def _read_one(self) -> None:
        record = next(self._records)
        if self._next not in self._used:
            self._buffer[self._next] = record
            self._readable += not record.problem
        self._next += 1

    def close(self) -> None:
        """Close the open shard and drop the buffer."""
        self._records.close()  # type: ignore[attr-defined]
        self._buffer.clear()
