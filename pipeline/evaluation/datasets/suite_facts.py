"""What is recorded with a suite's data: `suite.json` (counts and digests), `evalsets.json` (what was fetched)."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError, plain
from pipeline.files import sha256_of

COUNTS = ("samples", "images", "classes", "captions")
"""What is counted in a task's data."""
FACTS_NAME, FETCHED_NAME = "suite.json", "evalsets.json"


def read_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Counts (`samples`, `classes`, ...) and digests (`sha256`, by file) that a suite's tasks must have, by task.

    Raises:
        UserError: A file is damaged.
    """
    path = folder / FETCHED_NAME
    try:
        fetched = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        facts = {
            key: {"samples": entry["samples"], "sha256": {name: f["sha256"] for name, f in entry["files"].items()}}
            for key, entry in fetched.items()
        }
        path = folder / FACTS_NAME
        own = dict(json.loads(path.read_text(encoding="utf-8"))["tasks"]) if path.is_file() else {}
        return facts | {key: _checked_facts(key, task) for key, task in own.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({plain(repr(error), longest=200)}): make or fetch the suite again."
        ) from error


def _checked_facts(key: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """What `suite.json` says about a task: counts and digests. A misspelt name would check nothing."""
    for name, value in task.items():
        if name == "sha256":
            right = isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())
        elif name in COUNTS:
            right = isinstance(value, int) and not isinstance(value, bool)
        else:  # other facts, such as those that the scenes' generator writes, are for readers of the file
            right = not difflib.get_close_matches(name, (*COUNTS, "sha256"), cutoff=0.75)
        if not right:
            found = plain(repr(value), longest=60)
            raise ValueError(f"{key}: {name} = {found}; allowed are {', '.join(COUNTS)} (whole numbers) and sha256")
    return dict(task)


def check_digests(
    key: str, files: Mapping[str, str], expected: Mapping[str, str], *, folder: Path | None, written: str
) -> None:
    """Compare a task's files with digests that were recorded for them.

    Args:
        key: The task.
        files: Digests of the files that were read, by name within the task's folder.
        expected: The recorded digests. A file that is recorded but not read must at least be in `folder`.
        folder: The task's folder; None when every recorded file must be among `files`.
        written: Where the digests were recorded, for the message.

    Raises:
        TaskError: Files have other digests, or are not there.
    """
    wrong = [name for name in expected if name in files and files[name] != expected[name]]
    unread = [name for name in expected if name not in files]
    wrong += [name for name in unread if folder is None or not (folder / name).is_file()]
    if wrong:
        raise TaskError(
            f"{key}: {len(wrong)} of {len(expected)} files are missing or have another SHA-256 than {written} "
            f"({', '.join(wrong[:3])}). They are damaged or of another version: fetch them again."
        )


def check_copies(key: str, files: Mapping[str, str]) -> None:
    """Check that no two data files of a task have the same content.

    Raises:
        TaskError: Some do; the message names them.
    """
    seen: dict[str, str] = {}
    for name, digest in files.items():
        if not name.endswith((".tar", ".parquet", ".arrow", ".zip")):
            continue
        if digest in seen:
            raise TaskError(f"{key}: {name} has the same content as {seen[digest]}: it is a copy. Fetch it again.")
        seen[digest] = name


def file_digests(files: Iterable[Path], folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of files, by their names relative to `folder`.

    Raises:
        TaskError: A file cannot be read.
    """
    found = {}
    for path in files:
        try:
            found[relative_name(path, folder)] = sha256_of(path)
        except OSError as error:
            raise TaskError(f"Cannot read {path}: {error.strerror}. The task's data is incomplete.") from error
    return found


def relative_name(path: Path, folder: Path) -> str:
    """A file's name within a folder, with `..` for files elsewhere."""
    return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
