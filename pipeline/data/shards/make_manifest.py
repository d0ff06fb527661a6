"""`neuclip manifest`: the manifest of webdataset shards that `neuclip download` did not make.

One pass over the bytes of each shard counts its samples, and those that training cannot use, computes SHA-256 and
indexes the members. The results of finished shards are saved in a journal, so that an interrupted scan of many
terabytes continues where it stopped.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from pipeline.data.shards.manifest_format import (
    JOURNAL,
    MANIFEST_NAME,
    Manifest,
    make_manifest,
    refuse_commands,
    shard_url,
)
from pipeline.data.shards.storage import StreamHash, as_members, is_local, list_shards, open_shard, save_index
from pipeline.data.shards.tar_reader import (
    CaptionField,
    CorruptSample,
    DamagedTar,
    MemberPlace,
    members,
    read_records,
)
from pipeline.errors import UserError
from pipeline.files import as_text

DOWNLOADED = "download.yaml"  # marks a folder that `neuclip download` made and maintains
TEXT = CaptionField()
EQUAL = "shards have the same bytes as another one, so that their samples are shown more than once"
COMPRESSED = (".TAR", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
OTHER = f"files end in {' or '.join(COMPRESSED)}, and are not read"
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
    """What the scan of one shard found: samples that training cannot use, by reason, what else is odd and how often,
    why none of it should be used (`damage`) and why it could not be read (`unread`, which may be temporary).
    """

    name: str
    samples: int = 0
    bytes: int = 0
    sha256: str = ""
    unusable: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    damage: str = ""
    unread: str = ""
    caption: str = "txt"
    changed: int = 0
    """When a local file was last changed, in nanoseconds: another one may have its size."""


def index_shards(
    root: str | Path,
    patterns: Sequence[str] = (),
    *,
    caption: CaptionField = TEXT,
    leave_out: bool = False,
    replace: bool = False,
    threads: int = 8,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Read all shards and write `root/manifest.json`.

    Args:
        root: Folder of the shards, or the folder for the manifest if `patterns` names shards elsewhere.
        patterns: URLs or paths of shards, with braces such as `{00000..00099}`. Without any, every `.tar` below `root`,
            sorted by name.
        caption: Where captions are; only used to count samples without one.
        leave_out: Continue without shards that are damaged or empty.
        replace: Overwrite an existing manifest.
        threads: Shards that are read at a time.
        on_shard: Called with the number of shards that are done, and of all.

    Returns:
        The manifest, whose facts count what training cannot use (`unusable`) and what else is odd (`notes`), and list
        the shards that are `left out`, with the reason. UserError if there is nothing to read, a manifest exists
        already, or a shard cannot be used.
    """
    root = Path(root)
    names = _names(root, patterns, replace=replace)
    others = 0 if patterns else len(list_shards(root, COMPRESSED))
    scans = _scan_shards(root, names, caption=caption, threads=threads, on_shard=on_shard)
    _check_read(scans, leave_out=leave_out)
    kept = [one for one in scans if not one.damage]
    _check_usable(root, kept, caption)
    odd = Counter({EQUAL: len(kept) - len({one.sha256 for one in kept}), OTHER: others})
    notes = _total(kept, "notes") + odd
    left_out = {one.name: one.damage for one in scans if one.damage}
    facts = {"made by": "neuclip manifest", "unusable": dict(_total(kept, "unusable")), "left out": left_out}
    facts |= {"notes": dict(notes)} if notes else {}
    manifest = make_manifest([(f.name, f.samples, f.bytes, f.sha256) for f in kept], root=root, facts=facts)
    manifest.save(root)
    (root / JOURNAL).unlink(missing_ok=True)
    return manifest


def _names(root: Path, patterns: Sequence[str], *, replace: bool) -> list[str]:
    """The names of the shards in order; UserError if there are none or invalid ones, or the folder has a manifest."""
    from braceexpand import braceexpand

    if not root.is_dir():
        raise UserError(f"There is no folder {root}: name the folder of the shards, or one for the manifest alone.")
    if (root / DOWNLOADED).exists():
        raise UserError(
            f"{root} was made by `neuclip download`, which maintains its manifest: see `neuclip verify "
            f"{shlex.quote(str(root))}`."
        )
    if (root / MANIFEST_NAME).exists() and not replace:
        raise UserError(
            f"{root} has a manifest already. --replace overwrites it; if the shards have changed since, runs that used "
            "the old one cannot be resumed."
        )
    try:
        names = [name for pattern in patterns for name in braceexpand(pattern, escape=False)]
    except ValueError as error:
        raise UserError(f"--shards: {error}. Braces must be balanced, as in {{00000..00099}}.") from error
    names = names or list_shards(root)
    if not names:
        raise UserError(f"There is no .tar below {root}. Name shards in other places with --shards.")
    refuse_commands(names)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{len(twice):,} shards are named twice, such as {twice[0]}: name each of them once.")
    if odd := [name for name in names if as_text(name) != name or (is_local(name) and ":" in name)]:
        raise UserError(
            f"The name {as_text(odd[0])} is not UTF-8, or has a colon, which makes it a URL: rename the shard."
        )
    return names


