"""Arrays that the processes of a node share: one process computes and stores them, all of them memory-map the files.

The files are in the system's folder for temporary files (`TMPDIR`), below a folder that only this user can read. They
are a cache: whatever is missing is computed again, and if nothing can be stored there, every process keeps its own
copy in memory.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTS = "facts.json"
KEPT_VERSIONS, KEPT_SECONDS = 2, 7 * 24 * 3600
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arrays:
    """Named arrays with a few plain facts about them."""

    arrays: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    """Where they are stored; None if they are in this process's memory only."""

    def __reduce__(self) -> Any:
        """Sent to another process of this node, stored arrays are opened there rather than copied."""
        if self.folder is not None and self.folder.exists():
            return open_stored, (self.folder,)
        return Arrays, (dict(self.arrays), dict(self.facts))


def shared(topic: str, version: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays that `make` computes, computed by the first process of this node that needs them.

    Args:
        topic: What the arrays are; a file name. Only the newest two versions of a topic are kept, and a topic that no
            process has used for a week is deleted.
        version: Identifies their contents; a file name.
        make: Computes them.
    """
    try:
        folder = _own_folder() / topic / version
        if not folder.exists():
            with _locked(folder.with_name(version + ".lock")):
                if not folder.exists():  # another process may have stored them meanwhile
                    _store(folder, make())
                    _delete_old(folder.parent)
        return open_stored(folder)
    except OSError as error:
        log.warning("Arrays cannot be shared among this node's processes, which costs memory: %s", error)
        return make()


def open_stored(folder: Path) -> Arrays:
    """Memory-map stored arrays.

    Raises:
        OSError: They are not there, or cannot be read.
    """
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    arrays = {path.stem: np.load(path, mmap_mode="r").view(np.ndarray) for path in folder.glob("*.npy")}
    os.utime(folder.parent)
    return Arrays(arrays, facts, folder)


def _own_folder() -> Path:
    """The cache's folder. Others must not be able to write to it: what is in it is not checked again.

    Raises:
        OSError: The folder cannot be made, or belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"neuclip-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder that only this user can write to")
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this node; it is released when this process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _store(folder: Path, made: Arrays) -> None:
    """Write the arrays into a temporary folder and rename it into place.

    Raises:
        OSError: There is no space, for example.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        for name, array in made.arrays.items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / FACTS).write_text(json.dumps(dict(made.facts)), encoding="utf-8")
        os.replace(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _delete_old(topic: Path) -> None:
    """Delete older versions, and topics that are not in use. Processes that have mapped their files can go on."""
    versions = sorted((path for path in topic.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    topics = [path for path in topic.parent.iterdir() if time.time() - path.stat().st_mtime > KEPT_SECONDS]
    for path in versions[:-KEPT_VERSIONS] + topics:
        shutil.rmtree(path, ignore_errors=True)
