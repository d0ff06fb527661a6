"""Custom tasks: a folder of class folders, a CSV, or a Hugging Face data set, described in a few lines of YAML.

`docs/evaluation.md` has an example; paths are relative to the YAML file.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from pipeline.config import parse, read_yaml, section
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.open_tables import find_table, open_csv
from pipeline.evaluation.datasets.rows import check_repeated, check_split, column_of, retrieval_rows
from pipeline.evaluation.datasets.tables import Table, as_text, parsed_list
from pipeline.evaluation.datasets.task_data import StoredImages, TaskData, TaskError, files_below, plain
from pipeline.evaluation.protocol import PROTOCOLS
from pipeline.files import new_folder
from pipeline.pictures import FORMAT_SUFFIXES

TASKS_NAME = "tasks.yaml"
HUB = ".hub"
"""Beside a `tasks.yaml`: what was fetched from the hub."""
KEY = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*$")
TEMPLATES = ("a photo of a {c}.",)
MOST_CLASSES = 1_000_000


@section
class OwnTask:
    """One task of a `tasks.yaml`: where its data is (`folder`, `csv` or `dataset`), and how it is scored."""

    name: str = ""
    """Name in tables and reports; by default the task's key."""
    folder: str | None = None
    """A folder with one folder of images per class."""
    csv: str | None = None
    """A CSV with one image per row, named in the column `image`."""
    dataset: str | None = None
    """A `save_to_disk` folder, a folder of parquet files, or a data set on the hub (owner/name, its parquet files)."""
    images: str | None = None
    """With `csv`: the folder that image names are relative to; by default the CSV's own."""
    image: str = "image"
    """The column of images."""
    caption: str | None = None
    """The column of captions: makes it a retrieval task. Rows with the same image are captions of one image."""
    label: str | None = None
    """The column of labels, numbers or names: makes it a classification task."""
    split: str = "test"
    """Which split of a `dataset`. A column `split` of a table must say the same in every row."""
    revision: str | None = None
    """With `dataset` on the hub: the commit, tag or branch."""
    classnames: dict[str, str] | list[str] | None = None
    """Names for the prompts: by class folder or label, or a list in the order of the labels (class folders: sorted)."""
    templates: list[str] = Field(default_factory=lambda: list(TEMPLATES), min_length=1)
    """Prompts, each with `{c}` for the class name."""
    prompts: dict[str, list[str]] | None = None
    """Prompts of every class instead of `templates`, by class folder, label or class name: whole texts, any number."""
    protocol: str | None = None
    """How it is scored: retrieval with `caption`, else classification, or a protocol of your own."""
    metric: str | None = None
    """The score: acc1 (default), acc5, mean_per_class_recall or F1-macro_all; for captions mean_recall@1 (default),
    or image_retrieval_recall@K or text_retrieval_recall@K with K 1, 5 or 10."""

    @property
    def scored_by(self) -> str:
        return self.protocol or ("retrieval" if self.caption else "classification")


def read_own_tasks(path: Path) -> dict[str, OwnTask]:
    """Read the tasks of a YAML file, by key.

    Raises:
        UserError: A task is invalid; the message names it and says what is wrong.
    """
    tasks = {}
    for key, tree in read_yaml(path).items():
        try:
            tasks[str(key)] = _own_task(str(key), tree)
        except UserError as error:
            raise UserError(f"{path}: the task {key!r}: {error}") from error
    if not tasks:
        raise UserError(f"{path} describes no task.")
    return tasks


def _own_task(key: str, tree: Any) -> OwnTask:
    if not KEY.match(key):
        raise UserError("a key is made of letters, digits, '-', '_' and '.', in parts divided by '/'.")
    if key in TASKS:
        raise UserError("it has the key of a task of the benchmark: choose another.")
    if not isinstance(tree, Mapping):
        raise UserError(f"it must be a mapping such as {{folder: photos}}, but is {tree!r}.")
    own = parse(OwnTask, tree, prefix=key)
    columns = bool(own.caption) + bool(own.label)
    if sum(map(bool, (own.folder, own.csv, own.dataset))) != 1 or columns != (not own.folder):
        raise UserError(
            "it needs exactly one of folder, csv and dataset; and with csv or dataset either caption (retrieval) or "
            "label (classification), the name of a column. The labels of a folder are the names of its folders."
        )
    if own.prompts is not None and ("templates" in tree or own.caption):
        raise UserError("prompts are for classes, instead of templates: it has both, or a caption.")
    if wrong := [template for template in own.templates if "{c}" not in template]:
        raise UserError(f"the template {wrong[0]!r} needs {{c}} where the class name goes.")
    protocol, rows = PROTOCOLS[own.scored_by], "captions" if own.caption else "labels"
    if protocol.rows != rows:
        raise UserError(f"the protocol {own.scored_by} scores {protocol.rows}, but the task has {rows}.")
    if own.metric is not None and own.metric not in protocol.scores:
        raise UserError(f"metric = {own.metric!r} is not known. Allowed: {', '.join(protocol.scores)}.")
    return own


