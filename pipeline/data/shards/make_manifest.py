"""`neuclip manifest`: a manifest for webdataset shards that were not made by `neuclip download`."""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.data.shards.caption_field import CaptionField
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, make_manifest, shard_url
from pipeline.data.shards.scan import JOURNAL, ShardFinding, survey
from pipeline.data.shards.storage import is_local, open_shard
from pipeline.errors import UserError

DOWNLOADED = "download.yaml"  # stands in a folder that `neuclip download` keeps
TEXT = CaptionField()
_SHOWN = 5
_JUDGED = 3  # shards after which a pass ends that has met no usable sample


@dataclass(frozen=True)
class Adoption:
    """left_out: the shards that are not in the manifest, and why."""

    manifest: Manifest
    unusable: Counter[str]
    left_out: Mapping[str, str]


def adopt(
    root: str | Path,
    patterns: Sequence[str] = (),
    *,
    caption: CaptionField = TEXT,
    leave_out: bool = False,
    replace: bool = False,
    threads: int = 8,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> Adoption:
    """Read all shards and write `root/manifest.json`.

    Args: patterns: URLs, `pipe:` commands or paths of shards, with braces such as `{00000..00099}`; none: every `.tar`
      below `root`, by name. caption: where captions are; it only matters for the count of samples without. leave_out:
      go on without shards that are damaged or empty. on_shard: called with the numbers of shards done and of all.
    Raises: UserError when there is nothing to read, a manifest would be lost, or a shard cannot be used.
    """
    root = Path(root)
    if not root.is_dir():
        raise UserError(f"There is no folder {root}: name the folder of the shards, or one for the manifest of others.")
    _check_folder(root, replace=replace)
    names = _expand(patterns) if patterns else _find(root)
    _check_names(names)
    seen: list[ShardFinding] = []

    def judge(found: ShardFinding, done: int) -> None:
        on_shard(done, len(names))
        if len(seen) < _JUDGED:
            seen.append(found)
            if len(seen) == _JUDGED:
                _check_usable(root, seen, caption)

    findings = survey(root, names, caption=caption, threads=threads, on_finding=judge)
    found = [findings[name] for name in names]
    _check_read(found, leave_out=leave_out)
    kept = [one for one in found if not one.damage]
    _check_usable(root, kept, caption)
    left_out = {one.name: one.damage for one in found if one.damage}
    unusable = _unusable(kept)
    facts = {"made by": "neuclip manifest", "unusable": dict(unusable), "left out": left_out}
    manifest = make_manifest([(f.name, f.samples, f.bytes, f.sha256) for f in kept], root=root, facts=facts)
    manifest.save(root)
    (root / JOURNAL).unlink(missing_ok=True)
    return Adoption(manifest, unusable, left_out)


def _expand(patterns: Sequence[str]) -> list[str]:
    from braceexpand import braceexpand

    try:
        return [name for pattern in patterns for name in braceexpand(pattern, escape=False)]
    except ValueError as error:
        raise UserError(f"--shards: {error}. Braces come in pairs, as in {{00000..00099}}.") from error


def _find(root: Path) -> list[str]:
    """Every .tar below `root`, by name; links to folders are followed, and a folder that cannot be read is an error."""

    def refuse(error: OSError) -> None:
        raise UserError(f"Cannot look into {error.filename} ({error.strerror}), where shards may be.") from error

    names, folders = [], set[str]()
    for folder, below, files in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in folders:  # a link that leads back
            below.clear()
            continue
        folders.add(real)
        names += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".tar")]
    if not names:
        raise UserError(f"There is no .tar below {root}. Shards that lie elsewhere are named with --shards.")
    return sorted(names)


def _check_names(names: Sequence[str]) -> None:
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{len(twice):,} shards are named twice, such as {twice[0]}: name each once.")
    if odd := [name for name in names if is_local(name) and ":" in name]:
        raise UserError(f"The name {odd[0]!r} has a colon, which a manifest takes for a URL's: rename the shard.")


def _check_folder(root: Path, *, replace: bool) -> None:
    if (root / DOWNLOADED).exists():
        raise UserError(
            f"{root} was made by `neuclip download`, which keeps its manifest: see `neuclip verify {root}`."
        )
    if (root / MANIFEST_NAME).exists() and not replace:
        raise UserError(
            f"{root} has a manifest already. --replace writes it anew; if the shards have changed meanwhile, runs on "
            "the old one cannot be resumed."
        )


def _check_read(found: Sequence[ShardFinding], *, leave_out: bool) -> None:
    """What could not be read may be there tomorrow, and is never left out; what is damaged is on demand."""
    if unread := [f"{one.name} ({one.unread})" for one in found if one.unread]:
        raise UserError(
            f"{len(unread):,} of {len(found):,} shards cannot be read: {'; '.join(unread[:_SHOWN])}. What was read of "
            "the others is kept: start the same command again when they can."
        )
    damaged = [f"{one.name} {one.damage}" for one in found if one.damage]
    if damaged and not leave_out:
        raise UserError(
            f"{len(damaged):,} of {len(found):,} shards cannot be used: {'; '.join(damaged[:_SHOWN])}. Fetch them "
            "again, or go on without them with --leave-out. What was read of the others is kept."
        )
    if len(damaged) == len(found):
        raise UserError(f"None of the {len(found):,} shards can be used: {'; '.join(damaged[:_SHOWN])}.")


def _unusable(found: Sequence[ShardFinding]) -> Counter[str]:
    return sum((Counter(one.unusable) for one in found), Counter[str]())


def _check_usable(root: Path, found: Sequence[ShardFinding], caption: CaptionField) -> None:
    """Raises: UserError when there are samples, but none that can be trained on."""
    total, unusable = sum(one.samples for one in found), _unusable(found)
    if not total or unusable.total() < total:
        return
    first = next(one.name for one in found if one.samples)
    with open_shard(shard_url(root, first)) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        members = [member.name for member, _ in zip(archive, range(_SHOWN), strict=False)]
    raise UserError(
        f"None of the first {total:,} samples can be trained on ({dict(unusable)}). Training reads an image (.jpg, "
        f".jpeg, .png or .webp) and a caption (now: {caption}) with the same name, side by side in the tar; {first} "
        f"begins with {', '.join(members)}. Captions in JSON are named by --caption json:FIELD."
    )
