"""One worker of the loader: an endless sequence of its streams' rows of global batches."""

from __future__ import annotations

import functools
import itertools
import operator
import resource
from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from pipeline.data.loading.blocks import Blocks
from pipeline.data.loading.decode import EncodedJpeg, ImageDecoder
from pipeline.data.loading.stored_features import FeatureFile
from pipeline.data.loading.stream_reader import ALTERED, SequentialReader, StreamReader, StreamSample
from pipeline.data.order.canonical_order import Order
from pipeline.data.order.hashing import Purpose, draw, key, order_hash
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample
from pipeline.distributed.workers import live_with_parent
from pipeline.errors import UserError

Tokenize = Callable[[list[str]], Tensor]
OWN_STREAM_ATTEMPTS, ANY_STREAM_ATTEMPTS = 16, 64
OPEN_FILES = 65_536


@dataclass(frozen=True)
class Part:
    """The rows of some streams in one global batch; their images are in `Blocks`."""

    epoch: int
    batch: int
    text: NDArray[np.int64]
    sample_id: NDArray[np.int64]
    order_hash: int
    corrupt: Counter[tuple[str, str]]
    """Corrupt samples that were replaced, by (reason, shard)."""
    encoded: tuple[tuple[int, EncodedJpeg], ...] = ()
    """Rows whose images a GPU is to decode, and their JPEGs."""


@dataclass(kw_only=True)
class DecodedRows:
    """The rows of one part, in order, as they are decoded."""

    image_bHWC: Tensor
    """Where images are written, each in its row; not with stored `features`."""
    dataset: StreamDataset
    source: SequentialReader
    epoch: int
    captions: list[str] = field(default_factory=list)
    """Of the rows so far."""
    encoded: list[tuple[int, EncodedJpeg]] = field(default_factory=list)
    """The rows so far that a GPU is to decode."""

    def __post_init__(self) -> None:
        seed = self.dataset.order.seed
        self._crops, self._choices = (key(seed, purpose, self.epoch) for purpose in (Purpose.CROP, Purpose.CAPTION))

    def add(self, sample: StreamSample, *, number: int) -> None:
        """Decode a sample as the next row.

        The row's number in the epoch keys the crop: a sample may occur more than once in an epoch.

        Raises:
            CorruptSample: It cannot be used; no row is added.
            UserError: Its features should be stored, and are not.
        """
        record, decoder, features = sample.record, self.dataset.decoder, self.dataset.features
        if record.problem or sample.shard in self.source.altered:
            raise CorruptSample(record.problem or ALTERED)
        if record.image is None:
            raise CorruptSample("image is missing")
        text = self.source.caption(sample.shard).read(record, state=draw(self._choices, number))
        state = draw(self._crops, number)
        if features is not None:
            if features.read(sample.id) is None:
                decoder(record.image, state=state)  # a corrupt image has no features
                raise features.missing(sample.id)
        elif decoder.gpu and (encoded := decoder.for_gpu(record.image, state=state)):
            self.encoded.append((len(self.captions), encoded))
        else:
            pixels = decoder(record.image, state=state)
            self.image_bHWC[len(self.captions)] = pixels.permute(1, 2, 0)
        self.captions.append(text)


