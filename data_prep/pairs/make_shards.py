"""`neuclip pairs`: convert any source of pairs to canonical shards with a manifest, in parallel and resumable.

Shard k holds the outcomes of rows `[k S, (k + 1) S)` of the source, regardless of which process writes it and when. The
output of an interrupted and resumed run is therefore bit-identical to that of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.dataset.commit import Commit, engine_lock, exclusive_lock
from data_prep.dataset.dataset_folder import (
    Folder,
    ShardRecord,
    changed,
    key_of,
    read_meta,
    stored_text,
    tar_name,
    total_failures,
)
from data_prep.dataset.manifest_writer import entries_of
from data_prep.dataset.removal import names_of_sample
from data_prep.dataset.shard_files import stage
from data_prep.pairs.find_source import is_hub, open_source
from data_prep.pairs.listing import Listing, PairRow, write_listing
from data_prep.pairs.pair import MAX_PIXELS, QUALITY, PairOptions, convert
from data_prep.reasons import REMOVED, FetchError
from pipeline.data.shards.manifest_format import Manifest, make_manifest
from pipeline.errors import UserError
from pipeline.files import as_text, read_tree, replacing, write_text
from pipeline.pictures.pixels import WHITE
from pipeline.versions import version_of

DROPPED_NAME = "dropped.tsv"
_ESCAPES = {ord(character): repr(character)[1:-1] for character in map(chr, range(32))}
SMALLEST, LARGEST, SHARDS = 100, 10_000, 32
_TOOLS = ("pillow", "pyarrow", "webdataset")  # packages that determine a shard's bytes
_NUMBERS = ("row", "captions", "width", "height")
_FLAGS = ("transparent", "single_colour")
_COLUMNS = ("row", "key", "place", "status", "reason", "error", "captions", "width", "height", "sha256", *_FLAGS)
_META = pa.schema(
    (name, pa.int64() if name in _NUMBERS else pa.bool_() if name in _FLAGS else pa.string()) for name in _COLUMNS
)


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    manifest: Manifest
    dropped: tuple[tuple[str, str, str], ...]
    """Place, reason and detail of the first few rows of each reason that gave no sample."""
    converted: int
    """Rows that were converted now; the others were before."""


def make_shards(
    source: str,
    output: Path,
    options: PairOptions,
    *,
    on_rows: Callable[[int, int], None] = lambda done, total: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Conversion:
    """Convert the missing shards and write the manifest.

    Args:
        source: A file, a folder or a name on the hub.
        output: The folder of the shards.
        options: How to read the source, and how to store its pairs.
        on_rows: Called with the rows done so far, and all.
        on_note: Called with how the source is read, before rows are converted.

    Raises:
        UserError: Before anything is written, if the source cannot be read, has changed, or the folder belongs to
            another source or other settings (a new folder is removed again); at the end, if no row gave a sample.
    """
    folder = Folder(output)
    if output.exists() and not folder.is_converted:
        started = output.is_dir() and {path.name for path in output.iterdir()} <= {"shards", "meta", "plan", "staging"}
        if not started or any(output.glob("shards/*.tar")) or output.resolve() == Path(source).resolve():
            raise UserError(f"{output} is a file, or was not made by `neuclip pairs`: name another folder.")
    with folder.made(), exclusive_lock(folder), ExitStack() as stack:
        folder.check_tars(folder.finished())
        work = folder.plan / "work"  # for the list and for copies
        shutil.rmtree(work, ignore_errors=True)  # that of an interrupted run
        work.mkdir(parents=True)
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        pairs = open_source(source, options, work)
        for note in pairs.notes:
            on_note(note)
        listing = write_listing(work / "rows.arrow", pairs, lists=options.captions != "one")
        if not listing.rows:
            raise UserError(f"{source} has no rows: there is nothing to convert.")
        # With the options of earlier versions, whose folders can be continued.
        image = {"size": options.size, "quality": QUALITY, "raw": False, "background": WHITE, "max_pixels": MAX_PIXELS}
        _check_plan(source, folder, listing, {**asdict(options), **image})
        if listing.merged:
            on_note(f"{listing.merged:,} more rows repeat an image: one sample, with all distinct captions")
        shard_size = options.shard_size or min(LARGEST, max(SMALLEST, listing.rows // SHARDS))
        plan = hashlib.sha256(repr((pairs.about, listing.digest, image, shard_size)).encode()).hexdigest()
        missing = sorted(set(range(-(-listing.rows // shard_size))) - set(folder.finished()))
        job = _Job(pairs.read, listing, folder, plan, shard_size, options.size)
        converted = sum(len(job.rows_of(shard)) for shard in missing)
        done = listing.rows - converted
        on_rows(done, listing.rows)
        for rows in _convert_all(job, missing, options.processes):
            done += rows
            on_rows(done, listing.rows)
        facts = {
            "made by": "neuclip pairs",
            "source": {**pairs.about, "digest": listing.digest},
            "image": {key: value for key, value in image.items() if value is not None},
            "tools": {name: version_of(name) for name in _TOOLS},
        }
        return Conversion(*_finish(source, folder, listing, facts), converted)


def _check_plan(source: str, folder: Folder, listing: Listing, options: dict[str, Any]) -> None:
    """Compare settings and rows with those that the folder was begun with, or write them down; refuse others."""
    path = folder.plan / "pairs.json"
    where = source if is_hub(source) else str(Path(source).resolve())
    shard_size, _ = options.pop("shard_size"), options.pop("processes")
    settings = json.loads(json.dumps({"source": where, **options, "shard_size": shard_size}, default=str))
    if not path.is_file():
        tree = {"settings": settings, "rows": listing.rows, "stamp": listing.stamp}
        write_text(path, stored_text(tree), durable=True)
        return
    tree = read_tree(path)
    if tree.keys() != {"settings", "rows", "stamp"}:
        raise UserError(f"{path} is damaged: delete {folder.root} and run the same command again.")
    if different := changed(tree["settings"], settings):
        raise UserError(
            f"{folder.root} holds the shards of another source or other settings ({'; '.join(different)}): name "
            "another output folder, or give the former settings to continue."
        )
    if tree["stamp"] != listing.stamp:
        raise UserError(
            f"{source} has changed since {folder.root} was begun: it had {tree['rows']:,} rows and has "
            f"{listing.rows:,}, or images or captions are others. Delete {folder.root} to convert it anew, or name "
            "another output folder."
        )


@dataclass(frozen=True)
class _Job:
    """What a process needs to write any shard."""

    read: Callable[[PairRow], bytes]
    listing: Listing
    folder: Folder
    plan: str
    shard_size: int
    size: int | None

    def rows_of(self, shard: int) -> range:
        """The rows of a shard."""
        return range(self.listing.rows)[shard * self.shard_size :][: self.shard_size]


def _convert_all(job: _Job, shards: list[int], processes: int) -> Iterator[int]:
    """Write the shards; yields the number of rows of each as it is finished."""
    if processes == 1 or len(shards) <= 1:
        yield from (write_shard(job, shard) for shard in shards)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(shards)), mp_context=context, initializer=_end_with_parent) as pool:
        try:
            for finished in as_completed([pool.submit(write_shard, job, shard) for shard in shards]):
                yield finished.result()
        finally:  # after an error, the shards that wait are not begun
            pool.shutdown(wait=True, cancel_futures=True)


def _end_with_parent() -> None:
    """Let a worker end with a killed command: it would go on with shards that wait, and then wait for more for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_shard(job: _Job, shard: int) -> int:
    """Write one shard: the tar, the outcome of each row, and the record, which marks it as done; returns its rows."""
    from webdataset import TarWriter  # which imports torch

    folder, numbers = job.folder, job.rows_of(shard)
    rows: list[dict[str, Any]] = []
    removed = folder.removed_names()
    with engine_lock(folder), Commit(folder.root, folder.commit(shard)) as commit:
        with commit.new(folder.tar(shard)).open("wb") as file:
            with TarWriter(file, user="", group="", mode=0o644, mtime=0, encoder=False, compress=False) as tar:
                for number, pair in zip(numbers, job.listing.read(numbers), strict=True):
                    row, parts = _sample(number, pair, job)
                    if removed and parts and names_of_sample(tar_name(shard), row["key"], parts) & removed:
                        row, parts = {**row, "status": "failed", "reason": REMOVED}, {}
                    rows.append(row)
                    if parts:
                        tar.write({"__key__": row["key"], **parts})
                size = tar.tarstream.offset + 2 * tarfile.BLOCKSIZE
            file.truncate(size)  # tarfile adds zeros up to 10,240 bytes; `canonical_tar` does not
        failures = Counter(row["reason"] for row in rows if row["reason"])
        record = ShardRecord(shard, job.plan, len(rows), len(rows) - failures.total(), 0, "", failures)
        stage(commit, folder, record, pa.Table.from_pylist(rows, schema=_META))
        commit.finish()
    return len(rows)


