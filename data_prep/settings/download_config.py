"""The settings of `neuclip download`: source, subset, image format, and fetching."""

from __future__ import annotations

import dataclasses
import ipaddress
from typing import Literal

import pydantic
from pydantic import Field

from data_prep.settings.source_config import SourceConfig, listed
from pipeline.config import section
from pipeline.cores import usable_cores
from pipeline.pictures.pixels import ColourName

OptOut = Literal["noai", "noimageai", "noindex", "noimageindex"]


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
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest", "center_crop", "border"] = "keep_ratio"
    """`keep_ratio` scales the shorter side to `size`, `keep_ratio_largest` the longer one; `center_crop` and `border`
    give squares. Smaller images are not enlarged."""
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
