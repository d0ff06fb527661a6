"""The writer for img2dataset: collects the samples of one shard and publishes them when all rows have an outcome."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.commit import Commit
from data_prep.dataset.dataset_folder import Folder, ShardRecord, key_of, names_of
from data_prep.dataset.manifest_writer import TOOLS
from data_prep.dataset.shard_files import STORED_HASH, TRANSPARENT, facts_text, failed_row, meta_table, stage
from data_prep.dataset.shard_plan import Plan
from data_prep.download_config import HASH_KINDS
from data_prep.fetching.served_image import extension
from pipeline.files import write_json
from pipeline.versions import version_of

if TYPE_CHECKING:
    from data_prep.fetching.decoder import Decoder
    from data_prep.fetching.opener import Opener

_HEARTBEAT_SECONDS = 0.5
SUCCESS = "success"
Outcomes = Counter[str]
"""Numbers of URLs: of samples under `SUCCESS`, of failures under their reasons."""


class ShardWriter:
    """img2dataset's sample writer interface (`write`, `close`) for one shard.

    Payloads go to a spool file in the order they arrive, so that memory holds only the index; `close` writes them
    sorted. A live file beside it reports the progress to the supervisor, also that the shard is published.

    img2dataset swallows exceptions of `write`. The first one is therefore stored, stops the requests of `opener`, and
    is raised by `close`: a shard is published completely or not at all.

    `rows` are all of the shard's rows, as dicts of the plan's columns. `kept` are rows of the meta file that are not
    fetched, by number: their samples are taken from the published tar. `decoder` says whether the image that it has
    converted last is transparent: img2dataset writes each as soon as it is converted.
    """

    def __init__(
        self,
        shard: int,
        folder: Folder,
        plan: Plan,
        *,
        rows: list[dict[str, Any]],
        kept: Mapping[int, dict[str, Any]],
        decoder: Decoder,
        opener: Opener,
    ) -> None:
        self._shard, self._folder, self._plan, self._decoder, self._opener = shard, folder, plan, decoder, opener
        self._rows = {row["row"]: row for row in rows}
        self._removed = folder.removed_names()
        self._meta = dict(kept)
        self._index: dict[int, tuple[str, int, int, str, str]] = {}
        self._failure: Exception | None = None
        self.is_published = False
        self._spool = (folder.staging / f"{shard:05d}.spool").open("w+b")
        self._live = folder.staging / f"{shard:05d}.live"
        self.outcomes, self._stored, self._last_beat = Outcomes(), 0, float("-inf")
        self._beat()

    def write(self, img_str: bytes | None, key: str, caption: str | None, meta: dict[str, Any]) -> None:
        """Store one row's outcome: the encoded image, or None and `meta["error_message"]`."""
        if self._failure is not None:
            return
        try:
            self._take(img_str, caption, meta)
        except Exception as error:
            self._failure = error
            self._opener.removed = {row["url"] for row in self._rows.values()}

    def close(self) -> None:
        """Publish the shard: rows that were not requested are as before, and those that img2dataset lost have failed.

        Raises:
            Exception: A `write`, or publishing, failed. The published files are unchanged.
        """
        try:
            if self._failure is not None:
                raise self._failure
            # img2dataset loses rows whose outcome raises an exception.
            lost = [row for number, row in self._rows.items() if number not in self._meta]
            self._meta |= {row["row"]: failed_row(row, reasons.INTERNAL, "lost") for row in lost}
            self.outcomes[reasons.INTERNAL] += len(lost)
            rows = [self._meta[number] for number in sorted(self._meta)]
            samples = {row["row"] for row in rows if row["status"] == "success"}
            record = ShardRecord(
                self._shard,
                self._plan.digest,
                len(rows),
                len(samples),
                0,
                "",
                Counter(row["reason"] for row in rows if row["reason"]),
                rules=self._plan.rules_digest,
                tools={name: version_of(name) for name in TOOLS},
                transparent=sum(bool(row.get(TRANSPARENT)) for row in rows),
            )
            with Commit(self._folder.root, self._folder.commit(self._shard)) as commit:
                members = self._members(samples - set(self._index))
                canonical_tar.write(commit.new(self._folder.tar(self._shard)), members)
                stage(commit, self._folder, record, meta_table(rows))
                commit.finish()
            self.is_published = True
            self._beat()
        finally:
            with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
                self._spool.close()
            Path(self._spool.name).unlink(missing_ok=True)
            if not self.is_published:
                self._live.unlink(missing_ok=True)

    def _take(self, image: bytes | None, caption: str | None, meta: dict[str, Any]) -> None:
        number = meta["row"]
        row = self._rows[number]
        reason = None if image is not None else reasons.of_message(meta["error_message"] or "")
        if reason is None and self._removed:
            received = {kind: meta[kind] for kind in HASH_KINDS if meta.get(kind)}
            is_removed = (names_of(row) | names_of({**row, **received})) & self._removed
            reason = reasons.REMOVED if is_removed else None
        if reason is None and not (caption or "").strip():
            reason = reasons.NO_CAPTION  # not usable in training
        record = {
            **row,
            "key": key_of(number),
            "status": "failed" if reason else "success",
            "reason": reason,
            "error": meta["error_message"],
            **{name: meta[name] for name in ("width", "height", "original_width", "original_height")},
        }
        # The hash of the received bytes; a failed row keeps the table's hash, if any.
        record |= {kind: row.get(kind) if reason else meta[kind] for kind in HASH_KINDS if kind in meta or kind in row}
        if reason is None:
            assert image is not None
            record[TRANSPARENT] = self._decoder.is_transparent
            record[STORED_HASH] = hashlib.sha256(image).hexdigest()
            start = self._spool.tell()
            self._spool.write(image)
            self._index[number] = (extension(image), start, len(image), facts_text(record), str(caption))
        self.outcomes[reason or SUCCESS] += 1
        self._meta[number] = record
        self._beat()

    def _members(self, old: set[int]) -> Iterator[tuple[str, bytes]]:
        """All samples in order: the new ones, and the `old` ones of the tar that will be replaced."""
        new = ((number, self._spooled(number)) for number in sorted(self._index))
        published = canonical_tar.samples(self._folder.tar(self._shard)) if old else ()
        kept = ((int(key), parts) for key, parts in published if int(key) in old)
        for number, parts in heapq.merge(new, kept, key=lambda item: item[0]):
            self._stored += 1
            self._beat()
            for suffix in sorted(parts):
                yield f"{key_of(number)}.{suffix}", parts[suffix]

    def _spooled(self, number: int) -> dict[str, bytes]:
        suffix, start, length, text, caption = self._index[number]
        self._spool.seek(start)
        image = self._spool.read(length)
        if hashlib.sha256(image).hexdigest() != self._meta[number][STORED_HASH]:
            raise OSError(f"{self._spool.name} does not hold the image of row {number} that was written to it")
        return {suffix: image, "json": text.encode(), "txt": caption.encode()}

    def _beat(self) -> None:
        """Write the live file, unless it is new."""
        if time.monotonic() - self._last_beat < _HEARTBEAT_SECONDS and not self.is_published:
            return
        self._last_beat = time.monotonic()
        state = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "outcomes": self.outcomes,
            "stored": self._stored,
            "is_published": self.is_published,
        }
        with contextlib.suppress(OSError):  # serious errors are raised elsewhere
            write_json(self._live, state)
