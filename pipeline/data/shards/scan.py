"""Scan shards in one pass: number of samples, samples that training cannot use, and SHA-256.

The results of finished shards are saved in a journal, so that an interrupted scan of many terabytes continues where it
stopped.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from pipeline.data.shards.manifest_format import shard_url
from pipeline.data.shards.storage import StreamHash, is_local, open_shard
from pipeline.data.shards.tar_reader import CaptionField, CorruptSample, DamagedTar, TarRecord, read_records
from pipeline.errors import UserError

JOURNAL = "manifest.partial.jsonl"


@dataclass(frozen=True)
class ShardScan:
    """What the scan of one shard found."""

    name: str
    samples: int = 0
    bytes: int = 0
    sha256: str = ""
    unusable: Mapping[str, int] = field(default_factory=dict)
    """Samples that training cannot use, by reason."""
    damage: str = ""
    """Why no sample of the shard should be used."""
    unread: str = ""
    """Why the shard could not be read at all; the cause may be temporary."""
    caption: str = "txt"
    """Where captions were expected."""


class ScanStopped(Exception):
    """The scan was interrupted; what this shard gave so far is discarded."""


def scan_shards(
    root: Path,
    names: Sequence[str],
    *,
    caption: CaptionField,
    threads: int,
    on_scan: Callable[[ShardScan, int], None],
) -> dict[str, ShardScan]:
    """Scan shards, except those in the journal whose files still have the same size.

    Args:
        root: Folder of the journal and of relative names.
        names: The shards.
        caption: Where captions are.
        threads: Shards that are read at a time.
        on_scan: Called after each newly scanned shard, with its result and the number of shards that are done. If it
            raises, the scan ends at once.

    Returns:
        Results by name.
    """
    wanted, stop = set(names), threading.Event()
    known = {name: found for name, found in _read_journal(root).items() if name in wanted}
    scans = {name: found for name, found in known.items() if found.caption == str(caption)}
    with _open_journal(root) as journal, ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(read_shard, name, shard_url(root, name), caption, stop=stop)
            for name in names
            if name not in scans
        ]
        try:
            for job in as_completed(jobs):
                found = job.result()
                scans[found.name] = found
                if not (found.damage or found.unread):
                    journal.write(json.dumps(asdict(found)) + "\n")
                    journal.flush()
                on_scan(found, len(scans))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return scans


def read_shard(name: str, url: str, caption: CaptionField, *, stop: threading.Event) -> ShardScan:
    """Count and hash one shard in one pass over its bytes.

    Raises:
        ScanStopped: Soon after `stop` is set.
    """

    def check() -> None:
        if stop.is_set():
            raise ScanStopped

    unusable: Counter[str] = Counter()
    samples, hashed = 0, StreamHash(check)
    try:
        with open_shard(url) as file:
            for record in read_records(hashed.over(file), caption_suffix=caption.suffix):
                samples += 1
                unusable.update(_reasons(record, caption))
            sha256 = hashed.finish() or ""
    except DamagedTar as error:
        return ShardScan(name, damage=f"{error} (after {samples:,} samples)")
    except ScanStopped:
        raise
    except Exception as error:  # clients of object stores raise exceptions of many types
        return ShardScan(name, unread=f"{type(error).__name__}: {error}")
    if not samples:
        return ShardScan(name, damage="is empty")
    return ShardScan(name, samples, hashed.bytes, sha256, dict(unusable), caption=str(caption))


def _reasons(record: TarRecord, caption: CaptionField) -> Iterator[str]:
    if record.image is None:
        yield "image is missing"
        return
    try:
        caption.read(record)
    except CorruptSample as error:
        yield str(error)


def _open_journal(root: Path) -> TextIO:
    try:
        return (root / JOURNAL).open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot write to {root} ({error.strerror}). Create a folder of your own for the manifest and name the "
            f"shards: `neuclip manifest OWN_FOLDER --shards '{root.absolute()}/{{00000..00099}}.tar'`."
        ) from error


def _read_journal(root: Path) -> dict[str, ShardScan]:
    try:
        lines = (root / JOURNAL).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found: dict[str, ShardScan] = {}
    for line in lines:
        try:
            entry = ShardScan(**json.loads(line))
        except (ValueError, TypeError):
            continue  # an interruption truncated this line
        path = root / entry.name
        if not is_local(entry.name) or (path.exists() and path.stat().st_size == entry.bytes):
            found[entry.name] = entry
    return found
