"""Which tasks a suite has, where their data is, and what is known about the data before it is read."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config import suggest
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import DATACOMP, Task, official_folder
from pipeline.evaluation.datasets.open_tables import find_table
from pipeline.evaluation.datasets.own_tasks import HUB, TASKS_NAME, OwnTask, open_own, place_of, read_own_tasks
from pipeline.evaluation.datasets.rows import WINOGAVIL, association_rows, check_split, retrieval_rows
from pipeline.evaluation.datasets.task_data import (
    COUNTS,
    FACTS_NAME,
    TaskData,
    TaskError,
    check_inside,
    file_facts,
    files_below,
    plain,
    reading,
)
from pipeline.evaluation.datasets.webdataset import BlankClass, is_retrieval, is_webdataset, open_webdataset
from pipeline.evaluation.protocol import PROTOCOLS

DATA_VARIABLE = "NEUCLIP_EVALUATION_DATA"
OFFICIAL = "datacomp"
FETCHED_NAME = "evalsets.json"
OTHER_FILES = ("summary", "timings", "suite.lock")
"""The stems of the files beside the tasks' results."""


@dataclass(frozen=True)
class Entry:
    """A task and where its data is."""

    task: Task
    folder: Path | None
    """None where there is no data."""
    expected: Mapping[str, Any] = field(default_factory=dict)
    """Counts and file digests that the data must have, from the suite's `suite.json`, or from the benchmark's table."""
    problem: str = ""
    """Why the task cannot be scored, where that is known before its data is opened."""
    own: OwnTask | None = None
    """How a task of a `tasks.yaml` is read."""
    images: Path | None = None
    """The folder of its images, where that is another one."""

    def files(self) -> Iterator[tuple[str, Path]]:
        """Name and path of what is in the places of the task, in a fixed order; links to nothing are left out."""
        places = [self.folder, self.images] if self.folder is not None and self.folder.exists() else []
        for root in filter(None, places):
            for path in [root] if root.is_file() else files_below(root):
                if path.exists():
                    yield (path.name if path == root else path.relative_to(root).as_posix()), path


@dataclass(frozen=True)
class Suite:
    """Tasks that are evaluated together."""

    name: str
    folder: Path
    entries: tuple[Entry, ...]
    """The tasks to evaluate."""
    whole: tuple[Entry, ...]
    """The tasks of the whole suite, of which `entries` may be a part."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the whole suite."""
        return tuple(entry.task.key for entry in self.whole)

    def only(self, keys: Sequence[str]) -> Suite:
        """The named tasks, in the order of the suite.

        Raises:
            UserError: A task is not in the suite.
        """
        tasks = [entry.task for entry in self.entries]
        known = {task.key.replace("/", "-"): task.key for task in tasks}
        known |= {name: task.key for task in tasks for name in (task.stem, task.key)}
        for key in keys:
            if key not in known:
                nearest = suggest(key, tuple(task.key for task in tasks))
                raise UserError(f"There is no task {key!r} in {self.folder}. {nearest}")
        wanted = {known[key] for key in keys}
        return replace(self, entries=tuple(entry for entry in self.entries if entry.task.key in wanted))


def open_suite(
    suite: str | Path, *, data: str | Path | None = None, tasks: Sequence[str] = (), partial: bool = False
) -> Suite:
    """Find a suite.

    Args:
        suite: A folder of tasks, taken as it is; a YAML file that describes tasks; `datacomp`, the official benchmark,
            whose 38 tasks must all be there with the official counts; or the name of a folder below `data`.
        data: Where named suites are; by default $NEUCLIP_EVALUATION_DATA.
        tasks: The keys of those that are evaluated; by default all.
        partial: Also where the data of a task that a `tasks.yaml` describes is not there.

    Raises:
        UserError: There is no such folder, it holds no task, its description is wrong, or data is not there.
    """
    path, data = Path(suite), data or os.environ.get(DATA_VARIABLE)
    official = str(suite) == OFFICIAL
    with reading(path):
        if path.suffix in (".yaml", ".yml") and path.is_file():
            name, folder, entries = path.stem, path.parent, _described(path, {})
        else:
            if not path.is_dir() and data:
                path = Path(data, suite)
                path = Path(data) if official and not path.is_dir() else path
            if not path.is_dir():
                raise UserError(
                    f"There is no suite {plain(suite, longest=200)!r}: give a folder of tasks (wds_*_test), a YAML "
                    f"file of tasks, or the name of a folder below --data or ${DATA_VARIABLE} ({data or 'not set'})."
                )
            name, folder = OFFICIAL if official else path.resolve().name, path
            entries = _entries(path, official=official)
    if not any(entry.folder for entry in entries):
        raise UserError(f"{path} holds no evaluation task: expected folders such as wds_cifar10_test, or {TASKS_NAME}.")
    stems = Counter([*OTHER_FILES, *(entry.task.stem.lower() for entry in entries)])
    if same := [entry.task.key for entry in entries if stems[entry.task.stem.lower()] > 1]:
        raise UserError(
            f"{path}: the results of {' and '.join(same)} would be written to the same file, or to one with another "
            "purpose: rename a task."
        )
    opened = Suite(name, folder, tuple(entries), tuple(entries))
    opened = opened.only(tasks) if tasks else opened
    described = [(entry.task.key, entry.folder) for entry in opened.entries if entry.own is not None and entry.folder]
    # What is on the hub is fetched when it is opened.
    missing = [f"{key}: {place}" for key, place in described if not os.path.exists(place) and place.parent.name != HUB]
    if missing and not partial:
        raise UserError(
            f"The data of {len(missing)} of {len(opened.entries)} tasks is not where their {TASKS_NAME} says "
            f"({'; '.join(missing[:5])}). Paths are relative to the YAML file. Nothing was evaluated."
        )
    return opened


