"""`neuclip verify`: check that a data set matches its manifest."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.dataset import canonical_tar
from data_prep.dataset.bookkeeping import Problem, check_bookkeeping, readable_rows
from data_prep.dataset.dataset_folder import Folder, check_local, local_manifest
from data_prep.dataset.manifest_writer import expected_manifest, manifest_of_records
from data_prep.dataset.shard_commit import difference
from data_prep.dataset.shard_plan import load_plan
from pipeline.data.shards.manifest_format import MANIFEST_NAME, Manifest, Shard, load_manifest
from pipeline.data.shards.rgb_image import rgb_image
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.errors import UserError
from pipeline.files import sha256_of


@dataclass(frozen=True)
class Verdict:
    """What `verify` found. `manifest` is None if it can be neither read nor restored from the records."""

    problems: list[Problem]
    manifest: Manifest | None


def verify(
    root: str | Path,
    *,
    decode: int = 16,
    seed: int = 0,
    on_shard: Callable[[int], None] = lambda shards: None,
) -> list[Problem]:
    """Find the problems of a data set; see `inspect`."""
    return inspect(root, decode=decode, seed=seed, on_shard=on_shard).problems


def inspect(
    root: str | Path,
    *,
    decode: int = 16,
    seed: int = 0,
    allow_outside: bool = False,
    on_shard: Callable[[int], None] = lambda shards: None,
) -> Verdict:
    """Check every shard of a manifest: presence, size, SHA-256, that it is a complete tar of the expected
    samples, and that some of its images decode.

    In a folder made by `neuclip download`, the other files are checked as well, and each image and caption is compared
    with its record from fetching. If the manifest cannot be read, the shards are compared with their records.

    Args:
        root: The folder.
        decode: Number of images per shard to decode, chosen by `seed`.
        seed: See `decode`.
        allow_outside: As for `load_manifest`.
        on_shard: Called with the number of shards done so far.

    Raises:
        UserError: There is no manifest, or it cannot be read and the folder was not made by `neuclip download`; or
            shards are not on this machine.
    """
    folder = Folder(Path(root))
    is_own = "://" not in str(root) and folder.is_download
    problems: list[Problem] = []
    manifest: Manifest | None
    try:
        manifest = stated = load_manifest(root) if is_own else local_manifest(root, allow_outside=allow_outside)
    except UserError as error:
        is_there = (folder.root / MANIFEST_NAME).exists()
        if not is_own or not (is_there or _is_finished(folder)):
            raise
        problems.append(Problem(MANIFEST_NAME, "damaged" if is_there else "missing", str(error)))
        manifest, stated = _restored(folder), manifest_of_records(folder)
    check_local(stated)
    if is_own:
        problems.extend(check_bookkeeping(folder, None if problems else manifest))
    for done, shard in enumerate(stated.shards, start=1):
        problems.extend(_check_shard(stated, shard, folder if is_own else None, decode=decode, seed=seed))
        on_shard(done)
    listed = {shard.name for shard in stated.shards}
    tars = sorted(str(path.relative_to(stated.root)) for path in Path(stated.root).rglob("*.tar"))
    problems.extend(Problem(name, "not listed", "it is not in the manifest") for name in tars if name not in listed)
    return Verdict(problems, manifest)


def _is_finished(folder: Folder) -> bool:
    """Whether all shards have a record."""
    try:
        return len(folder.finished()) == load_plan(folder).shards
    except UserError:
        return False


def _restored(folder: Folder) -> Manifest | None:
    try:
        return expected_manifest(folder, load_plan(folder))
    except UserError:  # reported among the problems
        return None


def _check_shard(manifest: Manifest, shard: Shard, own: Folder | None, *, decode: int, seed: int) -> Iterator[Problem]:
    path = Path(manifest.url(shard))
    if not path.exists():
        yield Problem(shard.name, "missing", "there is no such file")
        return
    if not path.is_file():
        yield Problem(shard.name, "no file", "there is a folder in its place")
        return
    size = path.stat().st_size
    if size != shard.bytes:
        yield Problem(shard.name, "size", f"{size:,} bytes instead of {shard.bytes:,}")
    digest = sha256_of(path)
    if digest == shard.sha256:
        # The bytes are those that were published, so only the published content can still be wrong.
        rows = readable_rows(own, path) if own else {}
        if own:
            yield from _check_record(own, shard)
        yield from _check_samples(path, shard, rows, decode=decode, seed=seed)
        return
    yield Problem(shard.name, "sha256", f"{digest[:16]}... instead of {shard.sha256[:16]}...")
    try:
        count = sum(1 for _ in canonical_tar.samples(path))
    except (tarfile.TarError, EOFError, ValueError) as error:
        yield Problem(shard.name, "damaged", f"it is not a complete tar ({error})")
        return
    if count != shard.samples:
        yield Problem(shard.name, "count", f"{count:,} samples instead of {shard.samples:,}")


def _check_record(folder: Folder, shard: Shard) -> Iterator[Problem]:
    """Compare the record of a shard, if it is readable, with the manifest, which states the digest of its tar."""
    number = Path(shard.name).stem
    with suppress(UserError, FileNotFoundError, ValueError):
        record = folder.read_record(int(number))
        if (record.samples, record.bytes, record.sha256) != (shard.samples, shard.bytes, shard.sha256):
            yield Problem(f"meta/{number}.json", "contradicts", "it describes another tar than this one")


def _check_samples(
    path: Path, shard: Shard, rows: Mapping[str, Mapping[str, Any]], *, decode: int, seed: int
) -> Iterator[Problem]:
    """Compare each sample with its row in the meta file, decode a few with PIL, and check the count."""
    chosen = set(random.Random(f"{seed}/{shard.name}").sample(range(shard.samples), min(decode, shard.samples)))
    count = 0
    try:
        for count, (key, parts) in enumerate(canonical_tar.samples(path), start=1):
            if rows:
                yield from _compare(shard.name, key, parts, rows.get(key))
            if count - 1 in chosen:
                yield from _undecodable(shard.name, key, parts)
    except (tarfile.TarError, EOFError, ValueError) as error:
        yield Problem(shard.name, "damaged", f"it is not a complete tar ({error})")
        return
    if count != shard.samples:
        yield Problem(shard.name, "count", f"{count:,} samples instead of {shard.samples:,}")


def _compare(name: str, key: str, parts: Mapping[str, bytes], row: Mapping[str, Any] | None) -> Iterator[Problem]:
    if row is None or row["status"] != "success":
        yield Problem(name, "sample", f"{key} is not a sample according to its meta file")
        return
    if not {"txt", "json"} < set(parts) or len(parts) != 3:
        yield Problem(name, "sample", f"{key} consists of {', '.join(parts)} instead of an image, txt and json")
    found = (difference(row, suffix, payload) for suffix, payload in parts.items())
    yield from (Problem(name, "sample", f"{key}: {problem}") for problem in found if problem)


def _undecodable(name: str, key: str, parts: Mapping[str, bytes]) -> Iterator[Problem]:
    picture = canonical_tar.picture(parts)
    if not picture:
        yield Problem(name, "incomplete", f"sample {key} has no image, only {', '.join(parts) or 'empty members'}")
        return
    try:
        rgb_image(picture)
    except CorruptSample as error:
        yield Problem(name, "undecodable", f"sample {key} ({error})")
