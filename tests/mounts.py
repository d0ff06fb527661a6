"""File systems of a test's own, which can be filled or fail. They need root, and a machine that allows mounts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _call(*command: object) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True, check=False).returncode == 0


@contextmanager
def small_disk(folder: Path, *, megabytes: int) -> Iterator[Path]:
    """A disk of its own at `folder`. Skips the test where that is not possible."""
    folder.mkdir(exist_ok=True)
    if os.geteuid() or not _call("mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder):
        pytest.skip("this machine does not allow mounts")
    try:
        yield folder
    finally:
        _call("umount", "--lazy", folder)


class JournalledDisk:
    """ext4 in a file, as a block device: the kernel makes it read-only when its journal fails.

    Args:
        folder: Where it is mounted; the file is beside it.
    """

    def __init__(self, folder: Path, *, megabytes: int) -> None:
        self.folder, self._file = folder, folder.with_suffix(".ext4")
        folder.mkdir()
        with self._file.open("wb") as file:
            file.truncate(megabytes << 20)
        if os.geteuid() or not _call("mkfs.ext4", "-q", self._file) or not self._mount():
            pytest.skip("this machine does not allow mounts of files")

    def _mount(self) -> bool:
        return _call("mount", "-o", "loop", self._file, self.folder)

    def fail(self) -> None:
        """As after an error of the device: from now on it is read-only, also for files that are open."""
        assert _call("mount", "-o", "remount,abort", self.folder)

    def repair(self) -> None:
        self.close()
        _call("fsck.ext4", "-fy", self._file)  # its exit code says that it found something
        assert self._mount()

    def close(self) -> None:
        _call("umount", self.folder) or _call("umount", "--lazy", self.folder)


def fill(disk: Path) -> Path:
    """Write a file until nothing more fits, and return it."""
    filler = disk / "filler"
    try:
        with filler.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        pass
    return filler