def spellings(folder: Path) -> dict[Path, set[str]]:
    """The normalised names of a suite's folder, its folders and those one level deeper, by themselves and as paths."""
    paths = (folder, *sorted(folder.glob("[!.]*/")), *sorted(folder.glob("[!.]*/[!.]*/")))
    return {path: {_normal(path.name), _normal(path.relative_to(folder).as_posix())} for path in paths}


def find_folders(task: Task, names: Mapping[Path, set[str]]) -> list[Path]:
    """Every folder that holds the task; a folder without data counts only if there is no other."""
    short, is_table = task.key.split("/", 1)[-1], task.protocol != "classification"
    known = {_normal(name) for name in (task.key, short, *task.folders)}

    def is_named(name: str) -> bool:
        # Hub downloads of tables carry their owner's name in front: nlphuji___winogavil, datasets--nlphuji--winogavil.
        return name in known or (is_table and name.endswith(f"-{_normal(short)}"))

    def has_data(path: Path) -> bool:
        tables = is_table and (file.suffix in (".arrow", ".parquet", ".csv") for file in files_below(path))
        return is_webdataset(path) or bool(tables and any(tables))

    named = [path for path, spelt in names.items() if any(map(is_named, spelt))]
    filled = [path for path in named if has_data(path)]
    # A folder that contains another one is not a second copy: /data/winogavil/wds_misc-winogavil_test.
    return [path for path in filled if not any(path in other.parents for other in filled)] or named[:1]


