"""`neuclip manifest`: write the manifest of webdataset shards that `neuclip download` did not make."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.shards.manifest_format import JOURNAL, MANIFEST_NAME, Manifest, make_manifest
from pipeline.data.shards.scan_shards import SHOWN, ShardScan, check_usable, scan_shards, total_of
from pipeline.data.shards.storage import is_local, list_shards
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.errors import UserError
from pipeline.files import as_text

DOWNLOADED = "download.yaml"  # marks a folder that `neuclip download` made and maintains
TEXT = CaptionField()
EQUAL = "shards have the same bytes as another one, so that their samples are shown more than once"
UNREAD = (".TAR", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(frozen=True)
class IndexedShards:
    """The manifest that was written, and what training will not be able to use."""

    manifest: Manifest
    unusable: Counter[str]
    """Samples in the manifest that training cannot use, by reason."""
    notes: Counter[str]
    """What else is odd about the shards, and how often."""
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
    names = _expand(patterns) if patterns else list_shards(root)
    others = 0 if patterns else len(list_shards(root, UNREAD))
    if not names:
        raise UserError(f"There is no .tar below {root}. Name shards in other places with --shards.")
    _check_names(names)
    scans = scan_shards(root, names, caption=caption, threads=threads, on_shard=on_shard)
    ordered = [scans[name] for name in names]
    _check_read(ordered, leave_out=leave_out)
    kept = [one for one in ordered if not one.damage]
    check_usable(root, kept, caption)
    left_out = {one.name: one.damage for one in ordered if one.damage}
    unusable = total_of(kept, "unusable")
    notes = total_of(kept, "notes")
    notes += Counter(
        {
            EQUAL: len(kept) - len({one.sha256 for one in kept}),
            f"files end in {' or '.join(UNREAD)}, and are not read": others,
        }
    )
    facts = {"made by": "neuclip manifest", "unusable": dict(unusable), "left out": left_out}
    facts |= {"notes": dict(notes)} if notes else {}
    manifest = make_manifest([(f.name, f.samples, f.bytes, f.sha256) for f in kept], root=root, facts=facts)
    manifest.save(root)
    (root / JOURNAL).unlink(missing_ok=True)
    return IndexedShards(manifest, unusable, notes, left_out)


def _expand(patterns: Sequence[str]) -> list[str]:
    from braceexpand import braceexpand

    try:
        return [name for pattern in patterns for name in braceexpand(pattern, escape=False)]
    except ValueError as error:
        raise UserError(f"--shards: {error}. Braces must be balanced, as in {{00000..00099}}.") from error


def _check_names(names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{len(twice):,} shards are named twice, such as {twice[0]}: name each of them once.")
    if odd := [name for name in names if as_text(name) != name]:
        raise UserError(f"The name {as_text(odd[0])} is not UTF-8, which a manifest is: rename the shard.")
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


def _check_read(scans: Sequence[ShardScan], *, leave_out: bool) -> None:
    """Refuse shards that could not be read, always, and damaged ones unless they may be left out.

    A read error may be temporary, so such a shard is never left out.
    """
    if unread := [f"{one.name} ({one.unread})" for one in scans if one.unread]:
        absent = sum(one.unread.startswith("FileNotFoundError") for one in scans)
        gaps = (
            f" {absent:,} do not exist: if their numbers have gaps, give --shards once for each row without gaps."
            if absent
            else ""
        )
        raise UserError(
            f"{len(unread):,} of {len(scans):,} shards cannot be read: {'; '.join(unread[:SHOWN])}.{gaps} The "
            "results of the others are saved: run the same command again when these can be read."
        )
    damaged = [f"{one.name} {one.damage}" for one in scans if one.damage]
    if damaged and not leave_out:
        raise UserError(
            f"{len(damaged):,} of {len(scans):,} shards cannot be used: {'; '.join(damaged[:SHOWN])}. Download them "
            "again, or continue without them with --leave-out. The results of the others are saved."
        )
    if len(damaged) == len(scans):
        raise UserError(f"None of the {len(scans):,} shards can be used: {'; '.join(damaged[:SHOWN])}.")
