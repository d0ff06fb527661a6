"""The plan: the URL list after subsetting, laid out so that any shard's rows are one row group of a parquet file.

It is made once, in a streaming pass with bounded memory. All later operations refer to its rows.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pydantic
from xxhash import xxh3_64_intdigest

from data_prep.dataset.dataset_folder import Folder, changed, stored_text
from data_prep.download_config import SourceConfig, SubsetConfig
from data_prep.sources.metadata_tables import check_rows, check_unchanged, identity_of, is_same, read, stamp
from data_prep.sources.text_columns import first_captions, is_list
from pipeline.config import flatten, to_tree
from pipeline.errors import UserError
from pipeline.files import NotAFile, flush, path_below, read_bounded, regular, sha256_of, write_text

PLAN_NAME = "plan.json"
_SHARDS_PER_PART = 100


@dataclass(frozen=True)
class Plan:
    """The list of what to fetch."""

    rows: int
    """Rows of the subset."""
    seen: int
    """Rows of the source."""
    shard_size: pydantic.PositiveInt
    digest: str
    """Digest that identifies the list."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Source, subset and shard size that the list was made from; another list needs another folder."""
    skipped: int = 0
    """Rows of the source that could not be read."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size, date and SHA-256 of a local table's files."""
    index: dict[str, Any] = field(default_factory=dict)
    """The same of `subset.index`; empty without one."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Settings that determine the samples, see `rules_of`."""
    parts: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the files with the list."""

    @property
    def shards(self) -> int:
        return -(-self.rows // self.shard_size)

    @property
    def rules_digest(self) -> str:
        """Digest of the rules, which is in the records of shards that were made with them."""
        return hashlib.sha256(json.dumps(self.rules, sort_keys=True).encode()).hexdigest()[:16]

    def rows_of(self, shard: int) -> int:
        return min(self.shard_size, self.rows - shard * self.shard_size)


_PLAN = pydantic.TypeAdapter(Plan)


def make_plan(
    folder: Folder,
    source: SourceConfig,
    subset: SubsetConfig,
    *,
    shard_size: int,
    rules: dict[str, Any],
) -> Plan:
    """Read the source once and write the plan, or return the existing one if it was made from the same settings.

    Raises:
        UserError: The folder has a plan with other settings, or no row is left.
    """
    settings = {"source": to_tree(source), "subset": to_tree(subset), "shard_size": shard_size}
    path = folder.plan / PLAN_NAME
    if path.exists():
        plan = load_plan(folder)
        different = changed(flatten(plan.settings), flatten(settings))
        different += changed(old := flatten(plan.rules), {**dict.fromkeys(old), **flatten(rules)})
        if different:
            raise UserError(
                f"{folder.root} holds a list or shards that were made with other settings ({'; '.join(different)}). "
                "Use another output folder, or the old settings to continue."
            )
        if subset.index and plan.index and Path(subset.index).exists() and not is_same(Path(subset.index), plan.index):
            raise UserError(
                f"subset.index = {subset.index!r} has changed since the URL list was made. Use another output folder "
                "for the changed index, or put the former one back to continue."
            )
        return plan
    for part in folder.plan.glob("part-*"):
        part.unlink()
    files = identity_of(source)
    counts: Counter[str] = Counter()
    batches = _selected(source, Subset(subset), counts)
    rows, digest, parts = _write_list(folder, batches, shard_size)
    seen, index = counts.total(), stamp(Path(subset.index)) if subset.index else {}
    if rows == 0:
        raise UserError(f"No row is left of the {seen:,} of the source after subset.fraction = {subset.fraction}.")
    check_rows(source, seen)
    check_unchanged(source, files)
    plan = Plan(rows, seen, shard_size, digest, settings, counts["skipped"], files, index, rules, parts)
    # Shards that are there although the plan was lost must have been made from the same list and settings.
    for record in map(folder.read_record, folder.finished()):
        if (record.plan, record.rules) != (plan.digest, plan.rules_digest):
            raise UserError(
                f"{folder.root} holds shards of another list of URLs or other settings, such as {record.shard}, and "
                f"the plan that they belong to is gone. Restore the table and the settings ({folder.config}), or use "
                "another output folder."
            )
    write_text(path, stored_text(asdict(plan)), durable=True)  # marks the plan as complete
    return plan


def load_plan(folder: Folder) -> Plan:
    """The folder's plan.

    Raises:
        UserError: There is no plan, or it is damaged.
    """
    path = folder.plan / PLAN_NAME
    try:
        return _PLAN.validate_json(read_bounded(path), strict=True)
    except FileNotFoundError as error:
        raise UserError(f"{folder.root} has no plan: it was not made by `neuclip download`.") from error
    except (NotAFile, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}). {folder.repair_hint}") from error


def check_list(folder: Folder, plan: Plan) -> None:
    """Compare the files of the list with the digests from when they were written.

    Raises:
        UserError: One is missing or changed.
    """
    for name, digest in plan.parts.items():
        path = path_below(folder.plan, name, what="A file of the list")
        if not path.is_file() or sha256_of(path) != digest:
            raise UserError(f"{path} is missing, or has been changed since the list was made. {folder.repair_hint}")


def read_shard(folder: Folder, shard: int) -> Any:
    """The pyarrow Table of one shard's rows: row, url, caption, [uid], [hash], kept columns.

    Raises:
        UserError: The part of the plan that holds it is missing or damaged.
    """
    part, group = divmod(shard, _SHARDS_PER_PART)
    try:
        with open(folder.plan_part(part), "rb", opener=regular) as opened:
            return pq.ParquetFile(opened, page_checksum_verification=True).read_row_group(group)
    except (OSError, pa.ArrowException, IndexError) as error:
        raise UserError(f"{folder.plan_part(part)} is missing or damaged ({error}). {folder.repair_hint}") from error


class Subset:
    """Selects rows by their names (uid where there is one, else URL), by `subset.index` and a hash of name and seed.

    The hash is XXH3-64, and a fraction f keeps those below f * 2**64: every machine computes the same subset, and a
    larger fraction contains every smaller one.
    """

    def __init__(self, config: SubsetConfig) -> None:
        self._config = config
        self._index = _open_index(config.index) if config.index else None

    def mask(self, names: Iterable[str]) -> np.ndarray:
        """A boolean per name: whether its row belongs."""
        names = list(names)
        mask = np.ones(len(names), dtype=bool)
        if self._index is not None:
            wrong = next((name for name in names if not re.fullmatch(r"[0-9a-fA-F]{32}", name)), None)
            if wrong is not None:
                raise UserError(f"subset.index needs uids of 32 hexadecimal digits, and {wrong!r:.80} is none.")
            halves = [(int(name[:16], 16), int(name[16:], 16)) for name in names]
            wanted = np.array(halves, dtype=self._index.dtype)
            places = np.searchsorted(self._index, wanted)  # touches a few pages per uid
            places[places == len(self._index)] = 0
            mask &= np.asarray(self._index[places] == wanted)
        if self._config.fraction < 1.0:
            mask &= hashes(names, seed=self._config.seed) < np.uint64(round(self._config.fraction * 2**64))
        return mask


def hashes(names: Iterable[str], *, seed: int) -> np.ndarray:
    """XXH3-64 of each name, as uint64."""
    return np.fromiter((xxh3_64_intdigest(name.encode(), seed) for name in names), dtype=np.uint64)


def _open_index(path: str) -> Any:
    """The uid index, memory-mapped because it may have tens of gigabytes; its order is checked at 10,000 places."""
    try:
        index: Any = np.load(path, mmap_mode="r")
        kinds = [kind for kind, *_ in (index.dtype.fields or {}).values()]
        if index.ndim != 1 or not len(index) or kinds != [np.uint64] * 2:
            raise ValueError(f"it holds {index.dtype} of shape {index.shape}")
        some = np.asarray(index[:: max(1, -(-len(index) // 10_000))])
        if (np.sort(some) != some).any():
            raise ValueError("it is not sorted, so that uids in it would not be found: np.sort it")
    except Exception as error:  # also those of Python's tokenizer and zip reader
        raise UserError(
            f"subset.index = {path!r} must be the published .npy file, one sorted array of pairs of 64-bit halves "
            f"(uint64): {error}."
        ) from error
    return index


def _selected(source: SourceConfig, subset: Subset, counts: Counter[str]) -> Iterator[Any]:
    """RecordBatches of the selected rows with the plan's column names; `counts` gets the rows `read` and `skipped`."""
    names = {source.uid: "uid", source.hash: source.hash_kind, source.blur: "blur"}  # perhaps None, which names nothing
    names |= {source.url: "url", source.caption: "caption"}
    for batch in read(source, on_skipped=lambda rows: counts.update(skipped=rows)):
        counts["read"] += batch.num_rows
        batch = batch.rename_columns([names.get(name, name) for name in batch.schema.names])
        place = batch.schema.names.index("caption")
        if is_list(batch.schema.field(place).type):
            if "captions" in source.keep:
                raise UserError(
                    "The captions are lists, which are stored as `captions`: leave that out of source.keep, or name "
                    "another column in source.caption."
                )
            first, every = first_captions(batch.column(place))
            batch = batch.set_column(place, "caption", first).append_column("captions", every)
        for text in ("url", "caption"):
            batch = batch.set_column(batch.schema.names.index(text), text, pc.fill_null(batch.column(text), ""))
        if source.hash:  # hexadecimal digits are the same in both cases, and img2dataset compares them as text
            place = batch.schema.names.index(source.hash_kind)
            batch = batch.set_column(place, source.hash_kind, pc.utf8_lower(batch.column(source.hash_kind)))
        naming = batch.column("uid") if source.uid else batch.column("url")
        mask = subset.mask(pc.fill_null(naming, "").to_pylist())
        yield batch if mask.all() else batch.filter(pa.array(mask))  # which does not know every type