def place_of(own: OwnTask, base: Path) -> Path:
    """The folder or file that the data is in, or is fetched to."""
    given = own.folder or own.csv or own.dataset or ""
    if own.dataset and not (base / given).exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", given):
        return base / HUB / given.replace("/", "--")
    return base / given


def open_own(own: OwnTask, place: Path, *, images: Path | None) -> TaskData:
    """Open a custom task; `images` is the folder that the names in a CSV are relative to, by default its own."""
    if own.folder:
        return _class_folders(own, place)
    if own.csv:
        table = open_csv(place, images=images or place.parent, column=own.image)
    else:
        if place.parent.name == HUB and not place.is_dir():
            _fetch(own, place)
        table = find_table(place, split=own.split)
    folder = place.parent if own.csv else place
    check_split(table, own.split)
    if own.caption:
        return replace(retrieval_rows(table, folder, columns=(own.image, own.caption)), on_background=True)
    return _labelled_rows(table, folder, own)


def _class_folders(own: OwnTask, folder: Path) -> TaskData:
    """Open one folder per class, in sorted order; files that are not images are refused rather than skipped."""

    def is_image(path: Path) -> bool:
        return path.suffix.lower().removeprefix(".") in FORMAT_SUFFIXES

    entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    classes = [path for path in entries if path.is_dir()]
    loose = [path.name for path in entries if is_image(path) and not path.is_dir()]
    if loose or not classes:
        what = f"{loose[0]} beside its folders of classes" if loose else "no folders of classes"
        raise TaskError(f"{folder} holds {what}: expected {folder.name}/CLASS/IMAGE.jpg.")
    labels, first, real_folder = list[int](), dict[str, Path](), functools.cache(os.path.realpath)
    for label, class_folder in enumerate(classes):
        files = files_below(class_folder)
        strange = [path.name for path in files if not (is_image(path) and path.is_file())]
        if strange or not files:
            what = f"{strange[0]}, which is not an image, or a link to nothing" if strange else "no image"
            raise TaskError(f"{class_folder} holds {what} ({', '.join(FORMAT_SUFFIXES)}): give images only.")
        for path in files:
            real = os.path.realpath(path) if path.is_symlink() else os.path.join(real_folder(path.parent), path.name)
            if (other := first.setdefault(real, path)) is not path:
                raise TaskError(f"{path} and {other} are one file, and an image counts once, in one class: remove one.")
        labels += [label] * len(files)
    images = StoredImages([(path, str(path)) for path in first.values()])
    data = TaskData(folder, "class folders", images, images.files)
    return _classified(data, own, [path.name for path in classes], labels)


def _labelled_rows(table: Table, folder: Path, own: OwnTask) -> TaskData:
    """A classification task: one image and one label in every row. Labels are numbers, or names of classes."""
    column, label = column_of(table, own.image), column_of(table, own.label or "")
    values = [as_label(value, where=table.row_name(row)) for row, value in enumerate(table.values(label))]
    if "" in values:
        raise TaskError(f"{table.row_name(values.index(''))} has no {label}.")
    stored = table.class_names(label)
    classes, labels = number_labels(values, stored=stored, where=lambda row: f"{table.row_name(row)}, column {label}")
    images = table.pictures(column)
    check_repeated(images, labels, one_label=True)
    data = TaskData(folder, table.layout, images, (*table.files, *images.files), columns=(column, label))
    return _classified(data, own, classes, labels, stored=stored)