def _sample(number: int, pair: PairRow, job: _Job) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The outcome of one row: its record, and its members by suffix (none when it was dropped)."""
    key = key_of(number)
    row: dict[str, Any] = {"row": number, "key": key, "place": pair.place, "status": "failed", "reason": None}
    if pair.problem:
        return {**row, "reason": pair.problem, "error": pair.detail}, {}
    try:
        body = job.read(pair)
        stored = convert(body, job.size)
    except FetchError as error:
        detail = as_text(str(error).removeprefix(f"{error.reason}: "))  # a file's name may be any bytes
        return {**row, "reason": error.reason, "error": detail}, {}
    about = {"captions": list(pair.captions), "source": pair.place}
    parts = {
        stored.suffix: stored.body,
        "json": json.dumps(about, ensure_ascii=False).encode(),
        "txt": pair.captions[0].encode(),
    }
    facts = {"width": stored.width, "height": stored.height, "sha256": hashlib.sha256(body).hexdigest(),
             "transparent": stored.transparent, "single_colour": stored.plain}  # fmt: skip
    return {**row, "status": "success", "captions": len(pair.captions), **facts}, parts


def _finish(
    source: str, folder: Folder, listing: Listing, facts: dict[str, Any]
) -> tuple[Manifest, tuple[tuple[str, str, str], ...]]:
    """Write the list of dropped rows and the manifest; returns it, and the first few rows of each reason. Refuses a
    source that gave no sample."""
    records = [folder.read_record(shard) for shard in folder.finished()]
    shown: list[tuple[str, str, str]] = []
    counts, lost = Counter[str](several_captions=0, **dict.fromkeys(_FLAGS, 0)), set[int]()
    with replacing(folder.root / DROPPED_NAME) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write("place\treason\tdetail\n")
        for record in records:
            columns = ["row", "place", "reason", "error", "captions", *_FLAGS]
            for row in read_meta(folder, record.shard, columns).to_pylist():
                counts["several_captions"] += (row["captions"] or 0) > 1
                if row["reason"] in (None, REMOVED):  # counts are those of the conversion, as after `remove`
                    counts.update(name for name in _FLAGS if row[name])
                else:
                    lost.add(row["row"])
                if row["reason"]:
                    place = row["place"].translate(_ESCAPES)  # a file's name may have a tab
                    line = (place, row["reason"], " ".join((row["error"] or "").split()))
                    file.write("\t".join(line) + "\n")
                    if sum(reason == line[1] for _, reason, _ in shown) < 3:
                        shown.append(line)
    failures, entries = dict(total_failures(records)), entries_of(records)
    if not entries:
        first = {reason: f"{place} {detail}".rstrip() for place, reason, detail in reversed(shown)}
        why = (f"{count:,} row{'s' * (count != 1)}: {reason} (first: {first[reason]})"
               for reason, count in sorted(failures.items()))  # fmt: skip
        raise UserError(f"None of the {listing.rows:,} rows of {source} gave a sample: {'; '.join(why)}.")
    facts["counts"] = {**listing.counts(lost), **counts}
    manifest = make_manifest(entries, root=folder.root, failures=failures, facts=facts)
    manifest.save(folder.root)
    return manifest, tuple(shown)
