"""Fetch the evaluation sets from the hub or a local mirror, and verify every digest and count.

The fetched files are recorded in `evalsets.json` beside the sets: repository, commit, size and SHA-256 of every file.
Later calls use the same commits and fetch only what is missing or damaged; checking needs no network at all. What any
other suite must contain can be recorded in `suite.json`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.config import suggest
from pipeline.errors import UserError, in_a_line
from pipeline.evaluation.datasets.datacomp import DATACOMP, Task, official_folder
from pipeline.evaluation.datasets.suite import Entry, find_folders, index_folders, open_suite, open_task
from pipeline.evaluation.datasets.task_data import FACTS_NAME, check_digests, file_digests, relative_name
from pipeline.files import path_below, replacing, sha256_of, write_json

LOCK_NAME = "evalsets.json"
Lock = dict[str, dict[str, Any]]
Files = Mapping[str, Mapping[str, Any]]
"""Size (`bytes`) and `sha256` of files, by name within a set's folder."""


@dataclass(frozen=True)
class HubSet:
    """One task's data on the hub."""

    task: Task
    repo: str
    patterns: tuple[str, ...] = ("*.txt", "*.tar")
    """The files of the repository that belong to the task."""
    revision: str = "main"
    """The branch whose newest commit is fetched when no commit has been recorded yet."""

    @property
    def key(self) -> str:
        return self.task.key

    @property
    def folder(self) -> str:
        """The folder's name below the suite's."""
        return official_folder(self.key)


def _published(task: Task) -> HubSet:
    if task.protocol == "retrieval":
        # The hub's own conversion: the repository itself holds a loading script, which `datasets` no longer runs.
        name = task.key.removeprefix("retrieval/")
        return HubSet(task, f"nlphuji/{name}", patterns=("*.parquet",), revision="refs/convert/parquet")
    if task.protocol == "association":
        return HubSet(task, "nlphuji/winogavil", patterns=("*.csv", "*.zip"))
    return HubSet(task, f"djghosh/{official_folder(task.key)}")


HUB_SETS: dict[str, HubSet] = {task.key: _published(task) for task in DATACOMP}


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
    on_note: Callable[[str], None] = lambda note: None,
) -> FetchOutcome:
    """Bring evaluation sets into a folder and verify them; one bad set does not stop the others.

    Args:
        root: The folder, one folder per set.
        keys: Which sets; by default all 38.
        mirror: A folder of the sets, in any layout that the evaluation reads; without it, they come from the hub.
        on_note: Called with a line per set.

    Raises:
        UserError: A key is unknown, the mirror does not exist, or `evalsets.json` is damaged.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    if mirror is not None and not mirror.is_dir():
        raise UserError(f"The mirror {mirror} is not a folder.")
    lock, mirrored = read_lock(root), read_lock(mirror) if mirror else {}

    def fetch(chosen: HubSet) -> int:
        if mirror is not None:
            entry = _fetch_from_mirror(chosen, root / chosen.folder, mirror, mirrored.get(chosen.key))
        else:
            entry = _fetch_from_hub(chosen, root / chosen.folder, lock.get(chosen.key))
        entry["samples"] = count(chosen, root / chosen.folder)
        # Read again: another process may have fetched other sets in the meantime.
        write_json(root / LOCK_NAME, {**read_lock(root), chosen.key: entry})
        return int(entry["samples"])

    return _each(keys, fetch, on_note)


def check_evalsets(root: str | Path, keys: Iterable[str] = ()) -> FetchOutcome:
    """Verify sets that were fetched before against `evalsets.json`, without network."""
    lock = read_lock(Path(root))

    def check(chosen: HubSet) -> int:
        if chosen.key not in lock:
            raise UserError("was never fetched")
        folder = Path(root, chosen.folder)
        if wrong := _differing_files(folder, lock[chosen.key]["files"]):
            raise UserError(f"{', '.join(wrong[:3])} differ from what was fetched")
        return count(chosen, folder)

    return _each(keys, check)


def _each(
    keys: Iterable[str], work: Callable[[HubSet], int], on_note: Callable[[str], None] = lambda note: None
) -> FetchOutcome:
    """Do some work for the sets with these keys, or for all."""
    outcome, keys = FetchOutcome(), list(keys) or list(HUB_SETS)
    if unknown := [key for key in keys if key not in HUB_SETS]:
        raise UserError(f"There is no evaluation set {unknown[0]!r}. {suggest(unknown[0], tuple(HUB_SETS))}")
    for key in keys:
        try:
            outcome.good[key] = work(HUB_SETS[key])
        except (UserError, OSError, ValueError) as error:
            outcome.problems[key] = str(error)
        on_note(f"{key}: {outcome.problems.get(key) or 'verified'}")
    return outcome


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


def _fetch_from_mirror(chosen: HubSet, target: Path, mirror: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Copy a set from a folder that holds it in any layout that the evaluation reads.

    `mirror` is a folder of `neuclip evalsets`, of the benchmark's download_evalsets.py (with its `hf_cache/`), or of
    copies under other common names; `known` is what its own evalsets.json says about the set.

    Returns:
        The set's entry for evalsets.json.

    Raises:
        UserError: The mirror does not hold the set, holds it twice or damaged, or the copy is not faithful.
    """
    folders = find_folders(chosen.task, index_folders(mirror))
    if len(folders) != 1:
        found = " and ".join(map(str, folders)) or f"none (such as {chosen.folder})"
        raise UserError(f"The mirror must hold one folder of {chosen.key}, but holds {found}.")
    if known is not None and (wrong := _differing_files(folders[0], known["files"])):
        raise UserError(f"The mirror's {', '.join(wrong[:3])} differ from its own evalsets.json.")
    data = open_task(Entry(chosen.task, folders[0]))
    files: dict[str, dict[str, Any]] = {}
    for path in data.files:
        name = relative_name(path, data.folder)
        if name.startswith("../") and "downloads/" in name:  # images of a `datasets` cache, outside the table's folder
            name = name[name.index("downloads/") :]
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        if _differing_files(target, {name: files[name]}):
            with replacing(target / name) as temporary:
                shutil.copyfile(path, temporary)
    if wrong := _differing_files(target, files):
        raise UserError(f"{', '.join(wrong[:3])} were not copied faithfully: is the disk full or failing?")
    facts = known or {"repo": f"mirror {mirror}", "commit": None}
    return {"repo": facts["repo"], "commit": facts["commit"], "files": dict(sorted(files.items()))}