def _check_read(scans: Sequence[ShardScan], *, leave_out: bool) -> None:
    """Refuse shards that could not be read, always, and damaged ones unless they may be left out.

    A read error may be temporary, so such a shard is never left out.
    """
    if unread := [f"{one.name} ({one.unread})" for one in scans if one.unread]:
        absent = sum(one.unread.startswith("FileNotFoundError") for one in scans)
        gaps = f" {absent:,} do not exist: if their numbers have gaps, give --shards once for each row without gaps."
        raise UserError(
            f"{len(unread):,} of {len(scans):,} shards cannot be read: {'; '.join(unread[:SHOWN])}."
            f"{gaps if absent else ''} The results of the others are saved: run the same command again when these can "
            "be read."
        )
    damaged = [f"{one.name} {one.damage}" for one in scans if one.damage]
    if damaged and (not leave_out or len(damaged) == len(scans)):
        raise UserError(
            f"{len(damaged):,} of {len(scans):,} shards cannot be used: {'; '.join(damaged[:SHOWN])}. Download them "
            "again, or continue without them with --leave-out. The results of the others are saved."
        )


def _scan_shards(
    root: Path, names: Sequence[str], *, caption: CaptionField, threads: int, on_shard: Callable[[int, int], None]
) -> list[ShardScan]:
    """The scans in the order of names: of the journal, where files have not changed since, and new ones of the others.

    It ends at once with a UserError if the first shards hold no sample that training can use.
    """
    wanted, stop, first = set(names), threading.Event(), list[ShardScan]()
    try:
        known = _read_journal(root).items()
        journal = (root / JOURNAL).open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"Cannot write to {root} ({error.strerror}). Create a folder of your own for the manifest and name the "
            f"shards: `neuclip manifest OWN_FOLDER --shards '{root.absolute()}/{{00000..00099}}.tar'`."
        ) from error
    scans = {name: scan for name, scan in known if name in wanted and scan.caption == str(caption)}
    with journal, ThreadPoolExecutor(threads) as pool:
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
                    _check_usable(root, first, caption)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [scans[name] for name in names]


def _read_shard(root: Path, name: str, caption: CaptionField, *, stop: threading.Event) -> ShardScan:
    """Count, hash and index one shard in one pass over its bytes."""
    url, unusable, notes, keys = shard_url(root, name), Counter[str](), Counter[str](), set[str]()

    def check() -> None:
        if stop.is_set():
            raise CancelledError  # soon after the scan has ended: nobody takes this result

    samples, hashed, changed, index = 0, StreamHash(check), 0, list[MemberPlace]()
    try:
        if is_local(url):
            changed = os.stat(url).st_mtime_ns
        with open_shard(url) as file:
            records = read_records(
                hashed.over(file),
                caption_suffix=caption.suffix,
                strict=True,
                on_unended=lambda: notes.update([UNENDED]),
                index=index,
            )
            for record in records:
                samples += 1
                try:
                    if record.image is None:
                        raise CorruptSample("image is missing")
                    caption.read(record)
                except CorruptSample as error:
                    unusable[str(error)] += 1
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


def _read_journal(root: Path) -> dict[str, ShardScan]:
    scans: dict[str, ShardScan] = {}
    path = root / JOURNAL
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError, TypeError, OSError):  # an interruption truncated this line, or the shard is away
            entry = ShardScan(**json.loads(line))
            about = os.stat(root / entry.name) if is_local(entry.name) else None
            if about is None or (about.st_size, about.st_mtime_ns) == (entry.bytes, entry.changed):
                scans[entry.name] = entry
    return scans


def _total(scans: Sequence[ShardScan], counts: str) -> Counter[str]:
    return sum((Counter(getattr(one, counts)) for one in scans), Counter[str]())


def _check_usable(root: Path, scans: Sequence[ShardScan], caption: CaptionField) -> None:
    """Refuse shards that hold samples, but none that training can use."""
    total, unusable = sum(one.samples for one in scans), _total(scans, "unusable")
    if not total or unusable.total() < total:
        return
    first = next(one.name for one in scans if one.samples)
    with open_shard(shard_url(root, first)) as file:
        names = ", ".join(name for name, _ in islice(members(file), SHOWN))
    scattered = f" {count:,} {SCATTERED}." if (count := _total(scans, "notes")[SCATTERED]) else ""
    raise UserError(
        f"None of the first {total:,} samples can be used for training ({dict(unusable)}).{scattered} A sample is an "
        f"image (.jpg, .jpeg, .png or .webp) and a caption (now: {caption}) with the same name, next to each other in "
        f"the tar; {first} starts with {names}. For captions in JSON, use --caption json:FIELD."
    )
