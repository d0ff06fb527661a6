"""Where each of the benchmark's 38 evaluation sets is published. Sizes and class counts are the task table's."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.evaluation.datasets.datacomp import DATACOMP
from pipeline.evaluation.datasets.task import Task, official_folder


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
