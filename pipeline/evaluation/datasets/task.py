"""What a task is: its key, its protocol, its score, and the folder names under which its data is found."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One evaluation task."""

    key: str
    """Unique name, for example `vtab/pets`."""
    name: str
    """Name in tables and reports."""
    protocol: str = "classification"
    """The name of a registered protocol."""
    samples: int | None = None
    """Official number of samples; None when there is no official number."""
    classes: int | None = None
    """Official number of classes."""
    main_metric: str = "acc1"
    """The metric that is the task's score."""
    fields: tuple[str, ...] = ()
    """Columns of the `.npy` beside every image; further columns may follow."""
    group: str = ""
    """The column whose worst group is the score."""
    secondary_groups: tuple[str, ...] = ()
    """Further columns whose groups are reported."""
    folders: tuple[str, ...] = ()
    """Further folder names under which the data is found."""

    @property
    def stem(self) -> str:
        """The key as a file name; `/` and `-` stay apart, except in the benchmark's keys, which are distinct."""
        return re.sub(r"[^\w.+-]", "-", self.key.replace("/", "-" if self.samples is not None else "--"))


def official_folder(key: str) -> str:
    """The folder that the benchmark's own download script gives a task: `wds_vtab-pets_test` for `vtab/pets`."""
    return f"wds_{key.removeprefix('fairness/').replace('/', '-')}_test"


def folder_names(task: Task) -> tuple[str, ...]:
    """Every folder name under which a task's data is looked for, the benchmark's own first."""
    short = task.key.split("/", 1)[-1]
    official = task.key.removeprefix("fairness/").replace("/", "-")
    packed = [official_folder(task.key), *(f"wds_{name}_test" for name in (task.stem, short))]
    return tuple(dict.fromkeys([*packed, official, task.stem, short, task.key, *task.folders]))
