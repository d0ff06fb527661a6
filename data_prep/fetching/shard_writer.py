"""What img2dataset writes into: collects the samples of one shard and publishes a canonical tar when all came."""

from __future__ import annotations

import heapq
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, ShardRecord, key_of, names_of
from data_prep.fetching.content import extension
from data_prep.settings.source_config import HASH_KINDS
from pipeline.files import replacing, write_text

_HEARTBEAT_SECONDS = 0.5


class ShardWriter:
    """img2dataset's sample writer interface (`write`, `close`) for one shard.

    Payloads go to a spool file in the order they arrive, so that memory holds only the index; `close` writes them
    sorted. A live file beside it tells the monitor how the shard is doing.

    Args: rows: all of the shard's rows, as dicts of the plan's columns. retry: only some of them are asked for; the
      outcomes and samples of the others are taken over from what is published.
    """

    def __init__(
        self,
        shard: int,
        folder: Folder,
        *,
        plan: str,
        rows: list[dict[str, Any]],
        encode_format: str,
        retry: bool = False,
    ) -> None:
        self._shard, self._folder, self._plan = shard, folder, plan
        self._rows = {row["row"]: row for row in rows}
        self._encode_format, self._retry = encode_format, retry
        self._removed = folder.removed_names()
        self._meta: dict[int, dict[str, Any]] = {}
        self._index: dict[int, tuple[str, int, int, str, str]] = {}
        self._failures: Counter[str] = Counter()
        self._spool = (folder.staging / f"{shard:05d}.spool").open("w+b")
        self.live = folder.staging / f"{shard:05d}.live"
        self._last_beat = 0.0
        self._beat()

    def write(self, img_str: bytes | None, key: str, caption: str | None, meta: dict[str, Any]) -> None:
        """Take one row's outcome: the encoded image, or None and `meta["error_message"]`."""
        number = meta["row"]
        row = self._rows[number]
        reason = None if img_str is not None else reasons.of_message(meta["error_message"] or "")
        if reason is None and self._removed and self._is_removed(row, meta):
            reason = reasons.REMOVED
        if reason is None and not (caption or "").strip():
            reason = reasons.NO_CAPTION  # training could not use it
        record = self._meta[number] = {
            **row,
            "key": key_of(number),
            "status": "failed" if reason else "success",
            "reason": reason,
            "error": meta["error_message"],
            **{name: meta[name] for name in ("width", "height", "original_width", "original_height")},
        }
        # The hash of the bytes that came; a failed row keeps what the table states, if anything.
        record |= {kind: row.get(kind) if reason else meta[kind] for kind in HASH_KINDS if kind in meta or kind in row}
        if reason is None:
            assert img_str is not None
            self._spool_sample(number, img_str, str(caption), record)
        else:
            self._failures[reason] += 1
        if time.monotonic() - self._last_beat > _HEARTBEAT_SECONDS:
            self._beat()

    def close(self) -> None:
        """Publish the shard: tar, meta, and last the record that makes it count."""
        self._complete()
        successes = {number for number, row in self._meta.items() if row["status"] == "success"}
        path = self._folder.tar(self._shard)
        size, digest = 0, ""
        # From here until the record is written the shard counts as unfinished, also after a kill.
        self._folder.record(self._shard).unlink(missing_ok=True)
        if successes:
            size, digest = canonical_tar.write(path, self._members(successes - set(self._index)))
        else:
            path.unlink(missing_ok=True)
        _write_meta(self._folder.meta(self._shard), [self._meta[number] for number in sorted(self._meta)])
        failures = Counter(row["reason"] for row in self._meta.values() if row["reason"])
        self._folder.write_record(
            ShardRecord(self._shard, self._plan, len(self._meta), len(successes), size, digest, failures)
        )
        self._spool.close()
        Path(self._spool.name).unlink(missing_ok=True)
        self.live.unlink(missing_ok=True)

    def _spool_sample(self, number: int, image: bytes, caption: str, record: dict[str, Any]) -> None:
        facts = {k: v for k, v in record.items() if v is not None and k not in ("row", "status", "reason", "error")}
        text = json.dumps(facts, ensure_ascii=False, sort_keys=True, default=str)
        self._index[number] = (extension(image, self._encode_format), self._spool.tell(), len(image), text, caption)
        self._spool.write(image)

    def _is_removed(self, row: dict[str, Any], meta: dict[str, Any]) -> bool:
        names = names_of(row) | {meta[kind] for kind in HASH_KINDS if meta.get(kind)}
        return not names.isdisjoint(self._removed)

    def _complete(self) -> None:
        """Count the rows whose outcome img2dataset lost to an exception of its own; in a retry keep the older ones."""
        before = _read_meta(self._folder.meta(self._shard)) if self._retry else {}
        for number, row in self._rows.items():
            if number not in self._meta:
                lost = {**row, "key": key_of(number), "status": "failed", "reason": reasons.INTERNAL, "error": "lost"}
                self._meta[number] = before.get(number, lost)

    def _samples(self, old: set[int]) -> Iterator[tuple[int, dict[str, bytes]]]:
        """All samples in order: the new ones, and the `old` ones of the tar that is about to be replaced."""
        new = ((number, self._spooled(number)) for number in sorted(self._index))
        if not old:
            return new
        published = ((int(key), parts) for key, parts in canonical_tar.samples(self._folder.tar(self._shard)))
        return heapq.merge(new, (item for item in published if item[0] in old), key=lambda item: item[0])

    def _members(self, old: set[int]) -> Iterator[tuple[str, bytes]]:
        for number, parts in self._samples(old):
            for suffix in sorted(parts):
                yield f"{key_of(number)}.{suffix}", parts[suffix]

    def _spooled(self, number: int) -> dict[str, bytes]:
        suffix, start, length, text, caption = self._index[number]
        self._spool.seek(start)
        return {suffix: self._spool.read(length), "json": text.encode(), "txt": caption.encode()}

    def _beat(self) -> None:
        self._last_beat = time.monotonic()
        state = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "samples": len(self._index),
            "failures": dict(self._failures),
        }
        write_text(self.live, json.dumps(state))


def _write_meta(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for row in rows for name in row))
    known = {"row": pa.int64(), **dict.fromkeys(("width", "height", "original_width", "original_height"), pa.int32())}
    texts = ("url", "caption", "uid", "key", "status", "reason", "error", *HASH_KINDS)
    known |= dict.fromkeys(texts, pa.string())
    columns = {name: pa.array([row.get(name) for row in rows], known.get(name)) for name in names}
    with replacing(path, unique=False) as temporary:
        pq.write_table(pa.table(columns), temporary, compression="zstd")


def _read_meta(path: Path) -> dict[int, dict[str, Any]]:
    import pyarrow.parquet as pq

    if not path.exists():
        return {}
    return {row["row"]: row for row in pq.read_table(path).to_pylist()}
