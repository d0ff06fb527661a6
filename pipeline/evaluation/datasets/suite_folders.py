"""Which folder holds which task: by the benchmark's names, and by those that people and download tools give."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.evaluation.datasets.task import Task, folder_names
from pipeline.evaluation.datasets.webdataset import is_webdataset

TABLE_FILES = ("state.json", "dataset_dict.json", "*.arrow", "*.parquet", "*.csv")
Index = Mapping[str, list[Path]]


def index_folders(folder: Path) -> Index:
    """Normalised name -> folders, for the suite itself, its folders and those one level deeper."""
    found: dict[str, list[Path]] = {}
    tops = _folders(folder)
    for path in (folder, *tops, *(deep for top in tops for deep in _folders(top))):
        for name in {_normal(path.name), _normal(path.relative_to(folder).as_posix())}:
            found.setdefault(name, []).append(path)
    return found


def find_folders(task: Task, index: Index) -> list[Path]:
    """Every folder that holds the task; folders without data count only if there is no other."""
    named = [path for name in map(_normal, folder_names(task)) for path in index.get(name, ())]
    if task.protocol != "classification":
        # Hub downloads carry their owner's name in front: nlphuji___winogavil, datasets--nlphuji--winogavil.
        ending = "-" + _normal(task.key.split("/", 1)[-1])
        named += [path for name, paths in sorted(index.items()) if name.endswith(ending) for path in paths]
    distinct = list(dict.fromkeys(named))
    filled = [path for path in distinct if _has_data(task, path)]
    # A folder that contains another one is not a second copy: /data/winogavil/wds_misc-winogavil_test.
    return [path for path in filled if not any(path in other.parents for other in filled)] or distinct[:1]


def own_folders(index: Index, taken: Iterable[Path]) -> list[Path]:
    """Folders in the benchmark's layout that are none of its tasks, in the order of their paths."""
    return sorted(path for path in {p for paths in index.values() for p in paths} - set(taken) if is_webdataset(path))


def _has_data(task: Task, path: Path) -> bool:
    if is_webdataset(path):
        return True
    if task.protocol == "classification":
        return False
    return any(next(path.rglob(pattern), None) is not None for pattern in TABLE_FILES)


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except PermissionError:
        return []


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
