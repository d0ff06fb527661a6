"""Who may change a data set, and files that change together: all of them or none, even if the program is killed.

1. Each new file is written beside the one that it replaces (where a link leads), under a temporary name of its own.
2. All are flushed to the disk, and a note that lists them is written in one step. From then on they are valid.
3. They are renamed to their final names in order, and files without a successor are deleted; the note comes last.

Before step 2 nothing has changed; after it, `recover` repeats step 3, which can fail only in a rename. All commands
publish, replace and delete shards in this way. Notes and links may be another person's: a link that leads out of the
data set's folder is followed with `allow_outside` only, except that `shards` and `meta` may be on another disk.

Downloads share the folder's lock if they divide the shards among the same number of workers, and each hold one for
their own part; `neuclip pairs`, removals and deletions lock the folder exclusively. A command that finds itself alone
finishes or deletes what killed ones have left. The engine of a download, and the workers of both commands, outlive a
killed one for a moment: they hold a lock of their own, and the next command waits until it is free.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from data_prep.dataset.dataset_folder import Folder
from pipeline.errors import UserError
from pipeline.files import LEFTOVERS, NotAFile, file_lock, flush, path_below, read_bounded, write_text

_TOKEN = re.compile(r"[0-9a-f]{32}")
_OF_A_SHARD = re.compile(r"\d{5,}\.[\w.]+")
_ON_OTHER_DISKS = ("shards", "meta")
"""Folders of a data set that may be links, since shards are large: but only files named as those of a shard change."""
_WHOLE, _ENGINE = "folder", "engine-"
_PATIENCE = 15.0
"""Seconds to wait for the engine and workers of a killed command."""


class Commit:
    """A change of several files below `root`, noted in the file `note`; without `finish`, it is undone."""

    def __init__(self, root: Path, note: Path, *, allow_outside: bool = False) -> None:
        self._root, self._note, self._token, self._allow_outside = root, note, uuid.uuid4().hex, allow_outside
        self._files: dict[str, Path | None] = {}
        """By name below `root`: where the new version is, or None for a file to be deleted."""

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._note.exists():  # else it is valid, and `recover` needs the files
            for path in filter(None, self._files.values()):
                with suppress(OSError):
                    path.unlink()

    def new(self, path: Path) -> Path:
        """Where the caller writes the new version of a file.

        Raises:
            UserError: A part of its name is not a `plain_name`, or it leads out of the folder.
        """
        name = os.path.relpath(path, self._root)
        path_below(self._root, name, what="A file to be replaced")
        new = _beside(real_path(self._root, path, allow_outside=self._allow_outside), self._token)
        self._files[name] = new
        return new

    def delete(self, path: Path) -> None:
        """Delete a file, and what it leads to if it is a link, instead of replacing it."""
        self.new(path).unlink(missing_ok=True)
        self._files[os.path.relpath(path, self._root)] = None

    def finish(self) -> None:
        """Make the new files valid, and put them in their places."""
        new = [path for path in self._files.values() if path]
        for path in [*new, *{path.parent for path in new}]:
            flush(path)
        files = {name: path is not None for name, path in self._files.items()}
        write_text(self._note, json.dumps({"token": self._token, "files": files}), durable=True)
        flush(self._note.parent)
        _put_in_place(self._root, self._note, allow_outside=self._allow_outside)


def real_path(root: Path, path: Path, *, allow_outside: bool = False) -> Path:
    """Where a path below `root` leads.

    Raises:
        UserError: It leads out of the folder, and not into a folder of shards on another disk, and `allow_outside` is
            false.
    """
    real = Path(os.path.realpath(path))
    folder = os.path.realpath(root)
    if path.parent in [root / name for name in _ON_OTHER_DISKS] and _OF_A_SHARD.fullmatch(path.name):
        folder = os.path.realpath(path.parent)
    if allow_outside or real.is_relative_to(folder):
        return real
    raise UserError(
        f"{path} leads to {real}, outside of {root}, and nothing was changed there: somebody else's data set may have "
        "links to any of your files. If this one is yours, move that into the folder, which may itself be a link; "
        "`neuclip verify --remove FILE --allow-outside` follows it."
    )


def recover(folder: Folder, shards: Collection[int] | None = None, *, allow_outside: bool = False) -> None:
    """Finish what killed commands have committed, and delete what else they have left.

    The caller holds the lock of the folder or, with `shards`, is the only one that changes these.

    Raises:
        UserError: The note of a removal is damaged, or a link leads out of the folder.
    """
    if shards is None and folder.pending_removal.exists():
        _put_in_place(folder.root, folder.pending_removal, allow_outside=allow_outside)
    for shard in folder.numbered(".commit"):
        if shards is None or shard in shards:
            try:
                _put_in_place(folder.root, folder.commit(shard), allow_outside=allow_outside)
            except UserError:  # damaged, or not ours: the older record, if any, remains in effect
                folder.commit(shard).unlink()
    stems = None if shards is None else {f"{shard:05d}" for shard in shards}
    places = [folder.root / name for name in _ON_OTHER_DISKS]
    if shards is None:
        places += [real_path(folder.root, place, allow_outside=allow_outside) for place in (folder.root, folder.plan)]
        # Copies and spools of a killed command may hold samples that are removed now.
        if folder.is_converted:
            shutil.rmtree(folder.plan / "work", ignore_errors=True)
        for path in folder.locks.glob("worker-*/*.spool") if folder.is_download else ():
            real_path(folder.root, path, allow_outside=allow_outside).unlink()
    for place in places:
        delete_leftovers(place, stems)


def delete_leftovers(folder: Path, stems: Collection[str] | None = None) -> None:
    """Delete what killed commands have left of new versions of files, or of those with these stems."""
    for path in folder.glob(LEFTOVERS):
        if stems is None or path.name.split(".")[1] in stems:
            path.unlink(missing_ok=True)


def _put_in_place(root: Path, note: Path, *, allow_outside: bool) -> None:
    """Put the files of a note in their places, which may be repeated after a kill at any point."""
    try:
        tree = json.loads(read_bounded(note))
        token, files = tree["token"], dict[str, bool](tree["files"])
        paths = {path_below(root, name, what="A file to be replaced"): is_new for name, is_new in files.items()}
        if not _TOKEN.fullmatch(token):
            raise ValueError("its token is none")
    except (NotAFile, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{note}, which says how to finish a change that was interrupted, is damaged ({error}): delete it, and let "
            f"`neuclip verify` find what does not match."
        ) from error
    places = [(path, real_path(root, path, allow_outside=allow_outside), is_new) for path, is_new in paths.items()]
    for path, real, is_new in places:
        if not is_new:
            real.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        elif (new := _beside(real, token)).exists():
            new.replace(real)
    for folder in {real.parent for _, real, _ in places}:
        flush(folder)
    note.unlink()
    flush(note.parent)


def _beside(real: Path, token: str) -> Path:
    return real.with_name(f".{real.name}.{token}.tmp")


@contextmanager
def part_lock(folder: Folder, part: int | str, *, shared: bool = False, seconds: float = math.inf) -> Iterator[None]:
    """Hold the lock of one part of the work, for which to wait so many seconds.

    Raises:
        UserError: Another process holds the lock.
    """
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(folder.locks / f"lock-{part}", shared=shared, seconds=seconds))
        except BlockingIOError as error:
            raise UserError(f"Another process is working in {folder.root}: wait for it, or stop it.") from error
        yield


@contextmanager
def worker_lock(folder: Folder) -> Iterator[None]:
    """Hold the lock of one worker's part of a download, once an earlier engine of this worker has ended.

    Raises:
        UserError: Another process works on this part, or the engine does not end.
    """
    with part_lock(folder, folder.worker, seconds=0):
        _wait_for_engines(folder, folder.worker)
        yield


def engine_lock(folder: Folder) -> AbstractContextManager[None]:
    """Held by the engine and by workers while they may write."""
    return part_lock(folder, f"{_ENGINE}{folder.worker}", shared=True)


@contextmanager
def shared_lock(folder: Folder, workers: int = 1) -> Iterator[None]:
    """Hold the folder's shared lock: no removal can start, but the other workers' downloads can.

    Raises:
        UserError: A removal is running, or a download that divides the shards among another number of
            workers, so that both would write some of them.
    """
    number = folder.locks / "workers"
    with ExitStack() as held:
        with part_lock(folder, "entry"):
            try:
                with exclusive_lock(folder):
                    write_text(number, str(workers))
            except UserError:
                if folder.pending_removal.exists():
                    raise
            held.enter_context(part_lock(folder, _WHOLE, shared=True, seconds=0))
            if number.read_text() != str(workers):
                raise UserError(
                    f"Another process is working in {folder.root} with another fetch.workers: give the same."
                )
        yield


@contextmanager
def exclusive_lock(folder: Folder, *, allow_outside: bool = False) -> Iterator[None]:
    """Hold the folder's exclusive lock, once what was interrupted in it is finished.

    Raises:
        UserError: A download or a removal is running, or `recover` refuses a link.
    """
    with part_lock(folder, _WHOLE, seconds=0):
        _wait_for_engines(folder, "*")
        recover(folder, allow_outside=allow_outside)
        yield


def _wait_for_engines(folder: Folder, worker: int | str) -> None:
    for path in folder.locks.glob(f"lock-{_ENGINE}{worker}"):
        with part_lock(folder, path.name.removeprefix("lock-"), seconds=_PATIENCE):
            pass