def _normal(name: str) -> str:
    """A name of a task or folder that others spell alike: `vtab-pets` for `wds_vtab-pets_test` and `vtab/pets`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").removeprefix("wds-").removesuffix("-test")


def open_task(entry: Entry, *, blank_class: BlankClass = "keep", allow_outside: bool = False) -> TaskData:
    """Open a task in whatever layout it has, and compare it with what is expected of it.

    Args:
        entry: The task.
        blank_class: What a blank line of classnames.txt is: a class without a name, or none.
        allow_outside: Read files outside of the task's folders that links or tables in them name.
    """
    task, folder = entry.task, entry.folder
    if entry.problem:
        raise TaskError(entry.problem)
    if folder is None:
        raise TaskError(f"There is no data for {task.key}: no folder such as {official_folder(task.key)} exists.")
    with reading(folder):
        facts = {path: file_facts(path) for _, path in entry.files()}
        if entry.own is not None:
            data = open_own(entry.own, folder, images=entry.images)
        elif is_webdataset(folder):
            data = open_webdataset(folder, task, blank_class=blank_class)
        elif task.protocol == "classification":
            raise TaskError(f"{folder} has no supported layout for {task.key}: expected test/nshards.txt and tars.")
        else:
            retrieval = task.protocol == "retrieval"
            table = find_table(folder, csv_columns=() if retrieval else WINOGAVIL)
            check_split(table, "test")
            data = (retrieval_rows if retrieval else association_rows)(table, folder)
        places = [folder if folder.is_dir() else folder.parent, *filter(None, [entry.images])]
        if data.layout == "datasets cache":  # CACHE/owner___name/config/version/digest/*.arrow
            places += [cache / "downloads" for cache in data.files[0].absolute().parents[4:5]]
        if folder.parent.name == "snapshots":  # of the hub's cache, whose files are links to those in blobs/
            places.append(folder.parent.parent)
        if not allow_outside:
            check_inside(data.files, places)
        data = replace(data, facts={path: facts.get(path) or file_facts(path) for path in data.files})
    for what in COUNTS:
        wanted, count = entry.expected.get(what), data.counts.get(what, 0)
        if wanted is not None and count != wanted:
            raise TaskError(
                f"{task.key}: {folder} has {count:,} {what}, but {wanted:,} are expected. A score over "
                "other data would not be this task's score: fetch the data again. To score the data as it is, give the "
                "folder itself as --suite, and remove a suite.json in it that records other data."
            )
    return data


def read_fetched(folder: Path) -> dict[str, dict[str, Any]]:
    """What `neuclip evalsets` has fetched into a folder, by task: repository, commit, samples and files.

    Raises:
        UserError: The record is damaged.
    """
    path = folder / FETCHED_NAME
    try:
        fetched = dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
        for facts in fetched.values():
            if not {"repo", "commit", "samples"} <= set(facts) or not all(f["sha256"] for f in facts["files"].values()):
                raise ValueError("it is not a record of fetched sets")
        return fetched
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Move it away and run `neuclip evalsets {folder}` again: files that agree "
            "with the source are not fetched again, but sets that were updated since come in their newest state."
        ) from error


def read_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Counts (`samples`, `classes`, ...) and digests (`sha256`, by file) that a suite's tasks must have, by task.

    They are in `suite.json`, and in `evalsets.json` of sets that were fetched.

    Raises:
        UserError: A file is damaged.
    """
    facts = {
        key: {"samples": entry["samples"], "sha256": {name: f["sha256"] for name, f in entry["files"].items()}}
        for key, entry in read_fetched(folder).items()
    }
    path = folder / FACTS_NAME
    try:
        recorded = dict(json.loads(path.read_text(encoding="utf-8"))["tasks"]) if path.is_file() else {}
        for key, task in recorded.items():
            wrong = [name for name in COUNTS if type(task.get(name, 0)) is not int]
            others = task.keys() - {*COUNTS, "sha256"}  # for readers of the file, but a misspelt count checks nothing
            wrong += [name for name in others if difflib.get_close_matches(name, (*COUNTS, "sha256"), cutoff=0.75)]
            if wrong or not all(isinstance(digest, str) for digest in task.get("sha256", {}).values()):
                raise ValueError(f"{key}: allowed are {', '.join(COUNTS)} (whole numbers) and sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        shown = plain(repr(error), longest=200)
        raise UserError(f"{path} is damaged ({shown}): make or fetch the suite again.") from error
    return facts | recorded


def _entries(folder: Path, *, official: bool) -> list[Entry]:
    """The benchmark's tasks; or those that exist, own ones in its layout, and those of tasks.yaml and suite.json."""
    names, facts = spellings(folder), read_facts(folder)
    entries, taken, own = [], set[Path](), dict[str, list[Path]]()
    for task in DATACOMP:
        folders, expected = find_folders(task, names), facts.get(task.key, {})
        if official:
            counts = {"samples": task.samples, **({"classes": task.classes} if task.classes else {})}
            expected = {**counts, **{name: digests for name, digests in expected.items() if name == "sha256"}}
        if official or folders or task.key in facts:
            entries.append(_entry(task, folders, expected))
        taken.update(folders)
    if official:
        return entries
    by_stem = {key.replace("/", "-"): key for key in facts}
    for path in sorted(path for path in names if path not in taken and is_webdataset(path)):
        stem = path.name.removeprefix("wds_").removesuffix("_test")
        own.setdefault(by_stem.get(stem, stem), []).append(path)
    for key, paths in own.items():  # which kind they are of is read from the folder
        task = Task(key, key)
        if is_retrieval(paths[0]):
            task = Task(key, key, protocol="retrieval", main_metric="mean_recall@1")
        entries.append(_entry(task, paths, facts.get(key, {})))
    if (folder / TASKS_NAME).is_file():
        entries += _described(folder / TASKS_NAME, facts)
    keys = {entry.task.key for entry in entries}
    return entries + [Entry(Task(key, key), None, facts[key]) for key in facts if key not in keys]


def _entry(task: Task, folders: Sequence[Path], expected: Mapping[str, Any]) -> Entry:
    problem, names = "", " and ".join(map(str, folders[:4]))
    if len(folders) > 1:
        problem = f"{task.key} has {len(folders)} folders: {names}. Which one counts? Remove or rename the others."
    return Entry(task, folders[0] if folders else None, expected, problem=problem)


def _described(path: Path, facts: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    """The tasks of a `tasks.yaml`."""
    entries, base = [], path.parent
    for key, own in read_own_tasks(path).items():
        metric = own.metric or PROTOCOLS[own.scored_by].scores[0]
        task = Task(key, own.name or key, protocol=own.scored_by, main_metric=metric)
        images = base / own.images if own.images else None
        entries.append(Entry(task, place_of(own, base), facts.get(key, {}), own=own, images=images))
    return entries
