"""Reading shards once, whole: how many samples they hold, which of them training cannot use, and their hash.

What is known of finished shards is kept in a journal, so that an interrupted pass over many terabytes goes on where it
was.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from pipeline.data.shards.caption_field import CaptionField
from pipeline.data.shards.manifest_format import shard_url
from pipeline.data.shards.storage import is_local, open_shard
from pipeline.data.shards.tar_reader import CorruptSample, DamagedTar, TarRecord, read_records
from pipeline.errors import UserError

JOURNAL = "manifest.partial.jsonl"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class ShardFinding:
    """What one shard holds. unusable: its samples that training cannot use, by reason.

    damage: why no sample of it should be used. unread: why it could not be read at all, which may pass. caption: where
    captions were looked for.
    """

    name: str
    samples: int = 0
    bytes: int = 0
    sha256: str = ""
    unusable: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    unread: str = ""
    caption: str = "txt"


class Stopped(Exception):
    """The pass was interrupted; what this shard gave is thrown away."""


def survey(
    root: Path,
    names: Sequence[str],
    *,
    caption: CaptionField,
    threads: int,
    on_finding: Callable[[ShardFinding, int], None],
) -> dict[str, ShardFinding]:
    """Findings by name: those of the journal, if their files have not changed size, and new ones.

    Args: on_finding: called with every new finding and the number of all so far; what it raises ends the pass at once.
    """
    wanted, stop = set(names), threading.Event()
    known = {name: found for name, found in _read_journal(root).items() if name in wanted}
    findings = {name: found for name, found in known.items() if found.caption == str(caption)}
    with _open_journal(root) as journal, ThreadPoolExecutor(threads) as pool:
        jobs = [
            pool.submit(read_shard, name, shard_url(root, name), caption, stop=stop)
            for name in names
            if name not in findings
        ]
        try:
            for job in as_completed(jobs):
                found = job.result()
                findings[found.name] = found
                if not (found.damage or found.unread):
                    journal.write(json.dumps(asdict(found)) + "\n")
                    journal.flush()
                on_finding(found, len(findings))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return findings


def read_shard(name: str, url: str, caption: CaptionField, *, stop: threading.Event) -> ShardFinding:
    """Count and hash one shard, in one pass over its bytes. Raises: Stopped soon after `stop` is set."""
    unusable: Counter[str] = Counter()
    samples = 0
    try:
        with open_shard(url) as raw:
            file = _Hashed(raw, stop)
            for record in read_records(cast(BinaryIO, file), caption_suffix=caption.suffix):
                samples += 1
                unusable.update(_reasons(record, caption))
            file.drain()
    except DamagedTar as error:
        return ShardFinding(name, damage=f"{error} (after {samples:,} samples)")
    except Stopped:
        raise
    except Exception as error:  # object stores' clients raise many kinds
        return ShardFinding(name, unread=f"{type(error).__name__}: {error}")
    if not samples:
        return ShardFinding(name, damage="is empty")
    return ShardFinding(name, samples, file.bytes, file.sha256.hexdigest(), dict(unusable), caption=str(caption))


class _Hashed:
    """A stream that is hashed as it is read, until somebody says stop."""

    def __init__(self, file: BinaryIO, stop: threading.Event) -> None:
        self._file, self._stop, self.sha256, self.bytes = file, stop, hashlib.sha256(), 0

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        if self._stop.is_set():
            raise Stopped
        data = self._file.read(size)
        self.sha256.update(data)
        self.bytes += len(data)
        return data

    def drain(self) -> None:
        while self.read(_CHUNK):
            pass


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
            f"Cannot write in {root} ({error.strerror}). Make a folder of your own for the manifest, and name the "
            f"shards: `neuclip manifest OWN_FOLDER --shards '{root.absolute()}/{{00000..00099}}.tar'`."
        ) from error


def _read_journal(root: Path) -> dict[str, ShardFinding]:
    try:
        lines = (root / JOURNAL).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found: dict[str, ShardFinding] = {}
    for line in lines:
        try:
            entry = ShardFinding(**json.loads(line))
        except (ValueError, TypeError):
            continue  # the line that an interruption cut short
        path = root / entry.name
        if not is_local(entry.name) or (path.exists() and path.stat().st_size == entry.bytes):
            found[entry.name] = entry
    return found
