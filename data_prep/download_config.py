"""Every setting of `neuclip download`: the table of URLs and the published ones, subset, images, guard, fetching."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
import pydantic_core
from pydantic import Field

from pipeline.config import section, suggest
from pipeline.cores import usable_cores
from pipeline.pictures.pixels import ColourName
from pipeline.registries import load_entry_points

OptOut = Literal["noai", "noimageai", "noindex", "noimageindex"]
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
        if not isinstance(tree, Mapping) or not isinstance(name := tree.get("name", "table"), str):
            return given
        if name not in SOURCES:
            load_entry_points("neuclip.sources", what="source of URLs")
        if name not in SOURCES:
            raise ValueError(f"name = {name!r} is not known. {suggest(name, tuple(SOURCES))}")
        return {**SOURCES[name], **tree}

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


@section
class SubsetConfig:
    """Which rows of the table to take."""

    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the rows to take; a larger fraction contains every smaller one with the same seed."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the selection."""
    index: str | None = None
    """Path of a published selection: a `.npy` of sorted 128-bit uids as pairs of unsigned 64-bit integers, as DFN
    publishes them. The fraction is then taken of the rows whose uid is in it."""


@section
class ImageConfig:
    """How images are stored; names and meanings are img2dataset's."""

    size: int = Field(default=256, ge=16, le=4096)
    """Target side in pixels."""
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest"] = "keep_ratio"
    """`keep_ratio` scales the shorter side to `size`, `keep_ratio_largest` the longer one. Smaller images are not
    enlarged."""
    skip_reencode: bool = False
    """Keep the bytes as served if the image needs no change and its format is `encode_format`."""
    encode_format: Literal["jpg", "png", "webp"] = "jpg"
    """Format of the stored images."""
    encode_quality: int = Field(default=95, ge=0, le=100)
    """JPEG or WebP quality; for png the compression level, 0 to 9."""
    background: ColourName = "white"
    """Colour behind what is transparent, by name or as #rrggbb."""
    min_size: int = Field(default=0, ge=0)
    """Refuse images whose shorter side has fewer pixels."""
    max_aspect_ratio: float = Field(default=1e6, ge=1)
    """Refuse images whose longer side is more than this many times the shorter one."""

    @pydantic.field_validator("resize_mode", mode="before")
    @classmethod
    def _no_is_a_word(cls, value: object) -> object:
        """YAML reads an unquoted `no` as false."""
        return "no" if value is False else value

    @pydantic.model_validator(mode="after")
    def _png_compression(self) -> ImageConfig:
        if self.encode_format == "png" and self.encode_quality > 9:
            raise ValueError(f"encode_quality = {self.encode_quality}: for png it is the compression, from 0 to 9")
        return self


