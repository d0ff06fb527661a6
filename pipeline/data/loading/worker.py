"""The workers of the loader: what one of them does, an endless sequence of its streams' rows, and the processes."""

from __future__ import annotations

import functools
import itertools
import operator
import pickle
import resource
from collections import Counter
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeline.data.data_config import PREFETCH
from pipeline.data.loading.blocks import Blocks
from pipeline.data.loading.decode import EncodedJpeg, ImageDecoder
from pipeline.data.loading.stored_features import FeatureFile
from pipeline.data.loading.stream_reader import ALTERED, SequentialReader, StreamReader, StreamSample
from pipeline.data.order.canonical_order import Order
from pipeline.data.order.mixture import Purpose, draw, key, order_hash
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample
from pipeline.distributed.processes import live_with_parent, preload, start_forkserver, start_workers
from pipeline.errors import UserError

Tokenize = Callable[[list[str]], Tensor]
OWN_STREAM_ATTEMPTS, ANY_STREAM_ATTEMPTS = 16, 64
OPEN_FILES = 65_536
WAIT_SECONDS = 1.0
"""How often a wait for a worker process asks whether it is to end."""


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


class EpochRows:
    """The rows of a worker's `streams` in the batches of one epoch, from `batch` on, decoded in order."""

    def __init__(
        self, dataset: StreamDataset, streams: range, *, epoch: int, batch: int, on_sample: Callable[[int], None]
    ) -> None:
        self._dataset, self._order, self._epoch, self._streams = dataset, dataset.order, epoch, streams
        self._crops = key(self._order.seed, Purpose.CROP, epoch)
        self._choices = key(self._order.seed, Purpose.CAPTION, epoch)
        self._source = SequentialReader(
            self._order.mixture,
            self._order.epoch_segments(epoch),
            dataset.retries,
            captions=dataset.captions,
            altered_shards=dataset.altered_shards,
            on_sample=on_sample,
        )
        self._readers = {c: self._open(c, turn=batch * self._order.layout.rows) for c in streams}

    def part(self, batch: int, image_bHWC: Tensor) -> Part:
        """The rows of a batch; their images are written to `image_bHWC`, each in its row."""
        self._images, self._captions, self._encoded = image_bHWC, list[str](), list[tuple[int, EncodedJpeg]]()
        rows, ids, corrupt = self._order.layout.rows, list[int](), Counter[tuple[str, str]]()
        for stream, reader in self._readers.items():
            for turn, sample in enumerate(reader.take(batch * rows, (batch + 1) * rows), batch * rows):
                try:
                    self._add(sample, stream, turn)
                    ids.append(sample.id)
                except CorruptSample as error:
                    corrupt[(str(error), self._order.mixture.manifest.shards[sample.shard].name)] += 1
                    ids.append(self._substitute(stream, turn, first=error))
        text, sample_id = self._dataset.tokenize(self._captions).numpy(), np.array(ids, np.int64)
        hashed = order_hash(sample_id, epoch=self._epoch, batch=batch, first_row=rows * self._streams.start)
        return Part(self._epoch, batch, text, sample_id, hashed, corrupt, tuple(self._encoded))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _add(self, sample: StreamSample, stream: int, turn: int) -> None:
        """Decode a sample as the next row, that of a turn of a stream.

        CorruptSample if it cannot be used; no row is added. UserError if its features should be stored, and are not.
        """
        record, decoder, features = sample.record, self._dataset.decoder, self._dataset.features
        if record.problem or sample.shard in self._source.altered:
            raise CorruptSample(record.problem or ALTERED)
        if record.image is None:
            raise CorruptSample("image is missing")
        # The row's number in the epoch is the key of the crop: a sample may occur more than once in an epoch.
        number, row = stream * self._order.layout.stream_length + turn, len(self._captions)
        text = self._source.caption(sample.shard).read(record, number=draw(draw(self._choices, number), 0))
        state = draw(self._crops, number)
        if features is not None:
            if features.read(sample.id) is None:
                decoder(record.image, state=state)  # a corrupt image has no features
                raise features.missing(sample.id)
        elif decoder.gpu and (encoded := decoder.for_gpu(record.image, state=state)):
            self._encoded.append((row, encoded))
        else:
            self._images[row] = decoder(record.image, state=state).permute(1, 2, 0)
        self._captions.append(text)

    def _substitute(self, stream: int, turn: int, *, first: CorruptSample) -> int:
        """Fill the row of a corrupt sample with the first readable one of a fixed sequence of other samples."""
        reasons = Counter([str(first)])
        for other, at in self._candidates(stream, turn):
            reader = self._readers[other] if other == stream else self._open(other)
            sample = reader.peek(at)
            try:
                self._add(sample, stream, turn)
                return sample.id
            except CorruptSample as error:
                reasons[str(error)] += 1
        lost = [self._order.mixture.manifest.shards[number].name for number in list(self._source.lost)[:10]]
        why = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        raise UserError(
            f"Epoch {self._epoch}, stream {stream}: no readable sample was found in {reasons.total() - 1} "
            f"attempts to replace a corrupt one, so most of the data cannot be used: {why}. Shards lost so far: "
            f"{', '.join(lost) or 'none'}. `neuclip verify` finds damaged shards, `neuclip manifest` counts "
            "samples without an image or a caption."
        )

    def _candidates(self, stream: int, turn: int) -> Iterator[tuple[int, int]]:
        """`(stream, turn)` of samples that may replace a corrupt one; never one of the same global batch.

        The first candidates are the same row of other batches of this stream, so that two corrupt rows of a batch never
        get the same sample: a later batch that is in the buffer or near it or, at the end of an epoch, any batch. If
        none of these can be read, any turn of any stream is tried.
        """
        layout, b = self._order.layout, self._order.layout.rows
        batch, row = divmod(turn, b)
        state = key(self._order.seed, Purpose.REFILL, self._epoch, stream, turn)
        near, after = max(1, self._order.shuffle_buffer // b), layout.steps - 1 - batch
        for attempt in range(OWN_STREAM_ATTEMPTS if layout.steps > 1 else 0):
            window = min(near << attempt, after) or layout.steps - 1
            other = (batch + 1 + draw(state, attempt) % window) % layout.steps
            yield stream, other * b + row
        for attempt in range(OWN_STREAM_ATTEMPTS, OWN_STREAM_ATTEMPTS + ANY_STREAM_ATTEMPTS):
            stream = draw(state, 2 * attempt) % layout.streams
            other = draw(state, 2 * attempt + 1) % layout.stream_length
            if other // b != batch or layout.steps == 1:
                yield stream, other

    def _open(self, stream: int, *, turn: int | None = None) -> StreamReader:
        """A reader of a stream from a turn on; without one, only to peek."""
        order = self._order.stream(epoch=self._epoch, stream=stream)
        turn = order.length if turn is None else turn
        return StreamReader(self._source, order=order, first=stream * order.length, turn=turn)


@dataclass(frozen=True)
class StreamDataset(IterableDataset[Part | UserError]):
    """Parts of this rank's batches, starting at (epoch, batch); each worker takes a contiguous share of the streams."""

    order: Order
    streams: range
    decoder: ImageDecoder
    tokenize: Tokenize
    retries: int
    captions: tuple[CaptionField, ...]
    """Where captions are, by source."""
    altered_shards: Literal["stop", "skip", "ignore"]
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
        reading = [-1] * workers if self.reading is None else self.reading
        assert self.blocks is not None
        b, filled = self.order.layout.rows, itertools.count()
        while True:
            on_sample = functools.partial(operator.setitem, reading, worker)
            rows = EpochRows(self, streams, epoch=epoch, batch=first, on_sample=on_sample)
            for batch in range(first, self.order.layout.steps):
                first_row = b * (streams.start - self.streams.start)
                yield rows.part(batch, self.blocks.rows(next(filled), first_row, b * len(streams)))
            rows.close()
            epoch, first = epoch + 1, 0


def allow_open_files() -> int:
    """Raise the soft limit of open files, usually 1,024, since every stream keeps a shard open; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def prepare_workers(workers: int, *, tokenize: Tokenize, streams: int) -> None:
    """Check that a rank's workers can run on this machine, and start the process that forks them, whose imports overlap
    with building the model. UserError if `tokenize` cannot be pickled, or too few files may be open: the rank's
    `streams` keep shards open, and workers have pipes and semaphores.
    """
    try:
        pickle.dumps(tokenize)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"The tokenizer {tokenize!r} cannot be sent to worker processes ({error}): use data.workers=0, or a "
            "tokenizer that is an object of a module-level class."
        ) from error
    needed, limit = 64 + 16 * workers + -(-streams // workers), allow_open_files()
    if limit < needed:
        raise UserError(
            f"This process may have {limit} files open (ulimit -n), but {workers} loading workers with "
            f"{streams} streams need about {needed}: raise the limit (ulimit -n 65536; in a container --ulimit "
            "nofile=65536), or lower data.workers or data.streams."
        )
    preload(__name__)  # once, for all workers
    start_forkserver()


def start_parts(dataset: StreamDataset, *, workers: int) -> tuple[Iterator[Part | UserError], Sequence[int]]:
    """The parts of a rank's batches from the epoch and batch of a dataset on, from so many processes or from this one.

    Those of a batch come in the order of their streams. The second value is of each worker the id of the sample that it
    has last begun to read.
    """
    if not workers:
        return iter(dataset), []
    context = start_forkserver()
    reading = context.RawArray("q", [-1] * workers)
    loader = DataLoader(
        replace(dataset, reading=reading),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=PREFETCH,
        multiprocessing_context=context,
        collate_fn=_as_is,
        timeout=WAIT_SECONDS,
    )
    return start_workers(loader), reading


def _as_is(part: Any) -> Any:
    return part
