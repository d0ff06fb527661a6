"""Retrieval and WinoGAViL from the rows of a table: which images there are, and what belongs to them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from pipeline.evaluation.datasets.tables import CsvZipTable, Needs, Place, Table, TableImages, as_list, open_table
from pipeline.evaluation.datasets.task import Task
from pipeline.evaluation.datasets.task_data import Instance, TaskData, TaskError

CAPTIONS = ("caption", "captions", "raw", "sentences")
IMAGES = ("image", "filename")
CSV_NEEDS: dict[str, Needs] = {
    "retrieval": (IMAGES, CAPTIONS),
    "association": (("candidates",), ("cue",), ("associations",)),
}


def open_rows(task: Task, folder: Path) -> TaskData:
    """A retrieval or association task out of a table. Raises: TaskError when there is none or columns are missing."""
    table = open_table(folder, needs=CSV_NEEDS[task.protocol])
    if table is None:
        raise TaskError(
            f"{folder} has no layout that is known for {task.key}: expected a wds folder (test/nshards.txt), "
            "a save_to_disk folder, parquet files, or a CSV with a zip of images."
        )
    if not len(table):
        raise TaskError(f"{folder} holds no rows at all.")
    return _retrieval(table, folder) if task.protocol == "retrieval" else _association(table, folder)


def _retrieval(table: Table, folder: Path) -> TaskData:
    captions = [as_list(value) for value in table.values(_column(table, CAPTIONS, folder))]
    image = _column(table, IMAGES, folder)
    places: list[Place] = [(row, None) for row in range(len(table))]
    return TaskData(
        folder,
        table.layout,
        TableImages(table, image, places),
        table.files,
        captions=tuple(tuple(own) for own in captions),
    )


def _association(table: Table, folder: Path) -> TaskData:
    """Candidate images repeat from instance to instance: equal bytes are one image, encoded once."""
    names = [as_list(value) for value in table.values(_column(table, ("candidates",), folder))]
    cues = table.values(_column(table, ("cue",), folder))
    truths = [as_list(value) for value in table.values(_column(table, ("associations",), folder))]
    # In a CSV the candidates' names are those of the images.
    possible = ("candidate_images", "candidates") if isinstance(table, CsvZipTable) else ("candidate_images",)
    column = _column(table, possible, folder)
    places: list[Place] = []
    by_digest: dict[bytes, int] = {}
    instances = []
    for row, (own, cue, truth) in enumerate(zip(names, cues, truths, strict=True)):
        positions = []
        for position in range(len(own)):
            place = (row, position)
            digest = hashlib.sha256(table.image(column, place)).digest()
            if digest not in by_digest:
                by_digest[digest] = len(places)
                places.append(place)
            positions.append(by_digest[digest])
        associated = tuple(bool(value) for value in np.isin(own, truth))
        instances.append(Instance(str(cue), tuple(positions), associated))
    return TaskData(folder, table.layout, TableImages(table, column, places), table.files, instances=tuple(instances))


def _column(table: Table, names: tuple[str, ...], folder: Path) -> str:
    found = next((name for name in names if name in table.columns), None)
    if found is None:
        raise TaskError(
            f"{folder} has no column {' or '.join(names)}; its columns are {', '.join(table.columns)}. "
            "This is another data set, or another version of it."
        )
    return found
