"""The identity of a suite in the ledger: a digest of its contents and of the settings it is scored with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Entry, Suite
from pipeline.evaluation.datasets.task_data import plain
from pipeline.files import sha256_of, write_text

SCORED_WITH = ("blank_class", "micro_batch", "precision")


def suite_identity(suite: Suite, settings: Mapping[str, Any], *, known: Path) -> str:
    """The suite's name with a digest of its tasks, their files' contents and the settings that can change a score.

    A renamed folder gives another name but the same digest; other data under the same name gives another digest.

    Args:
        suite: The tasks; the ledger treats a part of a suite as another suite.
        settings: Settings of the evaluation.
        known: A file that caches digests by path, size and dates, so that unchanged files are not read again. The
            evaluation itself always reads them.

    Raises:
        UserError: A file of the suite cannot be read.
    """
    digests = _Digests(known)
    digest = hashlib.sha256(json.dumps([settings[name] for name in SCORED_WITH]).encode())
    try:
        for entry in suite.entries:
            digest.update(f"{entry.task.key} {entry.task.main_metric} {entry.own}\n".encode())
            for name, path in _files(entry):
                digest.update(f"{digests.of(path)}  {name}\n".encode())
    except OSError as error:
        raise UserError(
            f"{plain(error.filename)} of the suite {suite.name} cannot be read: {error.strerror}."
        ) from error
    digests.write()
    return f"{suite.name}-{digest.hexdigest()[:12]}"


def _files(entry: Entry) -> Iterator[tuple[str, Path]]:
    """Name and path of every file that belongs to a task, in a fixed order."""
    place = entry.folder
    if place is None or not place.exists():
        return
    images = [entry.base / entry.own.images] if entry.own and entry.base and entry.own.images else []
    for root in (place, *images):
        if root.is_file():
            yield root.name, root
            continue
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                yield name.as_posix(), path


class _Digests:
    """SHA-256 of files, remembered by path, size, dates and inode."""

    def __init__(self, known: Path) -> None:
        self._path, self._changed = known, False
        try:
            self._known: dict[str, list[Any]] = dict(json.loads(known.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            self._known = {}

    def of(self, path: Path) -> str:
        status, key = path.stat(), str(path.resolve())
        facts = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        stored = self._known.get(key)
        if isinstance(stored, list) and stored[:-1] == facts:
            return str(stored[-1])
        digest = sha256_of(path)
        self._known[key], self._changed = [*facts, digest], True
        return digest

    def write(self) -> None:
        if self._changed:
            write_text(self._path, json.dumps(self._known) + "\n")