def _fetch_from_hub(chosen: HubSet, target: Path, known: dict[str, Any] | None) -> dict[str, Any]:
    """Fetch what is missing or damaged of a set into `target`.

    Returns:
        The set's entry for evalsets.json; `known`, that of an earlier call, has the commit that is fetched again.

    Raises:
        UserError: The hub cannot be reached, does not have the set, or sends other bytes than it states.
    """
    from huggingface_hub import HfApi, snapshot_download

    api = HfApi()
    pinned = known["commit"] if known and known["repo"] == chosen.repo else None
    try:
        commit = pinned or api.repo_info(chosen.repo, repo_type="dataset", revision=chosen.revision).sha
        tree = api.list_repo_tree(chosen.repo, recursive=True, revision=commit, repo_type="dataset")
        published = {item.path: item for item in tree if hasattr(item, "size")}
        names = sorted(n for n in published if any(fnmatch(n, p) for p in chosen.patterns) and not n.startswith("."))
        if not names:
            raise UserError(f"{chosen.folder} has none of the files {', '.join(chosen.patterns)}.")
        # The hub's client trusts existing files, so damaged ones are removed first.
        for name in names:
            path = path_below(target, name, what=f"A file of {chosen.repo}")
            if path.exists() and not _is_published(path, published[name]):
                path.unlink()
        snapshot_download(chosen.repo, repo_type="dataset", revision=commit, local_dir=target, allow_patterns=names)
    except UserError:
        raise
    except Exception as error:  # the hub's client raises its own exceptions and those of its HTTP library
        raise UserError(f"{chosen.repo} cannot be fetched: {in_a_line(error)}") from error
    if wrong := [name for name in names if not _is_published(target / name, published[name])]:
        raise UserError(f"{', '.join(wrong[:3])} of {chosen.repo} arrived with a wrong digest: try again.")
    files = {n: {"bytes": (target / n).stat().st_size, "sha256": sha256_of(target / n)} for n in names}
    return {"repo": chosen.repo, "commit": commit, "files": files}


def _is_published(path: Path, published: Any) -> bool:
    """Whether a file has the size and the digest that the hub states: SHA-256 of large files, git's of small ones."""
    if not path.exists() or path.stat().st_size != published.size:
        return False
    if published.lfs is not None:
        return sha256_of(path) == published.lfs.sha256
    body = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest() == published.blob_id


def _differing_files(folder: Path, files: Files) -> list[str]:
    """The names of files that are missing or differ from what is recorded."""

    def differs(name: str, facts: Mapping[str, Any]) -> bool:
        path = path_below(folder, name, what="A file of the set")
        return not path.exists() or path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]

    return [name for name, facts in files.items() if differs(name, facts)]


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
            data = open_task(entry)
            files, expected = file_digests(data.files, data.folder), entry.expected.get("sha256", {})
            check_digests(key, files, expected, folder=entry.folder, written="was recorded with the data")
            tasks[key] = {**tasks.get(key, {}), **data.counts, "sha256": dict(sorted(files.items()))}
        except UserError as error:
            problems[key] = str(error)
        recorded = tasks.get(key, {}).get("samples", 0)
        on_note(f"{key}: {problems.get(key) or f'{recorded:,} samples recorded'}")
    write_json(path, {**tree, "tasks": tasks})
    return problems