@section
class GuardConfig:
    """What ingestion refuses to fetch, and its limits per host. Each refusal is counted under its own reason."""

    allow_addresses: tuple[str, ...] = ()
    """Addresses or networks (CIDR) that are fetched although they are loopback, private, link-local or otherwise
    special."""
    trust_proxy: bool = False
    """Use the proxy of the environment. It then resolves names and connects, so that only literal addresses in URLs
    are checked."""
    max_bytes: int = Field(default=20_000_000, ge=1)
    """Refuse larger bodies."""
    max_pixels: int = Field(default=89_478_485, ge=1, le=178_956_970)
    """Refuse larger images, by their header, before they are decoded; Pillow opens none above the upper bound."""
    opt_outs: tuple[OptOut, ...] = ("noai", "noimageai", "noindex", "noimageindex")
    """`X-Robots-Tag` directives that are honoured."""
    user_agent: str = Field(default="neuclip", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name in the User-Agent header, and the one under which `X-Robots-Tag` may address this crawler."""
    contact: str = Field(default="", pattern=r"^[^\r\n()]*$")
    """A page or e-mail address where the owner of a server can reach you; part of the User-Agent header."""
    host_connections: int = Field(default=64, ge=1)
    """Connections to one host at a time, per machine."""
    backoff: float = Field(default=1.0, ge=0)
    """Seconds to leave a host alone after its first 429 or 503; doubled each time, up to 30."""

    _listed = pydantic.field_validator("allow_addresses", "opt_outs", mode="before")(listed)

    @pydantic.field_validator("allow_addresses")
    @classmethod
    def _are_networks(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            try:
                ipaddress.ip_network(value, strict=False)
            except ValueError as error:
                raise ValueError(
                    f"{value!r} is neither an IP address nor a network such as 10.0.0.0/8; names such as localhost "
                    "are not allowed here, only addresses: 127.0.0.1"
                ) from error
        return values


@section
class FetchConfig:
    """How the work is spread over processes and machines."""

    distributor: Literal["multiprocessing", "pyspark", "ray"] = "multiprocessing"
    """img2dataset's distributor."""
    master: str | None = None
    """Address of the cluster: a Spark master (`spark://host:7077`, `yarn`, ...) or a Ray address. Without it, this
    machine."""
    processes: int = Field(default_factory=usable_cores, ge=1)
    """Worker processes; each works on one shard at a time."""
    threads: int = Field(default=64, ge=1)
    """URLs that each process fetches at a time."""
    shard_size: int = Field(default=10_000, ge=1, le=1_000_000)
    """URLs per shard."""
    timeout: float = Field(default=10.0, gt=0)
    """Seconds to wait for a server's next bytes."""
    total_timeout: float = Field(default=60.0, gt=0)
    """Seconds for a whole attempt, redirects included."""
    retries: int = Field(default=1, ge=0, le=10)
    """Further attempts after a transient failure."""
    worker: int = Field(default=0, ge=0)
    """Number of this machine, where `workers` of them share a folder (Slurm arrays): it takes every `workers`-th
    shard."""
    workers: int = Field(default=1, ge=1)
    """Machines that share the folder."""

    @pydantic.model_validator(mode="after")
    def _worker_in_range(self) -> FetchConfig:
        if self.master and self.distributor == "multiprocessing":
            raise ValueError(f"master = {self.master!r} is for the distributors pyspark and ray")
        if self.worker >= self.workers:
            raise ValueError(f"worker = {self.worker} must be below workers = {self.workers}")
        return self


@section
class MonitorConfig:
    """When a run pauses instead of wasting its URL list."""

    min_success: float = Field(default=0.1, ge=0, le=1)
    """Pause when a smaller share of the last 1,000 URLs gave a sample; 0 never pauses."""


@section
class DownloadConfig:
    """All settings of `neuclip download`."""

    output: str
    """Folder of the data set."""
    source: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    """Where the URLs come from."""
    subset: SubsetConfig = dataclasses.field(default_factory=SubsetConfig)
    """Which rows to fetch."""
    image: ImageConfig = dataclasses.field(default_factory=ImageConfig)
    """How images are stored."""
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    """What is refused."""
    fetch: FetchConfig = dataclasses.field(default_factory=FetchConfig)
    """How the work is spread."""
    monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
    """When to pause."""

    @pydantic.model_validator(mode="after")
    def _blurs_all(self) -> DownloadConfig:
        if self.source.blur and self.image.skip_reencode:
            raise ValueError(
                f"image.skip_reencode = true with source.blur = {self.source.blur!r}: images that need no resizing "
                "would be stored as served, with the faces unblurred. Set image.skip_reencode=false, or "
                "source.blur=null"
            )
        return self


_POOL = {"format": "parquet", "caption": "text", "uid": "uid", "hash": "sha256", "blur": "face_bboxes"}
_POOLS = {"small": 12_800_000, "medium": 128_000_000, "large": 1_280_000_000, "xlarge": 12_800_000_000}
SOURCES: dict[str, dict[str, Any]] = {
    "table": {},
    "scenes": {"hash": "sha256", "uid": "uid"},
    "cc3m": {"format": "tsv", "header": ("caption", "url"), "rows": 3_318_333},
    "cc12m": {"format": "tsv", "header": ("url", "caption"), "rows": 12_423_374},
    "dfn-2b": {"hub": "apple/DFN-2B", **_POOL},
    **{
        f"datacomp-{scale}": {
            "hub": "mlfoundations/datacomp_pools",
            "files": f"{scale}/*/*.parquet" if scale == "xlarge" else f"{scale}/*.parquet",
            "rows": rows,
            **_POOL,
        }
        for scale, rows in _POOLS.items()
    },
    "laion-400m": {"url": "URL", "caption": "TEXT", "keep": ("NSFW", "similarity"), "rows": 413_871_335},
}
"""The published sources, and their settings that differ from SourceConfig's defaults. A package with an entry point of
the group `neuclip.sources` may add its own."""
