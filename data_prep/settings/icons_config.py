"""The settings of `neuclip download` with `source.name=icons`: icons of the npm package @iconify/json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from data_prep.settings.download_config import DownloadConfig
from pipeline.config import parse, section
from pipeline.cores import usable_cores

PACKAGE = "@iconify/json"


@section
class IconSourceConfig:
    """The package of icon sets, and which of them are used."""

    name: Literal["icons"] = "icons"
    """The source."""
    package: str | None = None
    """A local copy: the unpacked folder, or the `.tgz` that `npm pack` writes. Without it, the npm client fetches the
    package."""
    version: str = Field(default="2.2.535", pattern=r"^\d+\.\d+\.\d+$")
    """Version of the package; a local copy must have it."""
    licences: tuple[str, ...] = (
        "MIT", "Apache-2.0", "CC0-1.0", "ISC", "CC-BY-4.0", "CC-BY-3.0", "OFL-1.1", "BSD-3-Clause", "Unlicense",
    )  # fmt: skip
    """SPDX identifiers of the licences whose sets are used. Sets of brand logos are never used."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Share of the icons to train on, chosen by a hash; the held-out tasks do not depend on it."""

    @pydantic.field_validator("licences", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


@section
class IconImageConfig:
    """How icons are rendered."""

    size: int = Field(default=64, ge=16, le=1024)
    """Side of the square images, in pixels."""


@section
class HeldOutConfig:
    """Which icons are held out of training; the tasks made of them are in the folder OUTPUT-suite."""

    sets: float = Field(default=0.03, ge=0, lt=0.5)
    """Share of the icons that are held out as whole sets, by author: drawings in styles that training has not seen."""
    phrases: int = Field(default=200, ge=0)
    """Rare captions of which every icon is held out: the classes of a zero-shot task."""
    pairs: int = Field(default=5_000, ge=0)
    """Pairs of each retrieval task."""


@section
class IconWorkConfig:
    """How the work is spread."""

    processes: int = Field(default_factory=usable_cores, ge=1)
    """Rendering processes; each works on one shard at a time."""
    shard_size: int = Field(default=10_000, ge=1, le=1_000_000)
    """Icons per shard, including those that are not used."""


@section
class IconsConfig:
    """Settings of `neuclip download --recipe icons`."""

    output: str
    """Folder of the dataset."""
    source: IconSourceConfig = dataclasses.field(default_factory=IconSourceConfig)
    """Where the icons come from."""
    image: IconImageConfig = dataclasses.field(default_factory=IconImageConfig)
    """How they are rendered."""
    held_out: HeldOutConfig = dataclasses.field(default_factory=HeldOutConfig)
    """What is held out."""
    fetch: IconWorkConfig = dataclasses.field(default_factory=IconWorkConfig)
    """How the work is spread."""


def parse_download(tree: Mapping[str, Any]) -> DownloadConfig | IconsConfig:
    """The settings of `neuclip download`; the source decides which ones exist.

    Raises:
        UserError: A setting is wrong.
    """
    source = tree.get("source")
    is_icons = isinstance(source, Mapping) and source.get("name") == "icons"
    return parse(IconsConfig, tree) if is_icons else parse(DownloadConfig, tree)
