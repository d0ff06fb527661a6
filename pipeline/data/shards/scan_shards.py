"""Scan webdataset shards for `neuclip manifest`: one pass over the bytes of each.

It counts samples, and those that training cannot use, computes SHA-256 and indexes the members. The results of finished
shards are saved in a journal, so that an interrupted scan of many terabytes continues where it stopped.
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

from pipeline.data.shards.manifest_format import JOURNAL, shard_url
from pipeline.data.shards.shard_index import as_members, save_index
from pipeline.data.shards.storage import StreamHash, is_local, open_shard
from pipeline.data.shards.tar_reader import (
    CaptionField,
    CorruptSample,
    DamagedTar,
    MemberPlace,
    TarRecord,
    members,
    read_records,
)
from pipeline.errors import UserError

SHOWN = 5
PROBED = 3
"""If so many first shards hold no usable sample, the scan stops."""
UNENDED = "shards end without the zeros of a whole tar: perhaps cut between two files (what is there is used)"
SCATTERED = (
    "samples have the name of an earlier one of their shard: the files of a sample must be neighbours (tar --sort=name)"
)
REPEATED = "files are ignored, because their sample has one of the same name already"


@dataclass(frozen=True)
class ShardScan:
    """What the scan of one shard found."""

    name: str
    samples: int = 0
    bytes: int = 0
    sha256: str = ""
    unusable: Mapping[str, int] = field(default_factory=dict)
    """Samples that training cannot use, by reason."""
    notes: Mapping[str, int] = field(default_factory=dict)
    """What else is odd about the shard, and how often."""
    damage: str = ""
    """Why no sample of the shard should be used."""
    unread: str = ""
    """Why the shard could not be read at all; the cause may be temporary."""
    caption: str = "txt"
    """Where captions were expected."""
    changed: int = 0
    """When a local file was last changed, in nanoseconds: another one may have its size."""


def scan_shards(
    root: Path, names: Sequence[str], *, caption: CaptionField, threads: int, on_shard: Callable[[int, int], None]
) -> dict[str, ShardScan]:
    """Scan shards, except those in the journal whose files have not changed since, and return the results by name.

    Args:
        root: The folder of the manifest.
        names: Of the shards.
        caption: Where captions are.
        threads: Shards that are read at a time.
        on_shard: Called with the number of shards that are done, and of all.

    Raises:
        UserError: The first shards hold no sample that training can use: the scan ends at once.
    """
    wanted, stop = set(names), threading.Event()
    known = _read_journal(root).items()
    scans = {name: scan for name, scan in known if name in wanted and scan.caption == str(caption)}
    first: list[ShardScan] = []
    with _open_journal(root) as journal, ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(_read_shard, root, name, caption, stop=stop) for name in names if name not in scans]
        try:
            for job in as_completed(jobs):
                scan = job.result()
                scans[scan.name] = scan
                if not (scan.damage or scan.unread):
                    journal.write(json.dumps(asdict(scan)) + "\n")
                    journal.flush()
                on_shard(len(scans), len(names))
                first.append(scan)
                if len(first) == PROBED:
                    check_usable(root, first, caption)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return scans


def _read_shard(root: Path, name: str, caption: CaptionField, *, stop: threading.Event) -> ShardScan:
    """Count, hash and index one shard in one pass over its bytes."""
    url = shard_url(root, name)

    def check() -> None:
        if stop.is_set():
            raise CancelledError  # soon after the scan has ended: nobody takes this result

    unusable, notes, keys = Counter[str](), Counter[str](), set[str]()
    samples, hashed, changed = 0, StreamHash(check), 0
    index: list[MemberPlace] = []
    try:
        if is_local(url):
            changed = os.stat(url).st_mtime_ns
        with open_shard(url) as file:
            stream = hashed.over(file)
            for record in read_records(
                stream,
                caption_suffix=caption.suffix,
                strict=True,
                on_unended=lambda: notes.update([UNENDED]),
                index=index,
            ):
                samples += 1
                unusable.update(_reasons(record, caption))
                notes.update({SCATTERED: record.key in keys, REPEATED: record.repeated})
                keys.add(record.key)
            sha256 = hashed.finish() or ""
    except DamagedTar as error:
        return ShardScan(name, damage=f"{error} (after {samples:,} samples)")
    except Exception as error:  # clients of object stores raise exceptions of many types
        return ShardScan(name, unread=f"{type(error).__name__}: {error}")
    if not samples:
        return ShardScan(name, damage="is empty")
    save_index(root, as_members(index), sha256=sha256)
    return ShardScan(
        name, samples, hashed.bytes, sha256, dict(unusable), dict(+notes), caption=str(caption), changed=changed
    )


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
    scans: dict[str, ShardScan] = {}
    for line in lines:
        try:
            entry = ShardScan(**json.loads(line))
        except (ValueError, TypeError):
            continue  # an interruption truncated this line
        path = root / entry.name
        about = path.stat() if is_local(entry.name) and path.exists() else None
        if not is_local(entry.name) or (about and (about.st_size, about.st_mtime_ns) == (entry.bytes, entry.changed)):
            scans[entry.name] = entry
    return scans


def total_of(scans: Sequence[ShardScan], counts: str) -> Counter[str]:
    return sum((Counter(getattr(one, counts)) for one in scans), Counter[str]())


def check_usable(root: Path, scans: Sequence[ShardScan], caption: CaptionField) -> None:
    """Refuse shards that hold samples, but none that training can use."""
    total, unusable = sum(one.samples for one in scans), total_of(scans, "unusable")
    if not total or unusable.total() < total:
        return
    first = next(one.name for one in scans if one.samples)
    with open_shard(shard_url(root, first)) as file:
        names = [name for name, _ in islice(members(file), SHOWN)]
    scattered = f" {count:,} {SCATTERED}." if (count := total_of(scans, "notes")[SCATTERED]) else ""
    raise UserError(
        f"None of the first {total:,} samples can be used for training ({dict(unusable)}).{scattered} A sample is an "
        f"image (.jpg, .jpeg, .png or .webp) and a caption (now: {caption}) with the same name, next to each other in "
        "the tar; "
        f"{first} starts with {', '.join(names)}. For captions in JSON, use --caption json:FIELD."
    )
