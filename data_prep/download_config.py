"""The settings of `neuclip download`: what to read, what to take, how to store, how to fetch."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal

import pydantic
from pydantic import Field

from data_prep.fetching.guard import GuardConfig
from data_prep.sources.source import SourceConfig
from data_prep.sources.subset import SubsetConfig
from pipeline.config import section


@section
class ImageConfig:
    """How images are stored; the names and meanings are img2dataset's."""

    size: int = Field(default=256, ge=16, le=4096)
    resize_mode: Literal["no", "keep_ratio", "keep_ratio_largest", "center_crop", "border"] = "keep_ratio"
    resize_only_if_bigger: bool = True
    # Keep the bytes as served where no resizing was needed and the kind is `encode_format`.
    skip_reencode: bool = False
    encode_format: Literal["jpg", "png", "webp"] = "jpg"
    encode_quality: int = Field(default=95, ge=0, le=100)
    # Smaller sides (pixels) and longer shapes than this are refused.
    min_size: int = Field(default=0, ge=0)
    max_aspect_ratio: float = Field(default=1e6, ge=1)

    @pydantic.model_validator(mode="after")
    def _png_compression(self) -> ImageConfig:
        if self.encode_format == "png" and self.encode_quality > 9:
            raise ValueError(f"encode_quality = {self.encode_quality}: for png it is the compression, from 0 to 9")
        return self


@section
class FetchConfig:
    """How the work is spread: img2dataset's distributors, and one part of the list per machine where asked for."""

    distributor: Literal["multiprocessing", "pyspark", "ray"] = "multiprocessing"
    # Where the cluster is: a Spark master (spark://host:7077, yarn, ...) or a Ray address; without it, this machine.
    master: str | None = None
    processes: int = Field(default_factory=lambda: os.cpu_count() or 1, ge=1)
    threads: int = Field(default=64, ge=1)
    shard_size: int = Field(default=10_000, ge=1, le=1_000_000)
    # Seconds without an answer, and seconds for a whole attempt.
    timeout: float = Field(default=10.0, gt=0)
    total_timeout: float = Field(default=60.0, gt=0)
    retries: int = Field(default=1, ge=0, le=10)
    # Machine `worker` of `workers` takes every workers-th shard, into one shared folder (Slurm arrays).
    worker: int = Field(default=0, ge=0)
    workers: int = Field(default=1, ge=1)

    @pydantic.model_validator(mode="after")
    def _worker_in_range(self) -> FetchConfig:
        if self.master and self.distributor == "multiprocessing":
            raise ValueError(f"master = {self.master!r} is for the distributors pyspark and ray")
        if self.worker >= self.workers:
            raise ValueError(f"worker = {self.worker} must be below workers = {self.workers}")
        return self


@section
class MonitorConfig:
    """When a run stops itself instead of burning its URL list, or starts its engine anew."""

    # Pause when fewer than this share of the last `window` URLs gave a sample; 0 never pauses.
    min_success: float = Field(default=0.1, ge=0, le=1)
    window: int = Field(default=1_000, ge=1)
    # Seconds without any finished URL after which the engine is started anew, and how often in a row.
    stall: float = Field(default=300.0, gt=0)
    restarts: int = Field(default=3, ge=0)
    # URLs fetched beforehand to see that the hash column is what it is said to be; 0 skips that.
    probe: int = Field(default=64, ge=0, le=1_000)


@section
class DownloadConfig:
    """Everything `neuclip download` needs to know. `output` is the folder of the data set."""

    output: str
    source: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    subset: SubsetConfig = dataclasses.field(default_factory=SubsetConfig)
    image: ImageConfig = dataclasses.field(default_factory=ImageConfig)
    guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
    fetch: FetchConfig = dataclasses.field(default_factory=FetchConfig)
    monitor: MonitorConfig = dataclasses.field(default_factory=MonitorConfig)