@dataclass(kw_only=True)
class StreamFiller:
    """Decoded rows of one stream in one epoch."""

    order: Order
    source: SequentialReader
    epoch: int
    stream: int
    batch: int
    """The first batch whose rows are filled."""
    on_sample: Callable[[int], None]
    """Called with the id of each sample before it is read."""

    def __post_init__(self) -> None:
        self._first_row = self.stream * self.order.layout.stream_length
        """The number in the epoch of the row at turn 0."""
        self._reader = self._open(self.stream, turn=self.batch * self.order.layout.rows)

    def fill(self, batch: int, rows: DecodedRows, *, corrupt: Counter[tuple[str, str]]) -> list[int]:
        """Decode this stream's rows of a batch, in order, and return their sample ids."""
        first, last = batch * self.order.layout.rows, (batch + 1) * self.order.layout.rows
        ids = []
        for turn, sample in enumerate(self._reader.take(first, last), first):
            try:
                rows.add(sample, number=self._first_row + turn)
                ids.append(sample.id)
            except CorruptSample as error:
                corrupt[(str(error), self.order.mixture.manifest.shards[sample.shard].name)] += 1
                ids.append(self._substitute(turn, rows, first=error))
        return ids

    def close(self) -> None:
        self._reader.close()

    def _substitute(self, turn: int, rows: DecodedRows, *, first: CorruptSample) -> int:
        """Fill the row of a corrupt sample with the first readable one of a fixed sequence of other samples."""
        reasons = Counter([str(first)])
        for stream, other in self._candidates(turn):
            own = stream == self.stream
            reader = self._reader if own else self._open(stream, turn=self.order.layout.stream_length)
            sample = reader.peek(other)
            try:
                rows.add(sample, number=self._first_row + turn)
                return sample.id
            except CorruptSample as error:
                reasons[str(error)] += 1
        lost = [self.order.mixture.manifest.shards[number].name for number in list(self.source.lost)[:10]]
        why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        raise UserError(
            f"Epoch {self.epoch}, stream {self.stream}: no readable sample was found in {reasons.total() - 1} "
            f"attempts to replace a corrupt one, so most of the data cannot be used: {why}. Shards lost so far: "
            f"{', '.join(lost) or 'none'}. `neuclip verify` finds damaged shards, `neuclip manifest` counts "
            "samples without an image or a caption."
        )

    def _candidates(self, turn: int) -> Iterator[tuple[int, int]]:
        """`(stream, turn)` of samples that may replace a corrupt one; never one of the same global batch.

        The first candidates are the same row of other batches of this stream, so that two corrupt rows of a batch never
        get the same sample: a later batch that is in the buffer or near it or, at the end of an epoch, any batch. If
        none of these can be read, any turn of any stream is tried.
        """
        layout, b = self.order.layout, self.order.layout.rows
        batch, row = divmod(turn, b)
        state = key(self.order.seed, Purpose.REFILL, self.epoch, self.stream, turn)
        near, after = max(1, self.order.shuffle_buffer // b), layout.steps - 1 - batch
        for attempt in range(OWN_STREAM_ATTEMPTS if layout.steps > 1 else 0):
            window = min(near << attempt, after) or layout.steps - 1
            other = (batch + 1 + draw(state, attempt) % window) % layout.steps
            yield self.stream, other * b + row
        for attempt in range(OWN_STREAM_ATTEMPTS, OWN_STREAM_ATTEMPTS + ANY_STREAM_ATTEMPTS):
            stream = draw(state, 2 * attempt) % layout.streams
            other = draw(state, 2 * attempt + 1) % layout.stream_length
            if other // b != batch or layout.steps == 1:
                yield stream, other

    def _open(self, stream: int, *, turn: int) -> StreamReader:
        order = self.order.stream(epoch=self.epoch, stream=stream)
        first = stream * order.length
        return StreamReader(self.source, order=order, first=first, turn=turn, on_sample=self.on_sample)


@dataclass(frozen=True)
class StreamDataset(IterableDataset[Part | UserError]):
    """Parts of this rank's batches, starting at (epoch, batch); each worker takes a contiguous share of the streams."""

    order: Order
    streams: range
    decoder: ImageDecoder
    tokenize: Tokenize
    retries: int
    captions: tuple[CaptionField, ...] = (CaptionField(),)
    """Where captions are, by source."""
    altered_shards: Literal["stop", "skip", "ignore"] = "ignore"
    """See DataConfig."""
    features: FeatureFile | None = None
    """Stored image features, which replace decoded images."""
    epoch: int = 0
    batch: int = 0
    blocks: Blocks | None = None
    """Where images are written."""
    reading: MutableSequence[int] | None = None
    """Memory that is shared with the workers: the id of the sample that each of them has last begun to read."""

    def __iter__(self) -> Iterator[Part | UserError]:
        allow_open_files()
        info = get_worker_info()  # torch has set the number of threads to one in workers
        if info is not None:
            live_with_parent()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            yield from self._parts(worker, workers=workers)
        except UserError as error:
            yield UserError(str(error))  # not raised: exceptions cross processes as tracebacks

    def _parts(self, worker: int, *, workers: int) -> Iterator[Part]:
        epoch, first, s = self.epoch, self.batch, len(self.streams)
        streams = self.streams[s * worker // workers : s * (worker + 1) // workers]
        note = functools.partial(operator.setitem, [-1] if self.reading is None else self.reading, worker)
        b = self.order.layout.rows
        assert self.blocks is not None
        filled = itertools.count()
        while True:
            source = SequentialReader(
                self.order.mixture,
                self.order.epoch_segments(epoch),
                self.retries,
                captions=self.captions,
                altered_shards=self.altered_shards,
            )
            fillers = [
                StreamFiller(order=self.order, source=source, epoch=epoch, stream=c, batch=first, on_sample=note)
                for c in streams
            ]
            for batch in range(first, self.order.layout.steps):
                image_bHWC = self.blocks.rows(next(filled), b * (streams.start - self.streams.start), b * len(streams))
                rows = DecodedRows(image_bHWC=image_bHWC, dataset=self, source=source, epoch=epoch)
                corrupt: Counter[tuple[str, str]] = Counter()
                ids = [i for filler in fillers for i in filler.fill(batch, rows, corrupt=corrupt)]
                sample_id = np.array(ids, np.int64)
                yield Part(
                    epoch=epoch,
                    batch=batch,
                    text=self.tokenize(rows.captions).numpy(),
                    sample_id=sample_id,
                    order_hash=order_hash(sample_id, epoch=epoch, batch=batch, first_row=b * streams.start),
                    corrupt=corrupt,
                    encoded=tuple(rows.encoded),
                )
            for filler in fillers:
                filler.close()
            epoch, first = epoch + 1, 0


def allow_open_files() -> int:
    """Raise the soft limit of open files, usually 1,024: every stream keeps a shard open.

    Returns:
        The limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
