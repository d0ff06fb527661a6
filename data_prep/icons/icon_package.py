"""The npm package @iconify/json: fetched with the npm client or taken from a local copy, and read set by set.

The settings of `neuclip download` with `source.name=icons` are here, too.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import pydantic
from pydantic import Field

from data_prep.settings.download_config import DownloadConfig
from data_prep.settings.source_config import listed
from pipeline.config import parse, section
from pipeline.cores import usable_cores
from pipeline.errors import UserError
from pipeline.files import path_below, tar_errors

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

    _listed = pydantic.field_validator("licences", mode="before")(listed)


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


@dataclass(frozen=True)
class SetFacts:
    """An icon set as its entry in `collections.json` describes it."""

    prefix: str
    name: str
    author: str
    author_url: str
    licence: str
    """SPDX identifier, or the licence's title if it has none."""
    licence_url: str
    category: str


@contextmanager
def package_folder(package: str | None, version: str, *, scratch: Path) -> Iterator[Path]:
    """The unpacked package, as a folder that may be temporary.

    Args:
        package: A local folder or `.tgz`; None fetches the package with the npm client.
        version: The version that it must have.
        scratch: Existing folder for temporary files: about 600 MB, removed at the end.

    Raises:
        UserError: It cannot be fetched, is damaged, or is another package or version.
    """
    path = Path(package) if package else None
    if path is not None and path.is_dir():
        _check(path, version)
        yield path
        return
    if path is not None and not path.is_file():
        raise UserError(f"source.package = {package!r} does not exist: give the folder or the .tgz of {PACKAGE}.")
    with tempfile.TemporaryDirectory(dir=scratch, prefix="icons-") as temporary:
        archive = path if path is not None else fetch(version, Path(temporary))
        yield _unpacked(archive, Path(temporary), version)


def fetch(version: str, folder: Path) -> Path:
    """Fetch the package's archive with the npm client, which verifies the registry's checksum.

    Raises:
        UserError: There is no npm client, or it fails.
    """
    wanted = f"{PACKAGE}@{version}"
    offline = f"Where npm and a network are, `npm pack {wanted}` writes the archive; name it with source.package=FILE."
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(f"Fetching {wanted} needs the npm client (of Node.js) and a network. {offline}")
    command = [npm, "pack", wanted, "--pack-destination", str(folder), "--loglevel=error"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode or not archives:
        said = " ".join(line.removeprefix("npm error ") for line in done.stderr.strip().splitlines()[:3])
        raise UserError(f"npm could not fetch {wanted} ({said or f'exit code {done.returncode}'}). {offline}")
    return archives[0]


def _unpacked(archive: Path, folder: Path, version: str) -> Path:
    try:
        with tar_errors(), tarfile.open(archive, "r:gz") as tar:
            wanted = (m for m in tar if m.isfile() and m.name.endswith(".json") and m.name.count("/") <= 2)
            for member in wanted:  # extractall takes a filter from Python 3.11.4 on only
                target = path_below(folder, member.name, what=f"a file in {archive}")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(cast(IO[bytes], tar.extractfile(member)), file)
    except (
        tarfile.TarError,
        zlib.error,
        gzip.BadGzipFile,
        FileExistsError,  # this and the next two: a file and a folder have one name
        NotADirectoryError,
        IsADirectoryError,
    ) as error:
        raise UserError(f"{archive} is not a complete npm archive ({error}): fetch it again.") from error
    _check(folder / "package", version)
    return folder / "package"


def _check(folder: Path, version: str) -> None:
    about = _read(folder / "package.json")
    if about.get("name") != PACKAGE:
        raise UserError(f"{folder} is not the package {PACKAGE}, but {about.get('name')!r}.")
    if about.get("version") != version:
        raise UserError(
            f"{folder} is version {about.get('version')} of {PACKAGE}, but source.version = {version}: the sets differ "
            "between versions. Fetch that version, or set source.version."
        )


def read_sets(folder: Path) -> list[SetFacts]:
    """The sets of the package, in its order.

    Raises:
        UserError: `collections.json` is missing or damaged.
    """
    path = folder / "collections.json"
    try:
        return [
            SetFacts(
                prefix=prefix,
                name=about["name"],
                author=about["author"]["name"],
                author_url=about["author"].get("url", ""),
                licence=about["license"].get("spdx") or about["license"]["title"],
                licence_url=about["license"].get("url", ""),
                category=about.get("category", ""),
            )
            for prefix, about in _read(path).items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} does not have the format of {PACKAGE} ({error!r}): fetch the package again."
        ) from error


def read_icon_set(folder: Path, prefix: str) -> dict[str, Any]:
    """A set's icons and defaults, as in the package.

    Raises:
        UserError: The file is missing or damaged.
    """
    path = path_below(folder / "json", f"{prefix}.json", what="An icon set")
    tree = _read(path)
    if not isinstance(tree.get("icons"), dict):
        raise UserError(f"{path} has no icons: the package is damaged. Fetch it again.")
    return tree


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): is this an unpacked {PACKAGE}?") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): fetch the package again.") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object. Fetch the package again.")
    return tree
