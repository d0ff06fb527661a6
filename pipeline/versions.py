"""The versions of the software that a result was made with."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("neuclip", "torch", "torchvision", "deepspeed", "open_clip_torch", "webdataset", "img2dataset", "numpy")


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Package -> installed version (or "absent"), and Python's."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found
