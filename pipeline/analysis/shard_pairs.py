"""Read the pairs of shards in stored order, with their keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.cores import thread_map
from pipeline.data.shards.manifest_format import Manifest, Shard
from pipeline.data.shards.storage import is_local, open_records
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, DamagedTar, TarRecord, rgb_image
from pipeline.files import as_text, sha256_of
from pipeline.pictures.pixels import WHITE, Colour, has_transparency
from pipeline.run_files import record_of


@dataclass(frozen=True)
class PairBatch:
    """Consecutive pairs of one shard; those that cannot be read are listed apart."""

    shard: int
    """The shard's number in the manifest."""
    rows: list[int]
    """Positions in the shard of the readable pairs."""
    sample_ids: list[int]
    image: Tensor
    """[b, 3, H, W], preprocessed."""
    captions: list[str]
    problems: list[tuple[int, str]]
    """Position and reason of the other pairs."""
    ends_shard: bool = False


UNREAD = "shard cannot be read"
"""Of the samples of a shard that is away, how their problem begins."""
ImageOf = Callable[[bytes], Tensor]
"""Encoded image -> the preprocessed image. It raises `CorruptSample`."""


def whole(preprocess: Callable[[Any], Tensor], background: Colour = WHITE) -> ImageOf:
    """The whole image, as an evaluation takes it; `preprocess` is of a PIL image."""
    return lambda data: preprocess(rgb_image(data, background=background))


@dataclass(frozen=True)
class PairReader:
    """Reads the pairs of a dataset's shards."""

    manifest: Manifest
    caption: CaptionField | None
    """None: captions are not read."""
    image_of: ImageOf
    batch_size: int
    """Most pairs of a batch."""
    workers: int
    """Threads that decode, at least one."""
    verified: bool = False
    """Take no pair of a local shard whose size or SHA-256 is not that of the manifest."""

    def read(self, shards: Sequence[int]) -> Iterator[PairBatch]:
        """The pairs of the shards with these numbers, shard after shard in the given order."""
        with ThreadPoolExecutor(max(1, self.workers)) as pool:
            for number in shards:
                yield from self._stream(number, pool)

    def _stream(self, number: int, pool: Executor) -> Iterator[PairBatch]:
        shard = self.manifest.shards[number]
        good: list[tuple[int, Tensor, str]] = []
        bad: list[tuple[int, str]] = []
        decoded = thread_map(pool, self._decode, self._records(shard), ahead=2 * self.batch_size)
        for row, outcome in enumerate(decoded):
            if isinstance(outcome, str):
                bad.append((row, outcome))
            else:
                good.append((row, *outcome))
            if len(good) == self.batch_size and row + 1 < shard.samples:
                yield self._batch(number, good, bad)
                good, bad = [], []
        yield self._batch(number, good, bad, ends_shard=True)

    def _records(self, shard: Shard) -> Iterator[TarRecord]:
        """As many samples as the manifest counts, in order; after damage they say what it was."""
        url, samples, row = self.manifest.url(shard), shard.samples, 0
        try:
            if self.verified and is_local(url):
                size, digest = os.stat(url).st_size, sha256_of(url) if shard.sha256 else ""
                if (size, digest) != (shard.bytes, shard.sha256):
                    raise OSError("its bytes are not those of the manifest; `neuclip verify` tells more")
            suffix = self.caption.suffix if self.caption else "txt"
            with open_records(url, skip=0, caption_suffix=suffix) as records:
                for row, record in enumerate(records, start=1):
                    if row > samples:
                        return
                    yield record
        except DamagedTar as error:
            reason = f"shard is damaged: {error}"
        except OSError as error:
            reason = f"{UNREAD}: {error}"
        else:
            reason = "missing in its shard"
        for _ in range(row, samples):
            yield TarRecord(None, None, problem=reason)

    def _decode(self, record: TarRecord) -> tuple[Tensor, str] | str:
        try:
            if record.problem or record.image is None:
                raise CorruptSample(record.problem or "image is missing")
            return self.image_of(record.image), self.caption.read(record) if self.caption else ""
        except CorruptSample as error:
            return str(error)

    def _batch(
        self, number: int, good: list[tuple[int, Tensor, str]], bad: list[tuple[int, str]], *, ends_shard: bool = False
    ) -> PairBatch:
        offset = self.manifest.shards[number].offset
        rows = [row for row, _, _ in good]
        image = torch.stack([image for _, image, _ in good]) if good else torch.empty(0)
        captions = [caption for _, _, caption in good]
        return PairBatch(number, rows, [offset + row for row in rows], image, captions, bad, ends_shard)


def facts_in(url: str) -> dict[int, dict[str, Any]]:
    """By position in a shard: the key, which is the name in the tar, whether the image has transparency, and the uid of
    those whose JSON member has one."""
    names = dict[int, dict[str, Any]]()
    with suppress(DamagedTar, OSError), open_records(url, skip=0, caption_suffix="json") as records:
        for row, record in enumerate(records):
            names[row] = {"key": as_text(record.key), "transparent": has_transparency(record.image or b"")}
            uid = (record_of(record.caption or b"") or {}).get("uid")
            if uid not in (None, ""):
                names[row]["uid"] = as_text(str(uid))
    return names
