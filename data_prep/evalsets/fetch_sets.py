"""Fetch the evaluation sets from the hub or a local mirror, and verify every digest and count.

The fetched files are recorded in `evalsets.json` beside the sets: repository, commit, size and SHA-256 of every file.
Later calls use the same commits and fetch only what is missing or damaged; checking needs no network at all. What any
other suite must contain can be recorded in `suite.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.evalsets.set_sources import HUB_SETS, HubSet, differing_files, fetch_from_hub, fetch_from_mirror
from pipeline.config import suggest
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.datasets.task_data import FACTS_NAME, check_digests, file_digests
from pipeline.files import write_json

LOCK_NAME = "evalsets.json"
Lock = dict[str, dict[str, Any]]


@dataclass
class FetchOutcome:
    """Outcome of each set."""

    good: dict[str, int] = field(default_factory=dict)
    """Number of samples, by key."""
    problems: dict[str, str] = field(default_factory=dict)
    """Error messages, by key."""


def fetch_evalsets(
    root: str | Path,
    keys: Iterable[str] = (),
    *,
    mirror: Path | None = None,
    endpoint: str | None = None,
    on_note: Callable[[str], None] = lambda note: None,
) -> FetchOutcome:
    """Bring evaluation sets into a folder and verify them; one bad set does not stop the others.

    Args:
        root: The folder, one folder per set.
        keys: Which sets; by default all 38.
        mirror: A folder of the sets, in any layout that the evaluation reads; without it, they come from the hub.
        endpoint: Another hub with the same interface.
        on_note: Called with a line per set.

    Raises:
        UserError: A key is unknown, or the mirror does not exist.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    if mirror is not None and not mirror.is_dir():
        raise UserError(f"The mirror {mirror} is not a folder.")
    lock, outcome = read_lock(root), FetchOutcome()
    mirrored = read_lock(mirror) if mirror else {}
    for chosen in choose(keys):
        try:
            if mirror is not None:
                entry = fetch_from_mirror(chosen, root / chosen.folder, mirror, mirrored.get(chosen.key))
            else:
                entry = fetch_from_hub(chosen, root / chosen.folder, endpoint, lock.get(chosen.key))
            outcome.good[chosen.key] = entry["samples"] = count(chosen, root / chosen.folder)
            # Read again: another process may have fetched other sets in the meantime.
            lock = {**read_lock(root), chosen.key: entry}
            write_json(root / LOCK_NAME, lock)
        except (UserError, OSError, ValueError) as error:
            outcome.problems[chosen.key] = str(error)
        on_note(f"{chosen.key}: {outcome.problems.get(chosen.key) or 'verified'}")
    return outcome


def check_evalsets(root: str | Path, keys: Iterable[str] = ()) -> FetchOutcome:
    """Verify sets that were fetched before against `evalsets.json`, without network."""
    root = Path(root)
    lock, outcome = read_lock(root), FetchOutcome()
    for chosen in choose(keys):
        if chosen.key not in lock:
            outcome.problems[chosen.key] = "was never fetched"
            continue
        wrong = differing_files(root / chosen.folder, lock[chosen.key]["files"])
        if wrong:
            outcome.problems[chosen.key] = f"{', '.join(wrong[:3])} differ from what was fetched"
            continue
        try:
            outcome.good[chosen.key] = count(chosen, root / chosen.folder)
        except (UserError, OSError, ValueError) as error:
            outcome.problems[chosen.key] = str(error)
    return outcome


def choose(keys: Iterable[str]) -> list[HubSet]:
    """The sets with these keys, or all sets.

    Raises:
        UserError: A key is unknown; the message names the nearest one.
    """
    keys = list(keys) or list(HUB_SETS)
    for key in keys:
        if key not in HUB_SETS:
            raise UserError(f"There is no evaluation set {key!r}. {suggest(key, tuple(HUB_SETS))}")
    return [HUB_SETS[key] for key in keys]


def read_lock(root: Path) -> Lock:
    """What was fetched into a folder before.

    Raises:
        UserError: The record is damaged.
    """
    path = root / LOCK_NAME
    try:
        lock: Lock = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if not all(isinstance(facts["files"], dict) and {"repo", "commit"} <= set(facts) for facts in lock.values()):
            raise ValueError("it is not a record of fetched sets")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Move it away and run `neuclip evalsets {root}` again: files that agree with "
            "the source are not fetched again, but sets that were updated since come in their newest state."
        ) from error
    return lock


def count(chosen: HubSet, folder: Path) -> int:
    """The samples of a set, counted by the evaluation's own reader.

    Raises:
        UserError: The set is partial or damaged, or has other counts than the benchmark.
    """
    expected = {"samples": chosen.task.samples, "classes": chosen.task.classes}
    return open_task(Entry(chosen.task, folder, expected)).samples


def record_suite(folder: Path, *, on_note: Callable[[str], None] = lambda note: None) -> dict[str, str]:
    """Write counts and SHA-256 of every task's files to FOLDER/suite.json; check what is already recorded.

    Returns:
        What is wrong, by task; such tasks are not recorded anew.

    Raises:
        UserError: There is no suite in the folder.
    """
    suite, problems = open_suite(folder), {}
    path = suite.folder / FACTS_NAME
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tasks: dict[str, Any] = dict(tree.get("tasks", {}))
    for entry in suite.entries:
        key = entry.task.key
        try:
            tasks[key] = {**tasks.get(key, {}), **_facts(entry)}
        except UserError as error:
            problems[key] = str(error)
        recorded = tasks.get(key, {}).get("samples", 0)
        on_note(f"{key}: {problems.get(key) or f'{recorded:,} samples recorded'}")
    write_json(path, {**tree, "tasks": tasks})
    return problems


def _facts(entry: Entry) -> dict[str, Any]:
    data = open_task(entry)
    files = file_digests(data.files, data.folder)
    expected = entry.expected.get("sha256", {})
    check_digests(entry.task.key, files, expected, folder=entry.folder, written="was recorded with the data")
    return {**data.counts, "sha256": dict(sorted(files.items()))}
