"""Files that change together: all are replaced or none, even if the program is killed.

1. Each new file is written beside the one that it replaces (where a link leads), under a temporary name of its own.
2. All are flushed to the disk, and a note that lists them is written in one step. From then on they are valid.
3. They are renamed to their final names in order, and files without a successor are deleted; the note comes last.

Before step 2 nothing has changed; after it, `finish` repeats step 3, which can fail only in a rename.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import flush, path_below, write_text

_TOKEN = re.compile(r"[0-9a-f]{32}")


class Swap:
    """A change of several files below `root`, noted in the file `note`; without `commit`, it is undone."""

    def __init__(self, root: Path, note: Path) -> None:
        self._root, self._note, self._token = root, note, uuid.uuid4().hex
        self._files: dict[str, bool] = {}

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._note.exists():  # else it is valid, and `finish` needs the files
            for name in self._files:
                with suppress(OSError):
                    _beside(self._root / name, self._token).unlink()

    def new(self, path: Path) -> Path:
        """Where the caller writes the new version of a file.

        Raises:
            UserError: A part of its name is not a `plain_name`.
        """
        self._add(path, is_new=True)
        return _beside(path, self._token)

    def delete(self, path: Path) -> None:
        """Delete a file, and what it leads to if it is a link."""
        self._add(path, is_new=False)

    def commit(self) -> None:
        """Make the new files valid, and put them in their places."""
        new = [_beside(self._root / name, self._token) for name, is_new in self._files.items() if is_new]
        for path in [*new, *{path.parent for path in new}]:
            flush(path)
        write_text(self._note, json.dumps({"token": self._token, "files": self._files}), durable=True)
        flush(self._note.parent)
        finish(self._root, self._note)

    def _add(self, path: Path, *, is_new: bool) -> None:
        name = os.path.relpath(path, self._root)
        path_below(self._root, name, what="A file to be replaced")
        self._files[name] = is_new


def finish(root: Path, note: Path) -> list[str]:
    """Put the files of a note in their places, which may be repeated after a kill at any point.

    Returns:
        The names of the files below `root`.

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
    return list(files)


def discard(paths: Iterable[Path]) -> None:
    """Delete what killed commands have left of new versions of these files, which nobody else may be writing now."""
    wanted: dict[str, set[str]] = {}
    for path in paths:
        folder, name = os.path.split(os.path.realpath(path))
        wanted.setdefault(folder, set()).add(name)
    for folder, names in wanted.items():
        for left in leftovers(Path(folder)):
            if left.name[1:].rsplit(".", 2)[0] in names:
                left.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """Files in a folder that are named as `Swap` and `replacing` name new versions, `.NAME.<32 digits>.tmp`."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.glob(".*.tmp") if len(path.name.split(".")) > 3)
    return [path for path in found if _TOKEN.fullmatch(path.name.split(".")[-2])]


def _beside(path: Path, token: str) -> Path:
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.{token}.tmp")
