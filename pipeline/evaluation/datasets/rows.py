"""Retrieval, association and classification tasks from the rows of a table of images."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from pipeline.evaluation.datasets.cells import as_list, as_text
from pipeline.evaluation.datasets.open_tables import Needs, find_table
from pipeline.evaluation.datasets.tables import Place, Table, TableImages
from pipeline.evaluation.datasets.task_data import Instance, TaskData, TaskError, plain

CAPTIONS = ("caption", "captions", "raw", "sentences")
IMAGES = ("image", "filename")
CSV_NEEDS: dict[str, Needs] = {
    "retrieval": (IMAGES, CAPTIONS),
    "association": (("candidates",), ("cue",), ("associations",)),
}
CANDIDATES = (5, 6, 10, 12)
"""How many candidates WinoGAViL's instances have; its scores are means over these numbers."""


def open_rows(protocol: str, folder: Path) -> TaskData:
    """Open a retrieval or association task from a folder.

    Raises:
        TaskError: It is missing, partial or damaged.
    """
    table = find_table(folder, needs=CSV_NEEDS[protocol])
    check_split(table, "test")
    return retrieval_rows(table, folder) if protocol == "retrieval" else association_rows(table, folder)


def check_split(table: Table, split: str) -> None:
    """Compare the column `split`, where there is one, with the split that is scored.

    Raises:
        TaskError: A row is of another split.
    """
    column = next((name for name in table.columns if name.strip().lower() == "split"), None)
    names = table.class_names(column) if column else ()
    for row, value in enumerate(table.values(column) if column else ()):
        if isinstance(value, int) and 0 <= value < len(names):
            value = names[value]
        named = value is None or isinstance(value, str | bytes)
        if named and as_text(value, where=table.row_name(row)).strip().lower() != split.lower():
            raise TaskError(
                f"{table.row_name(row)} is of the split {plain(repr(value), longest=60)}, and {split!r} is scored: "
                "remove the rows of other splits, or set split if all rows are of another."
            )


def check_repeated(images: TableImages, about: Sequence[object], *, one_label: bool = False) -> None:
    """Check that no row was copied: the same image with the same label or captions counts once.

    Where label or captions are the same, images are compared by `identity`.

    Args:
        images: The rows' images.
        about: Label or captions of every row.
        one_label: An image that is named in two rows must not have two labels either.

    Raises:
        TaskError: Two rows are the same, or have the same image; the message names them.
    """
    seen: dict[object, int] = {}
    often = Counter(about)
    for index, what in enumerate(about):
        if often[what] == 1 and not one_label:
            continue
        image = images.identity(index)
        first = seen.setdefault(image if one_label else (image, what), index)
        if first == index:
            continue
        same = f"{images.name(index)} and {images.name(first)} are the same image with"
        if about[first] == what:
            raise TaskError(f"{same} the same label or captions, which would count twice: remove one of the rows.")
        raise TaskError(
            f"{same} different labels, and an image has one class in such a task: keep the row that counts."
        )


def retrieval_rows(table: Table, folder: Path, *, image: str = "", caption: str = "") -> TaskData:
    """Images with captions, one or a list of them in every row.

    Rows with the same file, and in columns that were named those with the same bytes, are one image. The columns are by
    default those with one of the names in use.
    """
    texts = table.values(column_of(table, (caption,) if caption else CAPTIONS, folder))
    column = column_of(table, (image,) if image else IMAGES, folder)
    captions: list[list[str]] = []
    places: list[Place] = []
    numbers: dict[object, int] = {}
    rows = TableImages(table, column, [(row, None) for row in range(len(table))])
    names = map(rows.identity, range(len(table))) if table.is_csv or caption else range(len(table))
    for row, (text, name) in enumerate(zip(texts, names, strict=True)):
        own = as_list(text, where=table.row_name(row))
        if not own or not all(item.strip() for item in own):
            raise TaskError(
                f"{table.row_name(row)} has an empty caption: fetch the table again, or remove the row if it is yours."
            )
        number = numbers.setdefault(name, len(places))
        if number == len(places):
            places.append((row, None))
            captions.append(own)
        elif set(own) <= set(captions[number]):
            raise TaskError(f"{table.row_name(row)} repeats an earlier row, which would count twice: remove it.")
        else:
            captions[number] += own
    images = TableImages(table, column, some(places, folder))
    check_repeated(images, [tuple(own) for own in captions])
    return TaskData(
        folder,
        table.layout,
        images,
        (*table.files, *table.image_files(column)),
        columns=(image, caption) if caption else (),
        captions=tuple(tuple(own) for own in captions),
    )


