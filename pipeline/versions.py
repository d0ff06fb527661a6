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
    """A package's installed version, read once: checkpoints state it, also when no more files can be opened."""
    return metadata.version(package)


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package -> installed version (or "absent"), and Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version_of(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def source_commit() -> str:
    """The git commit of this source tree, with `-dirty` if files were changed; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
