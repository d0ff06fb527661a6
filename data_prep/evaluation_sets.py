"""Fetch the evaluation sets from the hub, and verify every digest and count.

The fetched files are recorded in `evalsets.json` beside the sets: repository, commit, size and SHA-256 of every file.
Later calls use the same commits and fetch only what is missing or damaged; checking needs no network at all. What any
other suite must contain can be recorded in `suite.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.config import suggest
from pipeline.errors import UserError, in_a_line
from pipeline.evaluation.datasets.datacomp import DATACOMP, Task, official_folder
from pipeline.evaluation.datasets.suite import FETCHED_NAME, Entry, open_suite, open_task, read_fetched
from pipeline.evaluation.datasets.task_data import FACTS_NAME, check_digests, file_digests
from pipeline.files import path_below, sha256_of, write_json


@dataclass(frozen=True)
class HubSet:
    """One task's data on the hub."""

    task: Task
    repo: str
    patterns: tuple[str, ...] = ("*.txt", "*.tar")
    """The files of the repository that belong to the task."""
    revision: str = "main"
    """The branch whose newest commit is fetched when no commit has been recorded yet."""


def _published(task: Task) -> HubSet:
    if task.protocol == "retrieval":
        # The hub's own conversion: the repository itself holds a loading script, which `datasets` no longer runs.
        name = task.key.removeprefix("retrieval/")
        return HubSet(task, f"nlphuji/{name}", patterns=("*.parquet",), revision="refs/convert/parquet")
    if task.protocol == "association":
        return HubSet(task, "nlphuji/winogavil", patterns=("*.csv", "*.zip"))
    return HubSet(task, f"djghosh/{official_folder(task.key)}")


HUB_SETS: dict[str, HubSet] = {task.key: _published(task) for task in DATACOMP}


def fetch_evalsets(
    root: str | Path,
    keys: Iterable[str] = (),
    *,
    offline: bool = False,
    on_note: Callable[[str], None] = lambda note: None,
) -> tuple[dict[str, int], dict[str, str]]:
    """Bring evaluation sets into a folder and verify them; one bad set does not stop the others.

    Args:
        root: The folder, one folder per set.
        keys: Which sets; by default all 38.
        offline: Only verify what was fetched before against `evalsets.json`, without network.
        on_note: Called with a line per set.

    Returns:
        The numbers of samples of verified sets, and what is wrong with the others, by key.

    Raises:
        UserError: A key is unknown, or `evalsets.json` is damaged.
    """
    root, keys, samples, problems = Path(root), list(keys) or list(HUB_SETS), dict[str, int](), dict[str, str]()
    recorded = read_fetched(root)
    if unknown := [key for key in keys if key not in HUB_SETS]:
        raise UserError(f"There is no evaluation set {unknown[0]!r}. {suggest(unknown[0], tuple(HUB_SETS))}")
    for key in keys:
        chosen = HUB_SETS[key]
        folder, expected = root / official_folder(key), {"samples": chosen.task.samples, "classes": chosen.task.classes}
        try:
            entry = _check(folder, recorded.get(key)) if offline else _fetch(chosen, folder, recorded.get(key))
            # Counted by the evaluation's own reader.
            count = open_task(Entry(chosen.task, folder, expected)).samples
            if not offline:  # read again: another process may have fetched other sets in the meantime
                write_json(root / FETCHED_NAME, {**read_fetched(root), key: {**entry, "samples": count}})
            samples[key] = count
        except (UserError, OSError, ValueError) as error:
            problems[key] = str(error)
        on_note(f"{key}: {problems.get(key) or 'verified'}")
    return samples, problems


def _check(folder: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Compare a set with what was recorded when it was fetched, and return that."""
    if known is None:
        raise UserError("was never fetched")

    def differs(name: str, facts: Any) -> bool:
        path = path_below(folder, name, what="A file of the set")
        return not path.exists() or path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]

    if wrong := [name for name, facts in known["files"].items() if differs(name, facts)]:
        raise UserError(f"{', '.join(wrong[:3])} differ from what was fetched")
    return known


def _fetch(chosen: HubSet, target: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Fetch what is missing or damaged of a set into `target`.

    Returns:
        The set's entry for evalsets.json; `known`, that of an earlier call, has the commit that is fetched again.

    Raises:
        UserError: The hub cannot be reached, does not have the set, or sends other bytes than it states.
    """
    from huggingface_hub import HfApi, snapshot_download

    def belongs(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in chosen.patterns)

    api = HfApi()
    pinned = known["commit"] if known and known["repo"] == chosen.repo else None
    target.mkdir(parents=True, exist_ok=True)
    try:
        commit = pinned or api.repo_info(chosen.repo, repo_type="dataset", revision=chosen.revision).sha
        place: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "local_dir": target}
        # The hub's client trusts existing files, so damaged ones are removed first.
        for damaged in api.verify_repo_checksums(chosen.repo, **place).mismatches:
            (target / damaged["path"]).unlink()
        snapshot_download(chosen.repo, allow_patterns=list(chosen.patterns), **place)
        verified = api.verify_repo_checksums(chosen.repo, **place)
    except Exception as error:  # the hub's client raises its own exceptions and those of its HTTP library
        raise UserError(f"{chosen.repo} cannot be fetched: {in_a_line(error)}") from error
    wrong = [*(damaged["path"] for damaged in verified.mismatches), *filter(belongs, verified.missing_paths)]
    if wrong:
        raise UserError(f"{', '.join(wrong[:3])} of {chosen.repo} arrived with a wrong digest: try again.")
    paths = {path.relative_to(target).as_posix(): path for path in sorted(target.rglob("*")) if path.is_file()}
    names = [name for name in paths if belongs(name) and name not in verified.extra_paths and not name.startswith(".")]
    if not names:
        raise UserError(f"{target.name} has none of the files {', '.join(chosen.patterns)}.")
    files = {name: {"bytes": paths[name].stat().st_size, "sha256": sha256_of(paths[name])} for name in names}
    return {"repo": chosen.repo, "commit": commit, "files": files}


def record_suite(folder: Path, *, on_note: Callable[[str], None] = lambda note: None) -> dict[str, str]:
    """Write counts and SHA-256 of every task's files to FOLDER/suite.json; check what is already recorded.

    Returns:
        What is wrong, by task; such tasks are not recorded anew.

    Raises:
        UserError: There is no suite in the folder.
    """
    suite, problems = open_suite(folder, partial=True), {}
    path = suite.folder / FACTS_NAME
    tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    tasks: dict[str, Any] = dict(tree.get("tasks", {}))
    for entry in suite.entries:
        key = entry.task.key
        try:
            data = open_task(entry)
            files = file_digests(data.files, data.folder)
            check_digests(key, files, entry.expected.get("sha256", {}), folder=entry.folder)
            tasks[key] = {**tasks.get(key, {}), **data.counts, "sha256": dict(sorted(files.items()))}
        except UserError as error:
            problems[key] = str(error)
        recorded = tasks.get(key, {}).get("samples", 0)
        on_note(f"{key}: {problems.get(key) or f'{recorded:,} samples recorded'}")
    write_json(path, {**tree, "tasks": tasks})
    return problems
