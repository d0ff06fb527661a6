"""Which tasks a folder holds, and what is known about them before they are read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import suggest
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.rows import open_rows
from pipeline.evaluation.datasets.task import Task, folder_names
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.datasets.webdataset import BlankClass, is_webdataset, open_webdataset

FACTS_NAME, LOCK_NAME = "suite.json", "evalsets.json"
DATA_VARIABLE = "NEUCLIP_EVALUATION_DATA"
OFFICIAL = "datacomp"


@dataclass(frozen=True)
class Entry:
    """A task and where its data is; `folder` is None where there is none.

    expected: counts and file digests that the data must have, from the suite's own `suite.json` or, for the official
    benchmark, from the table.
    """

    task: Task
    folder: Path | None
    expected: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    name: str
    folder: Path
    entries: tuple[Entry, ...]

    @property
    def identity(self) -> str:
        """Name and digest of the tasks: what was done for some of them was not done for all."""
        keys = "\n".join(entry.task.key for entry in self.entries)
        return f"{self.name}-{hashlib.sha256(keys.encode()).hexdigest()[:8]}"

    def only(self, keys: Sequence[str]) -> Suite:
        """The named tasks in the order of the suite. Raises: UserError for a task that is not in it."""
        known = {name: entry.task.key for entry in self.entries for name in (entry.task.key, entry.task.stem)}
        for key in keys:
            if key not in known:
                allowed = tuple(entry.task.key for entry in self.entries)
                raise UserError(f"There is no task {key!r} in {self.folder}. {suggest(key, allowed)}")
        wanted = {known[key] for key in keys}
        return replace(self, entries=tuple(entry for entry in self.entries if entry.task.key in wanted))


def open_suite(suite: str | Path, *, data: str | Path | None = None) -> Suite:
    """Find a suite.

    Args: suite: a folder of tasks, taken as it is; or `datacomp`, the official benchmark, whose 38 tasks must all be
      there with the official counts; or the name of a folder below `data`, such as `scenes`.
      data: where named suites live; by default $NEUCLIP_EVALUATION_DATA.
    Raises: UserError when there is no such folder or it holds no task.
    """
    data = data or os.environ.get(DATA_VARIABLE)
    folder = Path(suite)
    if not folder.is_dir() and data:
        folder = Path(data) / suite
        if suite == OFFICIAL and not folder.is_dir():
            folder = Path(data)
    if not folder.is_dir():
        raise UserError(
            f"There is no suite {str(suite)!r}: give a folder of tasks (wds_*_test), or the name of one below "
            f"--data or ${DATA_VARIABLE} ({data or 'not set'})."
        )
    official = suite == OFFICIAL
    entries = _official(folder) if official else _found(folder)
    if not any(entry.folder for entry in entries):
        raise UserError(f"{folder} holds no evaluation task: expected folders such as wds_cifar10_test.")
    return Suite(OFFICIAL if official else folder.resolve().name, folder, tuple(entries))


def open_task(entry: Entry, *, blank_class: BlankClass = "keep") -> TaskData:
    """Open a task in whatever layout it has, and hold it against what is expected of it.

    Raises: TaskError when data is missing, partial or not what is expected.
    """
    if entry.folder is None:
        names = ", ".join(folder_names(entry.task)[:3])
        raise TaskError(f"There is no data for {entry.task.key}: none of the folders {names} exists.")
    if is_webdataset(entry.folder):
        data = open_webdataset(entry.folder, columns=len(entry.task.fields), blank_class=blank_class)
    elif entry.task.protocol == "classification":
        raise TaskError(
            f"{entry.folder} has no layout that is known for {entry.task.key}: expected test/nshards.txt and tars."
        )
    else:
        data = open_rows(entry.task, entry.folder)
    classes = len(data.classnames) + data.blank_classes
    for what, count in (("samples", data.samples), ("classes", classes)):
        wanted = entry.expected.get(what)
        if wanted is not None and count != wanted:
            raise TaskError(
                f"{entry.task.key}: {entry.folder} has {count:,} {what}, but {wanted:,} are expected. A score over "
                "other data would not be this task's score: fetch the data again, or give the folder itself as suite."
            )
    return data


def is_official(entry: Entry, data: TaskData) -> bool:
    """Whether the data has the official counts of a task in the table."""
    task = entry.task
    classes = len(data.classnames) + data.blank_classes
    return task.key in TASKS and data.samples == task.samples and task.classes in (None, classes)


def check_digests(entry: Entry, files: Mapping[str, str]) -> None:
    """Raises: TaskError when files have other digests than `suite.json` says, or are not there."""
    expected: Mapping[str, str] = entry.expected.get("sha256", {})
    wrong = [name for name in expected if name in files and files[name] != expected[name]]
    wrong += [name for name in expected if entry.folder is not None and not (entry.folder / name).is_file()]
    if wrong:
        raise TaskError(
            f"{entry.task.key}: {len(wrong)} of {len(expected)} files are missing or have another SHA-256 than was "
            f"written down with the data ({', '.join(wrong[:3])}). They are damaged or of another version: fetch them "
            "again."
        )


def _official(folder: Path) -> list[Entry]:
    index = _index(folder)
    facts = _facts(folder)
    entries = []
    for task in TASKS.values():
        expected = {"samples": task.samples, **({"classes": task.classes} if task.classes else {})}
        files = {"sha256": facts[task.key]["sha256"]} if "sha256" in facts.get(task.key, {}) else {}
        entries.append(Entry(task, _lookup(task, index), {**expected, **files}))
    return entries


def _found(folder: Path) -> list[Entry]:
    index, facts = _index(folder), _facts(folder)
    known = {task.key: Entry(task, _lookup(task, index), facts.get(task.key, {})) for task in TASKS.values()}
    entries = [entry for key, entry in known.items() if entry.folder is not None or key in facts]
    taken = {entry.folder for entry in entries}
    by_stem = {key.replace("/", "-"): key for key in facts}
    for path in sorted(set(index.values()) - taken):
        if not is_webdataset(path):
            continue
        stem = path.name.removeprefix("wds_").removesuffix("_test")
        entries.append(_own(by_stem.pop(stem, stem), path, facts))
    found = {entry.task.key for entry in entries}
    entries.extend(Entry(Task(key, key), None, facts[key]) for key in facts if key not in found)
    return entries


def _own(key: str, path: Path, facts: Mapping[str, Any]) -> Entry:
    """A task that is not in the table: its folder says of which kind it is."""
    kind = path / "dataset_type.txt"
    if kind.is_file() and kind.read_text(encoding="utf-8").strip() == "retrieval":
        task = Task(key, key, protocol="retrieval", main_metric="mean_recall@1")
    else:
        task = Task(key, key)
    return Entry(task, path, facts.get(key, {}))


def _facts(folder: Path) -> dict[str, Any]:
    """What was written down with the data, by task: by whoever made the suite, or when it was fetched."""
    try:
        path = folder / LOCK_NAME
        lock = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        facts = {
            key: {"samples": entry["samples"], "sha256": {name: f["sha256"] for name, f in entry["files"].items()}}
            for key, entry in lock.items()
        }
        path = folder / FACTS_NAME
        return facts | (dict(json.loads(path.read_text(encoding="utf-8"))["tasks"]) if path.is_file() else {})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error!r}): make or fetch the suite again.") from error


def _index(folder: Path) -> dict[str, Path]:
    """Normalised name -> folder, for the suite itself, its folders and those one level deeper."""
    found: dict[str, Path] = {}
    for path in (folder, *_folders(folder), *(deep for top in _folders(folder) for deep in _folders(top))):
        for name in (path.name, path.relative_to(folder).as_posix()):
            found.setdefault(_normal(name), path)
    return found


def _folders(folder: Path) -> Iterable[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _lookup(task: Task, index: Mapping[str, Path]) -> Path | None:
    found = next((index[name] for name in map(_normal, folder_names(task)) if name in index), None)
    if found is None and task.protocol != "classification":
        # Hub downloads carry their owner's name in front: nlphuji___winogavil, datasets--nlphuji--winogavil.
        ending = "-" + _normal(task.key.split("/", 1)[-1])
        found = next((path for name, path in sorted(index.items()) if name.endswith(ending)), None)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
