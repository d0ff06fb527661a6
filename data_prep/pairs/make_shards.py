"""`neuclip pairs`: convert any source of pairs to canonical shards with a manifest, in parallel and resumable.

Shard k holds the outcomes of rows `[k S, (k + 1) S)` of the source, regardless of which process writes it and when. The
output of an interrupted and resumed run is therefore bit-identical to that of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import (
    Folder,
    ShardRecord,
    changed,
    content,
    key_of,
    read_meta,
    signed,
    tar_name,
    total_failures,
    write_meta,
)
from data_prep.dataset.manifest_writer import entries_of
from data_prep.dataset.removal import PART, finish_removals, names_of_sample
from data_prep.dataset.sessions import part_lock
from data_prep.pairs.find_source import kind_of, open_source
from data_prep.pairs.listing import Listing
from data_prep.pairs.pair import ImageOptions, Pair, PairSource, SourceOptions, checked, convert, read_image
from data_prep.reasons import REMOVED, FetchError
from pipeline.data.shards.manifest_format import Manifest, make_manifest
from pipeline.errors import UserError
from pipeline.files import flush, replacing, write_text
from pipeline.versions import version_of

DROPPED_NAME = "dropped.tsv"
SMALLEST, LARGEST, SHARDS = 100, 10_000, 32
_TOOLS = ("pillow", "pyarrow")  # packages that determine a shard's bytes
_NUMBERS = ("row", "captions", "width", "height")
_META = pa.schema(
    (name, pa.int64() if name in _NUMBERS else pa.string())
    for name in ("row", "key", "place", "status", "reason", "error", "captions", "width", "height", "sha256")
)


@dataclass(frozen=True)
class PairsConfig:
    """Settings of a conversion: source, output and options."""

    source: str
    output: Path
    options: Any = field(default_factory=SourceOptions)
    """How to read the source: a dataclass, whose values are part of the dataset's identity."""
    opener: Callable[..., PairSource] = open_source
    """Opens the source, with the arguments of `find_source.open_source`."""
    made_by: str = "neuclip pairs"
    """The command, for the manifest and messages."""
    image: ImageOptions = field(default_factory=ImageOptions)
    shard_size: int | None = None
    """Rows of a shard; None: a thirty-second of the rows, between 100 and 10,000."""
    processes: int = 1


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    manifest: Manifest
    source: PairSource
    several_captions: int
    """Samples with more than one caption."""
    dropped: tuple[tuple[str, str, str], ...]
    """Place, reason and detail of the first few rows of each reason that gave no sample."""