def association_rows(table: Table, folder: Path) -> TaskData:
    """WinoGAViL. Candidate images repeat from instance to instance: equal bytes are one image, encoded once."""
    lists = {name: _lists(table, name, folder) for name in ("candidates", "associations")}
    cues = table.values(column_of(table, ("cue",), folder))
    # In a CSV the candidates' names are those of the images.
    possible = ("candidate_images", "candidates") if table.is_csv else ("candidate_images",)
    column = column_of(table, possible, folder)
    _check_copies(table, [name for name in table.columns if name == "candidates" or name not in possible])
    places: dict[bytes, tuple[int, Place]] = {}
    """By the digest of the image: its number, and where it is first."""
    instances = []
    for row, (own, cue, truth) in enumerate(zip(lists["candidates"], cues, lists["associations"], strict=True)):
        cue = as_text(cue, where=table.row_name(row))
        _check_instance(table.row_name(row), own, cue, truth)
        if (count := len(table.images_in(column, row))) != len(own):
            raise TaskError(
                f"{table.row_name(row)} has {count} images, but {len(own)} candidates. The row is damaged: fetch the "
                "table again."
            )
        positions = []
        for position in range(len(own)):
            digest = hashlib.sha256(table.image(column, (row, position))).digest()
            number, _ = places.setdefault(digest, (len(places), (row, position)))
            positions.append(number)
        associated = tuple(bool(value) for value in np.isin(own, truth))
        instances.append(Instance(cue, tuple(positions), associated))
    images = TableImages(table, column, some([place for _, place in places.values()], folder))
    files = (*table.files, *table.image_files(column))
    return TaskData(folder, table.layout, images, files, instances=tuple(instances))


def _lists(table: Table, column: str, folder: Path) -> list[list[str]]:
    """A column of lists; where another column (`num_candidates`) says how long each must be, it is."""
    values, counts = table.values(column_of(table, (column,), folder)), f"num_{column}"
    lists = [as_list(value, where=table.row_name(row)) for row, value in enumerate(values)]
    for row, count in enumerate(table.values(counts) if counts in table.columns else ()):
        with suppress(ValueError):
            count = float(count)
        if str(count).strip() and len(lists[row]) != count:
            raise TaskError(f"{table.row_name(row)} has {len(lists[row])} {column}, but its {counts} says {count}.")
    return lists


def _check_instance(where: str, candidates: Sequence[str], cue: str, truth: Sequence[str]) -> None:
    if not cue.strip():
        raise TaskError(f"{where} has no cue.")
    if not all(name.strip() for name in candidates):
        raise TaskError(f"{where} has a candidate without a name. The row is incomplete: fetch the table again.")
    if not candidates or not truth:
        raise TaskError(f"{where} has no {'associations' if candidates else 'candidates'}.")
    strange = [name for name in truth if name not in candidates]
    if strange:
        raise TaskError(
            f"{where}: the association {plain(repr(strange[0]), longest=60)} is not among its {len(candidates)} "
            "candidates. The row is incomplete: fetch the table again."
        )
    if len(candidates) not in CANDIDATES or len(set(candidates)) < len(candidates):
        twice = "" if len(set(candidates)) == len(candidates) else ", some of them twice"
        raise TaskError(
            f"{where} has {len(candidates)} candidates{twice}, but WinoGAViL's instances have "
            f"{', '.join(map(str, CANDIDATES))}. The row is damaged: fetch the table again."
        )


def _check_copies(table: Table, columns: Sequence[str]) -> None:
    """No two rows are the same in all columns, the instance's number included."""
    seen: dict[str, int] = {}
    for row, values in enumerate(zip(*(table.values(name) for name in columns), strict=True)):
        first = seen.setdefault(repr(values), row)
        if first != row:
            raise TaskError(f"{table.row_name(row)} and {table.row_name(first)} are the same, which would count twice.")


def some(places: list[Place], folder: Path) -> list[Place]:
    if not places:
        raise TaskError(f"{folder} holds no rows at all.")
    return places


def column_of(table: Table, names: tuple[str, ...], folder: Path) -> str:
    column = next((name for name in names if name in table.columns), None)
    if column is None:
        where, hint = folder, "This is another data set, or another version of it."
        if table.is_csv:
            where, hint = table.files[0], "Cells are separated by commas, without spaces after them."
        columns = ", ".join(table.columns)
        raise TaskError(f"{where} has no column {' or '.join(names)}; its columns are {columns}. {hint}")
    return column
