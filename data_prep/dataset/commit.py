"""Files that change together: all of them change or none, even if the program is killed.

1. Each new file is written beside the one that it replaces (where a link leads), under a temporary name of its own.
2. All are flushed to the disk, and a note that lists them is written in one step. From then on they are valid.
3. They are renamed to their final names in order, and files without a successor are deleted; the note comes last.

Before step 2 nothing has changed; after it, `recover` repeats step 3, which can fail only in a rename. All commands
publish, replace and delete shards in this way.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from data_prep.dataset.dataset_folder import Folder
from pipeline.errors import UserError
from pipeline.files import LEFTOVERS, flush, path_below, write_text

_TOKEN = re.compile(r"[0-9a-f]{32}")


class Commit:
    """A change of several files below `root`, noted in the file `note`; without `finish`, it is undone."""

    def __init__(self, root: Path, note: Path) -> None:
        self._root, self._note, self._token = root, note, uuid.uuid4().hex
        self._files: dict[str, bool] = {}

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._note.exists():  # else it is valid, and `recover` needs the files
            for name in self._files:
                with suppress(OSError):
                    _beside(self._root / name, self._token).unlink()

    def new(self, path: Path) -> Path:
        """Where the caller writes the new version of a file.

        Raises:
            UserError: A part of its name is not a `plain_name`.
        """
        name = os.path.relpath(path, self._root)
        path_below(self._root, name, what="A file to be replaced")
        self._files[name] = True
        return _beside(path, self._token)

    def delete(self, path: Path) -> None:
        """Delete a file, and what it leads to if it is a link, instead of replacing it."""
        self.new(path).unlink(missing_ok=True)
        self._files[os.path.relpath(path, self._root)] = False

    def finish(self) -> None:
        """Make the new files valid, and put them in their places."""
        new = [_beside(self._root / name, self._token) for name, is_new in self._files.items() if is_new]
        for path in [*new, *{path.parent for path in new}]:
            flush(path)
        write_text(self._note, json.dumps({"token": self._token, "files": self._files}), durable=True)
        flush(self._note.parent)
        _put_in_place(self._root, self._note)


def recover(folder: Folder, shards: Collection[int] | None = None) -> None:
    """Finish what killed commands have committed, and delete what else they have left.

    The caller holds the lock of the folder or, with `shards`, is the only one that changes these.

    Raises:
        UserError: The note of a removal is damaged.
    """
    if shards is None and folder.pending_removal.exists():
        _put_in_place(folder.root, folder.pending_removal)
    for shard in folder.numbered(".commit"):
        if shards is None or shard in shards:
            try:
                _put_in_place(folder.root, folder.commit(shard))
            except UserError:  # damaged: the older record, if any, remains in effect
                folder.commit(shard).unlink()
    places = folder.root / "shards", folder.root / "meta"
    if shards is None:
        delete_leftovers((folder.root, folder.plan, *places))
    else:
        delete_leftovers(places, {f"{shard:05d}" for shard in shards})


def delete_leftovers(folders: Iterable[Path], stems: Collection[str] | None = None) -> None:
    """Delete what killed commands have left of new versions of files, or of those with these stems."""
    for path in (path for folder in folders for path in folder.glob(LEFTOVERS)):
        if stems is None or path.name.split(".")[1] in stems:
            path.unlink(missing_ok=True)


def _put_in_place(root: Path, note: Path) -> None:
    """Put the files of a note in their places, which may be repeated after a kill at any point.

    Raises:
        UserError: The note is damaged.
    """
    try:
        tree = json.loads(note.read_bytes())
        token, files = tree["token"], dict[str, bool](tree["files"])
        paths = {path_below(root, name, what="A file to be replaced"): is_new for name, is_new in files.items()}
        if not _TOKEN.fullmatch(token):
            raise ValueError("its token is none")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{note}, which says how to finish a change that was interrupted, is damaged ({error}): delete it, and let "
            f"`neuclip verify` find what does not match."
        ) from error
    for path, is_new in paths.items():
        if not is_new:
            Path(os.path.realpath(path)).unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        elif (new := _beside(path, token)).exists():
            new.replace(os.path.realpath(path))
    for folder in {os.path.dirname(os.path.realpath(path)) for path in paths}:
        flush(folder)
    note.unlink()
    flush(note.parent)


def _beside(path: Path, token: str) -> Path:
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.{token}.tmp")
