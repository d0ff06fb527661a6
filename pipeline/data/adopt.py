"""`neuclip manifest`: a manifest for webdataset shards that were not made by `neuclip download`.

Every shard is read once, whole: its samples are counted as training will count them, its bytes hashed. What is known of
finished shards is kept in a journal, so that an interrupted pass over many terabytes goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from pipeline.data.caption import CaptionField
from pipeline.data.decode import CorruptSample
from pipeline.data.manifest import MANIFEST_NAME, Manifest, make_manifest, shard_url
from pipeline.data.opening import is_local, open_shard
from pipeline.data.tar import DamagedTar, Record, read_records
from pipeline.errors import UserError

JOURNAL = "manifest.partial.jsonl"
DOWNLOADED = "download.yaml"  # stands in a folder that `neuclip download` keeps
TEXT = CaptionField()
_CHUNK = 1 << 20
_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """What one shard holds. unusable: its samples that training cannot use, by reason; problem: why none can be.

    caption: where captions were looked for.
    """

    name: str
    samples: int = 0
    bytes: int = 0
    sha256: str = ""
    unusable: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    caption: str = str(TEXT)


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
    names = _names(root, patterns)
    _check_folder(root, replace=replace)
    findings = _read_all(root, names, caption, threads=threads, on_shard=on_shard)
    bad = {name: found.problem for name in names if (found := findings[name]).problem}
    if bad and not leave_out:
        shown = "; ".join(f"{name} {problem}" for name, problem in list(bad.items())[:_SHOWN])
        raise UserError(
            f"{len(bad):,} of {len(names):,} shards cannot be used: {shown}. Fetch them again, or go on without them "
            "with --leave-out. What was read of the others is kept."
        )
    kept = [findings[name] for name in names if name not in bad]
    unusable = sum((Counter(found.unusable) for found in kept), Counter[str]())
    _check_usable(root, kept, unusable, caption)
    facts = {"made by": "neuclip manifest", "unusable": dict(unusable), "left out": bad}
    manifest = make_manifest([(f.name, f.samples, f.bytes, f.sha256) for f in kept], root=root, facts=facts)
    manifest.save(root)
    (root / JOURNAL).unlink(missing_ok=True)
    return Adoption(manifest, unusable, bad)


def read_shard(name: str, url: str, caption: CaptionField = TEXT) -> Finding:
    """Count and hash one shard, in one pass over its bytes."""
    unusable: Counter[str] = Counter()
    samples = 0
    try:
        with open_shard(url) as raw:
            file = _Hashed(raw)
            for record in read_records(cast(BinaryIO, file), caption_suffix=caption.suffix):
                samples += 1
                unusable.update(_reasons(record, caption))
            file.drain()
    except DamagedTar as error:
        return Finding(name, problem=f"{error} (after {samples:,} samples)")
    except Exception as error:  # object stores' clients raise many kinds
        return Finding(name, problem=f"cannot be read ({str(error) or type(error).__name__})")
    if not samples:
        return Finding(name, problem="is empty")
    return Finding(name, samples, file.bytes, file.sha256.hexdigest(), dict(unusable), caption=str(caption))


class _Hashed:
    """A stream that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        self.bytes += len(data)
        return data

    def drain(self) -> None:
        while self.read(_CHUNK):
            pass


def _reasons(record: Record, caption: CaptionField) -> Iterator[str]:
    if record.image is None:
        yield "image is missing"
        return
    try:
        caption.read(record)
    except CorruptSample as error:
        yield str(error)


def _names(root: Path, patterns: Sequence[str]) -> list[str]:
    """The shards' names in the manifest, in id order."""
    from braceexpand import braceexpand

    if not root.is_dir():
        raise UserError(f"There is no folder {root}: name the folder of the shards, or one for the manifest of others.")
    if not patterns:
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.tar"))
        if not names:
            raise UserError(f"There is no .tar below {root}. Shards that lie elsewhere are named with --shards.")
    else:
        names = [name for pattern in patterns for name in braceexpand(pattern)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"{len(twice):,} shards are named twice, such as {twice[0]}: name each once.")
    if odd := [name for name in names if is_local(name) and ":" in name]:
        raise UserError(f"The name {odd[0]!r} has a colon, which a manifest takes for a URL's: rename the shard.")
    return names


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


def _read_all(
    root: Path, names: Sequence[str], caption: CaptionField, *, threads: int, on_shard: Callable[[int, int], None]
) -> dict[str, Finding]:
    """Findings by name: those of the journal, if their files have not changed size, and new ones."""
    wanted = set(names)
    findings = {
        name: found for name, found in _journal(root).items() if name in wanted and found.caption == str(caption)
    }
    remaining = [name for name in names if name not in findings]
    with closing((root / JOURNAL).open("a", encoding="utf-8")) as journal, ThreadPoolExecutor(threads) as pool:
        jobs = [pool.submit(read_shard, name, shard_url(root, name), caption) for name in remaining]
        try:
            for job in as_completed(jobs):
                found = job.result()
                findings[found.name] = found
                if not found.problem:
                    journal.write(json.dumps(asdict(found)) + "\n")
                    journal.flush()
                on_shard(len(findings), len(names))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return findings


def _journal(root: Path) -> dict[str, Finding]:
    try:
        lines = (root / JOURNAL).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found: dict[str, Finding] = {}
    for line in lines:
        try:
            entry = Finding(**json.loads(line))
        except (ValueError, TypeError):
            continue  # the line that an interruption cut short
        path = root / entry.name
        if not is_local(entry.name) or (path.exists() and path.stat().st_size == entry.bytes):
            found[entry.name] = entry
    return found


def _check_usable(root: Path, kept: Sequence[Finding], unusable: Counter[str], caption: CaptionField) -> None:
    total = sum(found.samples for found in kept)
    if not total:
        raise UserError("No shard can be used.")
    if unusable.total() < total:
        return
    first = kept[0]
    with open_shard(shard_url(root, first.name)) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        seen = [member.name for member, _ in zip(archive, range(_SHOWN), strict=False)]
    raise UserError(
        f"None of the {total:,} samples can be trained on ({dict(unusable)}). Training reads an image (.jpg, .jpeg, "
        f".png or .webp) and a caption (now: {caption}) with the same name, side by side in the tar; {first.name} "
        f"begins with {', '.join(seen)}. Captions in JSON are named by --caption json:FIELD."
    )
