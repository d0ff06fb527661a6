"""Retrieval and association tasks from the rows of a table of images, and what the rows of all tables must be."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from pipeline.evaluation.datasets.tables import Table, as_list, as_text
from pipeline.evaluation.datasets.task_data import Instance, StoredImages, TaskData, TaskError, plain

WINOGAVIL = ("candidates", "cue", "associations")
CANDIDATES = (5, 6, 10, 12)
"""How many candidates WinoGAViL's instances have; its scores are means over these numbers."""


def check_split(table: Table, split: str) -> None:
    """Compare the column `split`, where there is one, with the split that is scored."""
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


def check_repeated(images: StoredImages, about: Sequence[object], *, one_label: bool = False) -> None:
    """Check that no row was copied: an image with the same label or captions counts once.

    With `one_label` an image must not have two labels in two rows either.
    """
    seen: dict[object, int] = {}
    often = Counter(about)
    for index, what in enumerate(about):
        if often[what] == 1 and not one_label:
            continue
        image = images.identity(index)
        first = seen.setdefault(image if one_label else (image, what), index)
        if first != index:
            same = f"{images.name(index)} and {images.name(first)} are the same image with"
            if about[first] == what:
                raise TaskError(f"{same} the same label or captions, which would count twice: remove one of the rows.")
            raise TaskError(f"{same} different labels, and an image has one class: keep the row that counts.")


def retrieval_rows(table: Table, folder: Path, *, columns: tuple[str, str] | None = None) -> TaskData:
    """Images with captions, one or a list of them in every row.

    In `columns` of images and captions, which a `tasks.yaml` has chosen, rows with the same file or the same bytes are
    one image.
    """
    image, caption = (column_of(table, name) for name in columns or ("image", "caption"))
    rows, first, captions = table.pictures(image), list[int](), dict[object, list[str]]()
    for row, text in enumerate(table.values(caption)):
        own = as_list(text, where=table.row_name(row))
        if not own or not all(item.strip() for item in own):
            raise TaskError(
                f"{table.row_name(row)} has an empty caption: fetch the table again, or remove the row if it is yours."
            )
        earlier = captions.setdefault(rows.identity(row) if columns else row, [])
        if not earlier:
            first.append(row)
        elif set(own) <= set(earlier):
            raise TaskError(f"{table.row_name(row)} repeats an earlier row, which would count twice: remove it.")
        earlier += own
    images, texts = rows.part(first), tuple(map(tuple, captions.values()))
    check_repeated(images, texts)
    files = (*table.files, *rows.files)
    return TaskData(folder, table.layout, images, files, columns=columns or (), captions=texts)


def association_rows(table: Table, folder: Path) -> TaskData:
    """WinoGAViL. Candidate images repeat from instance to instance: equal bytes are one image, encoded once."""
    cues = [as_text(v, where=table.row_name(row)) for row, v in enumerate(table.values(column_of(table, "cue")))]
    rows = list(zip(_lists(table, "candidates"), cues, _lists(table, "associations"), strict=True))
    for row, (candidates, cue, truth) in enumerate(rows):
        names = {name for name in candidates if name.strip()}
        whole = len(names) == len(candidates) in CANDIDATES and truth and names.issuperset(truth)
        if not (whole and cue.strip()):
            raise TaskError(
                f"{table.row_name(row)} has the cue {plain(cue, longest=60)!r}, {len(names)} different candidates and "
                f"{len(truth)} associations, {len(names & {*truth})} of them among its candidates, but an instance of "
                f"WinoGAViL has {', '.join(map(str, CANDIDATES))} candidates. It is incomplete: fetch the table again."
            )
    columns, seen = (name for name in table.columns if name != "candidate_images"), dict[str, int]()
    for row, values in enumerate(zip(*map(table.values, columns), strict=True)):
        if (first := seen.setdefault(repr(values), row)) != row:
            raise TaskError(f"{table.row_name(row)} and {table.row_name(first)} are the same, which would count twice.")
    # In a CSV the candidates' names are those of the images.
    column = column_of(table, "candidates" if table.is_csv else "candidate_images")
    images = table.pictures(column, counts=[len(candidates) for candidates, _, _ in rows])
    first_of = dict[bytes, int]()
    of_digests = [hashlib.sha256(images.read(index)).digest() for index in range(len(images))]
    for index, digest in enumerate(of_digests):
        first_of.setdefault(digest, index)
    numbers = {digest: number for number, digest in enumerate(first_of)}
    of_rows = (numbers[digest] for digest in of_digests)
    instances = tuple(
        Instance(cue, tuple(islice(of_rows, len(candidates))), tuple(name in truth for name in candidates))
        for candidates, cue, truth in rows
    )
    files = (*table.files, *images.files)
    return TaskData(folder, table.layout, images.part(first_of.values()), files, instances=instances)


def _lists(table: Table, column: str) -> list[list[str]]:
    """A column of lists; where another column (`num_candidates`) says how long each must be, it is."""
    values, counts = table.values(column_of(table, column)), f"num_{column}"
    lists = [as_list(value, where=table.row_name(row)) for row, value in enumerate(values)]
    for row, count in enumerate(table.values(counts) if counts in table.columns else ()):
        with suppress(ValueError):
            count = float(count)
        if str(count).strip() and len(lists[row]) != count:
            raise TaskError(f"{table.row_name(row)} has {len(lists[row])} {column}, but its {counts} says {count}.")
    return lists


def column_of(table: Table, name: str) -> str:
    """The name of a column that must be there."""
    if name not in table.columns:
        hint = "This is another data set, or another version of it."
        if table.is_csv:
            hint = "Cells are separated by commas, without spaces after them."
        raise TaskError(f"{table.name} has no column {name}; its columns are {', '.join(table.columns)}. {hint}")
    return name