def make_shards(config: PairsConfig, *, on_rows: Callable[[int, int], None] = lambda done, total: None) -> Conversion:
    """Convert the missing shards and write the manifest; `on_rows` is called with the rows done so far, and all.

    Raises:
        UserError: Before anything is written, if the source cannot be read or the folder belongs to another source or
            other settings (a new folder is removed again); at the end, if no row gave a sample.
    """
    folder = Folder(config.output)
    _check_output(config, folder)
    with folder.made(), part_lock(folder, PART):
        finish_removals(folder)
        folder.check_tars(folder.finished())
        source, shard_size = _plan(config, folder)
        plan = _digest(config, source, shard_size)
        lists = getattr(config.options, "captions", None) != "one"
        shards = -(-source.rows // shard_size)
        missing = sorted(set(range(shards)) - set(folder.finished()))
        done = source.rows - sum(min(shard_size, source.rows - shard * shard_size) for shard in missing)
        on_rows(done, source.rows)
        job = _Job(source, folder, plan, shard_size, config.image, lists)
        for rows in _convert_all(job, missing, config.processes):
            done += rows
            on_rows(done, source.rows)
        return _finish(config, folder, source, plan)


def _check_output(config: PairsConfig, folder: Folder) -> None:
    """Check that the output folder can be used.

    Raises:
        UserError: It is a file, has other content, or is the source itself.
    """
    root = folder.root
    if root.exists() and not root.is_dir():
        raise UserError(f"{root} is a file: name a folder for the shards.")
    if root.resolve() == Path(config.source).resolve():
        raise UserError(f"{root} is the source itself: name another folder for the shards.")
    if root.is_dir() and any(root.iterdir()) and not folder.is_converted:
        started = {path.name for path in root.iterdir()} <= {"shards", "meta", "plan", "staging"}
        if not started or any((root / "shards").glob("*.tar")):
            raise UserError(f"{root} is not empty and was not made by `{config.made_by}`: name another folder.")


def _plan(config: PairsConfig, folder: Folder) -> tuple[PairSource, int]:
    """The source and the number of rows per shard, which are the same in every run on this folder."""
    path, listing = folder.plan / "pairs.json", folder.plan / "pairs.parquet"
    options = {
        key: value if isinstance(value, str | None) else str(value) for key, value in asdict(config.options).items()
    }
    settings = {
        "source": config.source if kind_of(config.source) == "hub" else str(Path(config.source).resolve()),
        **_stamp(config.source), **options, **asdict(config.image),
        "shard_size": config.shard_size,
    }  # fmt: skip
    stored = None
    if path.is_file():
        tree = _stored_plan(path)
        if different := changed(tree["settings"], settings):
            raise UserError(
                f"{folder.root} holds the shards of another source or other settings ({'; '.join(different)}): name "
                "another output folder, or give the former settings to continue."
            )
        stored = Listing(listing, tree["rows"], tree["digest"]) if tree["digest"] else None
    source = config.opener(config.source, config.options, listing=listing, stored=stored)
    if not source.rows:
        raise UserError(f"{config.source} has no rows: there is nothing to convert.")
    if not path.is_file():
        digest = source.facts["digest"] if listing.is_file() else None
        write_text(path, signed({"settings": settings, "rows": source.rows, "digest": digest}), durable=True)
    return source, config.shard_size or min(LARGEST, max(SMALLEST, source.rows // SHARDS))


def _stored_plan(path: Path) -> dict[str, Any]:
    try:
        tree = content(path.read_bytes())
        if not {"settings", "rows", "digest"} <= set(tree):
            raise ValueError("it lacks a field")
    except ValueError as error:
        folder = path.parent.parent
        raise UserError(f"{path} is damaged ({error}): delete {folder} and run the same command again.") from error
    return tree


def _stamp(source: str) -> dict[str, Any]:
    """Size and modification time of a single-file source, to detect another file under the same name."""
    path = Path(source)
    if not path.is_file():
        return {}
    stat = path.stat()
    return {"source_bytes": stat.st_size, "source_time": stat.st_mtime_ns}


def _digest(config: PairsConfig, source: PairSource, shard_size: int) -> str:
    plan = (dict(source.facts), asdict(config.image), shard_size)
    return hashlib.sha256(repr(plan).encode()).hexdigest()


@dataclass(frozen=True)
class _Job:
    """What a process needs to write any shard."""

    source: PairSource
    folder: Folder
    plan: str
    shard_size: int
    image: ImageOptions
    lists: bool


def _convert_all(job: _Job, shards: list[int], processes: int) -> Iterator[int]:
    """Write the shards; yields the number of rows of each as it is finished."""
    if processes == 1 or len(shards) <= 1:
        for shard in shards:
            yield write_shard(job, shard)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(shards)), mp_context=context) as pool:
        try:
            for finished in as_completed([pool.submit(write_shard, job, shard) for shard in shards]):
                yield finished.result()
        finally:  # after an error, the shards that wait are not begun
            pool.shutdown(wait=True, cancel_futures=True)


def write_shard(job: _Job, shard: int) -> int:
    """Write one shard: the tar, the outcome of each row, and last the record, which marks the shard as finished.

    Returns:
        The number of rows.
    """
    start = shard * job.shard_size
    stop = min(job.source.rows, start + job.shard_size)
    path = job.folder.tar(shard)
    rows: list[dict[str, Any]] = []
    removed = job.folder.removed_names()

    def members() -> Iterator[tuple[str, bytes]]:
        for number, pair in enumerate(job.source.read(start, stop), start=start):
            row, parts = _sample(number, pair, job.image, lists=job.lists)
            if removed and parts and names_of_sample(tar_name(shard), row["key"], parts) & removed:
                row, parts = {**row, "status": "failed", "reason": REMOVED}, {}
            rows.append(row)
            yield from ((f"{row['key']}.{suffix}", parts[suffix]) for suffix in sorted(parts))

    size, digest = canonical_tar.write(path, members())
    assert len(rows) == stop - start, f"the source gave {len(rows)} of the rows {start} to {stop}"
    failures = Counter(row["reason"] for row in rows if row["reason"])
    samples = len(rows) - failures.total()
    if not samples:
        path.unlink()
        size, digest = 0, ""
    write_meta(job.folder.meta(shard), pa.Table.from_pylist(rows, schema=_META))
    # The names of both must be on the disk before the record refers to them.
    flush(path.parent)
    flush(job.folder.meta(shard).parent)
    job.folder.write_record(ShardRecord(shard, job.plan, len(rows), samples, size, digest, failures))
    return len(rows)


def _sample(number: int, pair: Pair, options: ImageOptions, *, lists: bool) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The outcome of one row: its record, and its members by suffix (none when it was dropped)."""
    key = key_of(number)
    row: dict[str, Any] = {"row": number, "key": key, "place": pair.place, "status": "failed", "reason": None}
    pair = checked(pair, lists=lists)
    if pair.problem:
        return {**row, "reason": pair.problem, "error": pair.detail}, {}
    try:
        body = read_image(pair.image)
        stored = convert(body, options)
    except FetchError as error:
        return {**row, "reason": error.reason, "error": str(error).removeprefix(f"{error.reason}: ")}, {}
    about = {"captions": list(pair.captions), "source": pair.place, **pair.about}
    parts = {
        stored.suffix: stored.body,
        "json": json.dumps(about, ensure_ascii=False).encode(),
        "txt": pair.captions[0].encode(),
    }
    facts = {"width": stored.width, "height": stored.height, "sha256": hashlib.sha256(body).hexdigest()}
    return {**row, "status": "success", "captions": len(pair.captions), **facts}, parts


def _finish(config: PairsConfig, folder: Folder, source: PairSource, plan: str) -> Conversion:
    """Write the list of dropped rows and the manifest.

    Raises:
        UserError: No sample is left to train on.
    """
    records = [folder.read_record(shard) for shard in folder.finished()]
    if foreign := [record.shard for record in records if record.plan != plan]:
        raise UserError(
            f"Shards {foreign[:5]} in {folder.root} were made from other rows: the source has changed since. Name "
            "another output folder."
        )
    shown: list[tuple[str, str, str]] = []
    several = 0
    path = folder.root / DROPPED_NAME
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.write("place\treason\tdetail\n")
        for record in records:
            columns = ["place", "reason", "error", "captions"]
            for row in read_meta(folder, record.shard, columns).to_pylist():
                several += (row["captions"] or 0) > 1
                if row["reason"]:
                    line = (row["place"], row["reason"], " ".join((row["error"] or "").split()))
                    file.write("\t".join(line) + "\n")
                    if sum(reason == line[1] for _, reason, _ in shown) < 3:
                        shown.append(line)
    failures = dict(total_failures(records))
    entries = entries_of(records)
    if not entries:
        raise UserError(f"None of the {source.rows:,} rows of {config.source} gave a sample: {_most(failures, shown)}.")
    image = {key: value for key, value in asdict(config.image).items() if value is not None}
    tools = {name: version_of(name) for name in _TOOLS}
    facts = {"made by": config.made_by, "source": dict(source.facts), "image": image, "tools": tools}
    manifest = make_manifest(entries, root=folder.root, failures=failures, facts=facts)
    manifest.save(folder.root)
    return Conversion(manifest, source, several, tuple(shown))


def _most(failures: dict[str, int], shown: list[tuple[str, str, str]]) -> str:
    parts = []
    for reason, count in sorted(failures.items()):
        place, detail = next(((place, detail) for place, name, detail in shown if name == reason), ("", ""))
        parts.append(
            f"{count:,} row{'' if count == 1 else 's'}: {reason} (first: {' '.join(filter(None, (place, detail)))})"
        )
    return "; ".join(parts)
