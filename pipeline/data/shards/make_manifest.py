"""`neuclip manifest`: write the manifest of webdataset shards that `neuclip download` did not make."""

from __future__ import annotations

import os
import shlex
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, make_manifest, shard_url
from pipeline.data.shards.scan import JOURNAL, ShardScan, scan_shards
from pipeline.data.shards.storage import is_local, open_shard
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.errors import UserError

DOWNLOADED = "download.yaml"  # marks a folder that `neuclip download` made and maintains
TEXT = CaptionField()
_SHOWN = 5
_PROBED = 3  # if the first so many shards hold no usable sample, the scan stops


@dataclass(frozen=True)
class IndexedShards:
    """The manifest that was written, and what training will not be able to use."""

    manifest: Manifest
    unusable: Counter[str]
    """Samples in the manifest that training cannot use, by reason."""
    left_out: Mapping[str, str]
    """Shards that are not in the manifest, with the reason."""


def index_shards(
    root: str | Path,
    patterns: Sequence[str] = (),
    *,
    caption: CaptionField = TEXT,
    leave_out: bool = False,
    replace: bool = False,
    threads: int = 8,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> IndexedShards:
    """Read all shards and write `root/manifest.json`.

    Args:
        root: Folder of the shards, or the folder for the manifest if `patterns` names shards elsewhere.
        patterns: URLs, `pipe:` commands or paths of shards, with braces such as `{00000..00099}`. Without any, every
            `.tar` below `root`, sorted by name.
        caption: Where captions are; only used to count samples without one.
        leave_out: Continue without shards that are damaged or empty.
        replace: Overwrite an existing manifest.
        threads: Shards that are read at a time.
        on_shard: Called with the number of shards that are done, and of all.

    Raises:
        UserError: There is nothing to read, a manifest exists already, or a shard cannot be used.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"There is no folder {root}: name the folder of the shards, or one for the manifest alone.")
    _check_folder(root, replace=replace)
    names = _expand(patterns) if patterns else _find(root)
    _check_names(names)
    first: list[ShardScan] = []

    def on_scan(scan: ShardScan, done: int) -> None:
        on_shard(done, len(names))
        if len(first) < _PROBED:
            first.append(scan)
            if len(first) == _PROBED:
                _check_usable(root, first, caption)

    scans = scan_shards(root, names, caption=caption, threads=threads, on_scan=on_scan)
    found = [scans[name] for name in names]
    _check_read(found, leave_out=leave_out)
    kept = [one for one in found if not one.damage]
    _check_usable(root, kept, caption)
    left_out = {one.name: one.damage for one in found if one.damage}
    unusable = _unusable(kept)
    facts = {"made by": "neuclip manifest", "unusable": dict(unusable), "left out": left_out}
    manifest = make_manifest([(f.name, f.samples, f.bytes, f.sha256) for f in kept], root=root, facts=facts)
    manifest.save(root)
    (root / JOURNAL).unlink(missing_ok=True)
    return IndexedShards(manifest, unusable, left_out)


def _expand(patterns: Sequence[str]) -> list[str]:
    from braceexpand import braceexpand

    try:
        return [name for pattern in patterns for name in braceexpand(pattern, escape=False)]
    except ValueError as error:
        raise UserError(f"--shards: {error}. Braces must be balanced, as in {{00000..00099}}.") from error


def _find(root: Path) -> list[str]:
    """Every .tar below `root`, sorted by name; links to folders are followed, an unreadable folder is an error."""

    def refuse(error: OSError) -> None:
        raise UserError(f"Cannot list {error.filename} ({error.strerror}), which may hold shards.") from error

    names, folders = [], set[str]()
    for folder, below, files in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in folders:  # a link to a parent folder
            below.clear()
            continue
        folders.add(real)
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".tar")]
    if not names:
        raise UserError(f"There is no .tar below {root}. Name shards in other places with --shards.")
    return sorted(names)


def _check_names(names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{len(twice):,} shards are named twice, such as {twice[0]}: name each of them once.")
    if odd := [name for name in names if is_local(name) and ":" in name]:
        raise UserError(
            f"The name {odd[0]!r} contains a colon, so a manifest would take it for a URL: rename the shard."
        )


def _check_folder(root: Path, *, replace: bool) -> None:
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


def _check_read(found: Sequence[ShardScan], *, leave_out: bool) -> None:
    """Refuse shards that could not be read, always, and damaged ones unless they may be left out.

    A read error may be temporary, so such a shard is never left out.
    """
    if unread := [f"{one.name} ({one.unread})" for one in found if one.unread]:
        raise UserError(
            f"{len(unread):,} of {len(found):,} shards cannot be read: {'; '.join(unread[:_SHOWN])}. The "
            "results of the others are saved: run the same command again when these can be read."
        )
    damaged = [f"{one.name} {one.damage}" for one in found if one.damage]
    if damaged and not leave_out:
        raise UserError(
            f"{len(damaged):,} of {len(found):,} shards cannot be used: {'; '.join(damaged[:_SHOWN])}. Download them "
            "again, or continue without them with --leave-out. The results of the others are saved."
        )
    if len(damaged) == len(found):
        raise UserError(f"None of the {len(found):,} shards can be used: {'; '.join(damaged[:_SHOWN])}.")


def _unusable(found: Sequence[ShardScan]) -> Counter[str]:
    return sum((Counter(one.unusable) for one in found), Counter[str]())


def _check_usable(root: Path, found: Sequence[ShardScan], caption: CaptionField) -> None:
    """Refuse shards that hold samples, but none that training can use."""
    total, unusable = sum(one.samples for one in found), _unusable(found)
    if not total or unusable.total() < total:
        return
    first = next(one.name for one in found if one.samples)
    with open_shard(shard_url(root, first)) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        members = [member.name for member, _ in zip(archive, range(_SHOWN), strict=False)]
    raise UserError(
        f"None of the first {total:,} samples can be used for training ({dict(unusable)}). A sample is an image (.jpg, "
        f".jpeg, .png or .webp) and a caption (now: {caption}) with the same name, next to each other in the tar; "
        f"{first} starts with {', '.join(members)}. For captions in JSON, use --caption json:FIELD."
    )