def _fetch(own: OwnTask, place: Path) -> None:
    """Download a data set's parquet files from the hub."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"repo_type": "dataset", "revision": own.revision, "allow_patterns": ["*.parquet"]}
    with new_folder(place) as partial:
        try:
            snapshot_download(own.dataset or "", local_dir=partial, **options)
        except Exception as error:  # the hub's client raises its own exceptions and those of its HTTP library
            raise TaskError(
                f"{own.dataset} cannot be fetched from the hub ({plain(error)}): is the name right and the hub "
                "reachable? A copy on this machine is read with dataset: FOLDER."
            ) from error
        if not any(partial.rglob("*.parquet")):
            raise TaskError(f"{own.dataset} has no parquet files on the hub; try revision: refs/convert/parquet.")


def as_label(value: Any, *, where: str) -> str:
    """A label as text; whole numbers that are stored with a fraction are written without it, and NaN is none."""
    in_brackets = isinstance(value, str) and value.strip().startswith("[")
    if isinstance(value, list) or (in_brackets and parsed_list(value) is not None):
        raise TaskError(
            f"{where} has the labels {plain(value, longest=60)}, and a classification task has one per image: keep the "
            "one that counts, or give the row away. To search by several labels, join them as captions (caption)."
        )
    if isinstance(value, float):
        value = "" if math.isnan(value) else int(value) if value.is_integer() else value
    text = str(value) if isinstance(value, int | float | Decimal) else as_text(value, where=where)
    return re.sub(r"^(-?[0-9]+)\.0+$", r"\1", text.strip())


def number_labels(
    values: Sequence[str], *, stored: Sequence[str], where: Callable[[int], str]
) -> tuple[list[str], list[int]]:
    """Every label there is, 0 to the highest number or the distinct names, and which of them each row has.

    `stored` are the names that the data set has for its labels, if any.
    """
    strange = [row for row, value in enumerate(values) if not re.fullmatch(r"-?[0-9]+", value)]
    if strange and not stored:
        if len(strange) < len(values) and all(_is_number(values[row]) for row in strange):
            shown = plain(values[strange[0]], longest=60)
            raise TaskError(f"{where(strange[0])}: {shown} is not the number of a class, as the other labels are.")
        names = sorted(set(values))
        position = {name: number for number, name in enumerate(names)}
        return names, [position[value] for value in values]
    most = len(stored) or MOST_CLASSES
    right = (value.isdecimal() and len(value) < 19 and int(value) < most for value in values)
    if wrong := [row for row, is_right in enumerate(right) if not is_right]:
        hint = f"0 to {most - 1:,} are allowed; -1 means that the split has no labels"
        raise TaskError(f"{where(wrong[0])}: {values[wrong[0]][:40]} is not the number of a class ({hint}).")
    labels = [int(value) for value in values]
    return [str(number) for number in range(len(stored) or max(labels, default=-1) + 1)], labels


def _is_number(label: str) -> bool:
    """Whether a label is a number or stands for a missing one, and is no name."""
    try:
        float(label)
    except ValueError:
        return label.lower() in ("none", "null", "na", "n/a", "<na>")
    return True


def _classified(
    data: TaskData, own: OwnTask, classes: Sequence[str], labels: Sequence[int], *, stored: Sequence[str] = ()
) -> TaskData:
    """The data with its labels, and the names and prompts of their classes.

    The names are those that the user gave, or the data set's, or the labels themselves.
    """
    names, given = list(stored) or [label.replace("_", " ") for label in classes], own.classnames
    if isinstance(given, Mapping):
        _check_known("classnames", given, [*classes, *stored], classes)
        names = [given.get(label, given.get(name, name)) for label, name in zip(classes, names, strict=True)]
    elif given is not None:
        if len(given) != len(classes):
            raise TaskError(f"{data.folder}: classnames has {len(given)} names, the data {len(classes)} classes.")
        names = given
    first: dict[str, str] = {}
    for label, name in zip(classes, names, strict=True):
        if not name.strip():
            raise TaskError(f"{data.folder}: class {label[:60]!r} has no name: give it one in classnames.")
        if (other := first.setdefault(name, label)) != label:
            raise TaskError(
                f"{data.folder}: classes {other[:60]!r} and {label[:60]!r} are both named {name[:60]!r}, so prompts "
                "cannot tell them apart: give them different classnames."
            )
    prompts = []
    if own.prompts is not None:
        _check_known("prompts", own.prompts, [*classes, *names], names)
        for label, name in zip(classes, names, strict=True):
            texts = own.prompts.get(label, own.prompts.get(name, []))
            if not texts or not all(text.strip() for text in texts):
                shown = plain(repr(name), longest=60)
                raise TaskError(f"The class {shown} has no prompts, or a blank one: give it some in prompts.")
            prompts.append(tuple(dict.fromkeys(texts)))
    return replace(
        data,
        on_background=True,
        labels=np.array(labels, dtype=np.int64),
        classnames=tuple(names),
        templates=tuple(own.templates),
        prompts=tuple(prompts),
    )


def _check_known(key: str, given: Mapping[str, Any], known: Sequence[str], shown: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        classes = ", ".join(plain(name, longest=60) for name in shown[:20])
        raise TaskError(f"{key} has {plain(repr(unknown[0]), longest=60)}, but the classes are {classes}.")