def _write_list(folder: Folder, batches: Iterator[Any], shard_size: int) -> tuple[int, str, dict[str, str]]:
    """Write the list: a row group for each shard, and a hundred of them per file.

    Returns:
        The number of rows, the digest that identifies the list, and the SHA-256 of its files.
    """
    digest, rows = hashlib.sha256(), 0
    parts: dict[str, str] = {}
    shards = _in_shards(batches, shard_size)
    for part, first in enumerate(shards):
        path = folder.plan_part(part)
        schema = first.schema.insert(0, pa.field("row", pa.int64()))
        with pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True) as file:
            for table in itertools.chain([first], itertools.islice(shards, _SHARDS_PER_PART - 1)):
                numbers = pa.array(range(rows, rows + table.num_rows), pa.int64())
                file.write_table(table.add_column(0, "row", numbers), row_group_size=shard_size)
                for name in ("url", "caption"):
                    digest.update("\n".join(table.column(name).to_pylist()).encode() + b"\n")
                rows += table.num_rows
        flush(path)
        parts[path.name] = sha256_of(path)
    return rows, digest.hexdigest(), parts


def _in_shards(batches: Iterator[Any], shard_size: int) -> Iterator[Any]:
    """Tables of `shard_size` rows, the last one of those that are left."""
    waiting, waiting_rows = list[Any](), 0
    for batch in batches:
        waiting.append(batch)
        waiting_rows += batch.num_rows
        if waiting_rows >= shard_size:
            table = pa.Table.from_batches(waiting).combine_chunks()
            while table.num_rows >= shard_size:
                yield table.slice(0, shard_size)
                table = table.slice(shard_size)
            waiting, waiting_rows = table.to_batches(), table.num_rows
    if waiting_rows:
        yield pa.Table.from_batches(waiting).combine_chunks()
