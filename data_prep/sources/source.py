"""Where image-text metadata comes from: named sources as small entries, and any table with named columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
import pydantic_core
from pydantic import Field

from pipeline.config import section, suggest
from pipeline.errors import UserError

Format = Literal["auto", "parquet", "csv", "tsv", "jsonl"]
HashKind = Literal["md5", "sha256", "sha512"]


@section
class SourceConfig:
    """A table of URLs and captions: a file, a folder of files, or a data set on the hub.

    `name` takes the settings of a known source (see SOURCES); what is given here wins over it, defaults included.
    """

    name: str = "table"
    # A local file or folder; wins over `hub`.
    table: str | None = None
    format: Format = "auto"
    # `owner/name` on the hub, read by streaming with `datasets`; `revision` pins it.
    hub: str | None = None
    revision: str | None = None
    split: str = "train"
    # Which files of the repository or folder, as a pattern, where not all of them are meant.
    files: str | None = None
    # Columns by name. For tables without a header line, `header` names all columns in order.
    header: tuple[str, ...] = ()
    url: str = "url"
    caption: str = "caption"
    uid: str | None = None
    hash: str | None = None
    hash_kind: HashKind = "sha256"
    # Boxes (lists of four relative coordinates) to blur in the image, such as faces.
    blur: str | None = None
    # Further columns to keep beside each sample.
    keep: tuple[str, ...] = ()
    # Published number of rows of the whole table, before any subset: checked before the first URL.
    rows: int | None = Field(default=None, ge=1)
    # SHA-256 of the table's files by file name, checked before the first URL.
    sha256: dict[str, str] = dataclasses.field(default_factory=dict)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _named_settings_below(cls, given: Any) -> Any:
        """Put the named source's settings below what was given: afterwards a default and its absence look the same."""
        tree = given.kwargs or {} if isinstance(given, pydantic_core.ArgsKwargs) else given
        if not isinstance(tree, Mapping):
            return given
        name = tree.get("name", "table")
        known = SOURCES.get(name) if isinstance(name, str) else None  # `resolve` refuses unknown ones, with the nearest
        return {**known.settings, **tree} if known else given

    @pydantic.model_validator(mode="after")
    def _columns_differ(self) -> SourceConfig:
        used = [c for c in (self.url, self.caption, self.uid, self.hash, self.blur, *self.keep) if c]
        twice = sorted({c for c in used if used.count(c) > 1})
        if twice:
            raise ValueError(
                f"column {', '.join(twice)} is named for two purposes among url, caption, uid, hash, blur, keep"
            )
        reserved = sorted(
            {"key", "row", "url", "caption", "uid", "status", "reason", "width", "height"} & set(self.keep)
        )
        if reserved:
            raise ValueError(f"keep = {list(self.keep)}: {', '.join(reserved)} is written for every sample anyway")
        return self


@dataclasses.dataclass(frozen=True)
class Known:
    """A published source: the settings that differ from SourceConfig's defaults, and what a person should know."""

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


def resolve(source: SourceConfig) -> SourceConfig:
    """The source, whose named settings it has had since it was made, checked.

    Raises: UserError for an unknown name, or when there is nothing to read.
    """
    if source.name not in SOURCES:
        raise UserError(f"source.name = {source.name!r} is not known. {suggest(source.name, tuple(SOURCES))}")
    if source.table is None and source.hub is None:
        raise UserError(
            f"source.name = {source.name!r} needs source.table (a local file or folder): "
            f"{SOURCES[source.name].about} Nothing is fetched from a hub for it."
        )
    return source
