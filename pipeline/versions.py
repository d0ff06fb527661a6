"""The versions of the software that a result was made with."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path

PACKAGES = ("neuclip", "torch", "torchvision", "deepspeed", "open_clip_torch", "webdataset", "img2dataset", "numpy")


@functools.cache
def version_of(package: str) -> str:
    """A package's installed version, or "absent", as `neuclip` is in a copy of the repository that is not installed.

    It is read once: checkpoints state it, also when no more files can be opened.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package -> installed version (or "absent"), and Python's."""
    return {"python": platform.python_version(), **{package: version_of(package) for package in packages}}


def source_commit() -> str:
    """The git commit of this source tree, with `-dirty` if files were changed; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
