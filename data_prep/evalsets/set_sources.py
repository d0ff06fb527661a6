"""Where the evaluation sets are published, and the files of one: from the hub at a recorded commit, or a local copy."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipeline.errors import UserError, in_a_line
from pipeline.evaluation.datasets.datacomp import DATACOMP, Task, official_folder
from pipeline.evaluation.datasets.suite import Entry, find_folders, index_folders, open_task
from pipeline.evaluation.datasets.task_data import relative_name
from pipeline.files import path_below, replacing, sha256_of

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


def fetch_from_mirror(chosen: HubSet, target: Path, mirror: Path, known: dict[str, Any] | None) -> dict[str, Any]:
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
    if known is not None:
        wrong = differing_files(folders[0], known["files"])
        if wrong:
            raise UserError(f"The mirror's {', '.join(wrong[:3])} differ from its own evalsets.json.")
    data = open_task(Entry(chosen.task, folders[0]))
    files: dict[str, dict[str, Any]] = {}
    for path in data.files:
        name = _name_in_copy(path, data.folder)
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        if differing_files(target, {name: files[name]}):
            with replacing(target / name) as temporary:
                shutil.copyfile(path, temporary)
    wrong = differing_files(target, files)
    if wrong:
        raise UserError(f"{', '.join(wrong[:3])} were not copied faithfully: is the disk full or failing?")
    facts = known or {"repo": f"mirror {mirror}", "commit": None}
    return {"repo": facts["repo"], "commit": facts["commit"], "files": dict(sorted(files.items()))}


def _name_in_copy(path: Path, folder: Path) -> str:
    """A file's name in the copy. Images of a `datasets` cache are outside the table's folder, below `downloads/`."""
    name = relative_name(path, folder)
    return name[name.index("downloads/") :] if name.startswith("../") and "downloads/" in name else name


def fetch_from_hub(chosen: HubSet, target: Path, endpoint: str | None, known: dict[str, Any] | None) -> dict[str, Any]:
    """Fetch what is missing or damaged of a set into `target`, from the hub or another one with the same interface.

    Returns:
        The set's entry for evalsets.json; `known`, that of an earlier call, has the commit that is fetched again.

    Raises:
        UserError: The hub cannot be reached, does not have the set, or sends other bytes than it states.
    """
    from huggingface_hub import HfApi, snapshot_download

    api = HfApi(endpoint=endpoint)
    pinned = known["commit"] if known and known["repo"] == chosen.repo else None
    try:
        commit = pinned or api.repo_info(chosen.repo, repo_type="dataset", revision=chosen.revision).sha
        tree = api.list_repo_tree(chosen.repo, recursive=True, revision=commit, repo_type="dataset")
        published = {item.path: item for item in tree if hasattr(item, "size")}
        names = _wanted(chosen, list(published))
        # The hub's client trusts existing files, so damaged ones are removed first.
        for name in names:
            path = path_below(target, name, what=f"A file of {chosen.repo}")
            if path.exists() and not _is_published(path, published[name]):
                path.unlink()
        snapshot_download(
            chosen.repo,
            repo_type="dataset",
            revision=commit,
            allow_patterns=names,
            local_dir=target,
            endpoint=endpoint,
        )
    except UserError:
        raise
    except Exception as error:  # the hub's client raises its own exceptions and those of its HTTP library
        raise UserError(f"{chosen.repo} cannot be fetched: {in_a_line(error)}") from error
    wrong = [name for name in names if not _is_published(target / name, published[name])]
    if wrong:
        raise UserError(f"{', '.join(wrong[:3])} of {chosen.repo} arrived with a wrong digest: try again.")
    files = {n: {"bytes": (target / n).stat().st_size, "sha256": sha256_of(target / n)} for n in names}
    return {"repo": chosen.repo, "commit": commit, "files": files}


def _wanted(chosen: HubSet, names: list[str]) -> list[str]:
    found = sorted(n for n in names if any(fnmatch(n, p) for p in chosen.patterns) and not n.startswith("."))
    if not found:
        raise UserError(f"{chosen.folder} has none of the files {', '.join(chosen.patterns)}.")
    return found


def _is_published(path: Path, published: Any) -> bool:
    """Whether a file has the size and the digest that the hub states: SHA-256 of large files, git's of small ones."""
    if not path.exists() or path.stat().st_size != published.size:
        return False
    if published.lfs is not None:
        return sha256_of(path) == published.lfs.sha256
    body = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest() == published.blob_id


def differing_files(folder: Path, files: Files) -> list[str]:
    """The names of files that are missing or differ from what is recorded."""

    def differs(name: str, facts: Mapping[str, Any]) -> bool:
        path = path_below(folder, name, what="A file of the set")
        return not path.exists() or path.stat().st_size != facts["bytes"] or sha256_of(path) != facts["sha256"]

    return [name for name, facts in files.items() if differs(name, facts)]
