"""Settings of the URL table, and the published sources with theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
import pydantic_core
from pydantic import Field

from pipeline.config import section, suggest
from pipeline.errors import UserError
from pipeline.registries import load_entry_points

Format = Literal["auto", "parquet", "csv", "tsv", "jsonl"]
HashKind = Literal["md5", "sha256", "sha512"]
HASH_KINDS = ("sha256", "md5", "sha512")
# Columns that the download writes for every row, or passes to img2dataset, under these names.
_OWN_COLUMNS = frozenset(
    {"key", "row", "url", "caption", "uid", "status", "reason", "error", "error_message", "blur", "width", "height"}
    | {"original_width", "original_height", "transparent", "stored_sha256", *HASH_KINDS}
)


def listed(value: object) -> object:
    """A text as a list of one: `guard.allow_addresses=127.0.0.1` for `[127.0.0.1]`, and a wrong one shown as given."""
    return (value,) if isinstance(value, str) else value


@section
class SourceConfig:
    """A table of URLs and captions: a file, a folder of files, or a data set on the hub."""

    name: str = "table"
    """A published source, whose own defaults then apply to all settings that are not given."""
    table: str | None = None
    """Local file or folder; takes precedence over `hub`."""
    format: Format = "auto"
    """Format of the files; `auto` derives it from their names."""
    hub: str | None = None
    """`owner/name` of a data set on the hub, streamed with `datasets`."""
    revision: str | None = None
    """Branch, tag or commit on the hub; a branch is pinned to its commit at the first run."""
    split: str = "train"
    """Split of the hub's data set."""
    files: str | None = None
    """Pattern of the files to read in the repository or folder, if not all."""
    header: tuple[str, ...] = ()
    """Names of all columns in order, for tables without a header line."""
    url: str = "url"
    """Column of the URLs."""
    caption: str = "caption"
    """Column of the captions: texts, or lists of texts, which are stored in the field `captions` of a sample's JSON."""
    uid: str | None = None
    """Column of unique ids, which subsets and removals use."""
    hash: str | None = None
    """Column with the hash of the bytes as served, against which they are verified."""
    hash_kind: HashKind = "sha256"
    """Algorithm of that hash."""
    blur: str | None = None
    """Column with boxes to blur, such as faces: lists of four relative coordinates."""
    keep: tuple[str, ...] = ()
    """Further columns to store beside each sample."""
    rows: int | None = Field(default=None, ge=1)
    """Published number of rows of the whole table, before any subset; checked before the first URL."""
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of the table's files by file name; checked before the first URL."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named_settings_below(cls, given: Any) -> Any:
        """Fill in the named source's settings before the defaults apply: later a given default looks like no value."""
        tree = given.kwargs or {} if isinstance(given, pydantic_core.ArgsKwargs) else given
        if not isinstance(tree, Mapping):
            return given
        name = tree.get("name", "table")
        # `resolve` rejects unknown names and suggests the nearest.
        known = known_source(name) if isinstance(name, str) else None
        return {**known.settings, **tree} if known else given

    _listed = pydantic.field_validator("header", "keep", mode="before")(listed)

    @pydantic.model_validator(mode="after")
    def _columns_differ(self) -> SourceConfig:
        used = [c for c in (self.url, self.caption, self.uid, self.hash, self.blur, *self.keep) if c]
        twice = sorted({c for c in used if used.count(c) > 1})
        if twice:
            raise ValueError(
                f"column {', '.join(twice)} is named for two purposes among url, caption, uid, hash, blur, keep"
            )
        reserved = sorted(_OWN_COLUMNS & set(self.keep))
        if reserved:
            raise ValueError(
                f"keep = {list(self.keep)}: every sample has its own {', '.join(reserved)}, so the table's cannot be "
                "stored under that name: rename the column in the table, or leave it out"
            )
        return self


@dataclasses.dataclass(frozen=True)
class Known:
    """A published source: what it is, and its settings that differ from SourceConfig's defaults."""

    about: str
    settings: dict[str, object]


_LAION = {"url": "URL", "caption": "TEXT"}
_DATACOMP = {"format": "parquet", "caption": "text", "uid": "uid", "hash": "sha256", "blur": "face_bboxes"}
_POOLS = {"small": 12_800_000, "medium": 128_000_000, "large": 1_280_000_000, "xlarge": 12_800_000_000}

SOURCES: dict[str, Known] = {
    "table": Known("Any parquet, CSV, TSV or JSONL table with named columns.", {}),
    "scenes": Known("The built-in procedural corpus, served on 127.0.0.1.", {"hash": "sha256", "uid": "uid"}),
    "cc3m": Known(
        "Conceptual Captions 3M: the training TSV, caption then URL, without a header line.",
        {"format": "tsv", "header": ("caption", "url"), "rows": 3_318_333},
    ),
    "cc12m": Known(
        "Conceptual 12M: one TSV, URL then caption, without a header line.",
        {"format": "tsv", "header": ("url", "caption"), "rows": 12_423_374},
    ),
    "dfn-2b": Known(
        "Data Filtering Networks 2B: hub parquet with DataComp's columns; uids are DataComp's.",
        {"hub": "apple/DFN-2B", **_DATACOMP},
    ),
    **{
        f"datacomp-{scale}": Known(
            f"DataComp CommonPool, {scale} scale: parquet metadata; sha256 is over the bytes as served.",
            {
                "hub": "mlfoundations/datacomp_pools",
                "files": f"{scale}/*/*.parquet" if scale == "xlarge" else f"{scale}/*.parquet",
                "rows": rows,
                **_DATACOMP,
            },
        )
        for scale, rows in _POOLS.items()
    },
    "laion-400m": Known(
        "LAION-400M: parquet metadata; it has no hash of the images, so none is verified.",
        {**_LAION, "keep": ("NSFW", "similarity"), "rows": 413_871_335},
    ),
}


def known_source(name: str) -> Known | None:
    """A published source; a package with an entry point of the group `neuclip.sources` may add its own to SOURCES."""
    if name not in SOURCES:
        load_entry_points("neuclip.sources", what="source of URLs")
    return SOURCES.get(name)


def resolve(source: SourceConfig) -> SourceConfig:
    """Check that the source's name is known and that there is a table to read.

    Raises:
        UserError: The name is unknown, or no table is given.
    """
    if known_source(source.name) is None:
        raise UserError(f"source.name = {source.name!r} is not known. {suggest(source.name, tuple(SOURCES))}")
    if source.table is None and source.hub is None:
        raise UserError(
            f"source.name = {source.name!r} needs source.table (a local file or folder): "
            f"{SOURCES[source.name].about} Nothing is fetched from a hub for it."
        )
    return source
