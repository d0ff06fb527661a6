"""Tasks stored as `wds_*_test` folders: what is a sample is `webdataset`'s rule, and images are read by position.

The members are checked first: webdataset's own reader takes a tar that was cut between members or overwritten with
zeros for one with fewer samples, a link for nothing, and a sample that occurs twice for two.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.evaluation.datasets.datacomp import Task
from pipeline.evaluation.datasets.tables import as_text
from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, StoredImages, TaskData, TaskError, plain, read_lines
from pipeline.files import text_lines
from pipeline.tars import DamagedTar, headers, refuse_unended, skip_payload


def read_members(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of the files of a tar in order."""
    try:
        with path.open("rb") as file:
            for name, size, offset, kind in headers(file, strict=True, on_unended=refuse_unended):
                if kind:
                    raise TaskError(
                        f"The shard {path}: {name} is a link or a sparse file: its content is elsewhere. "
                        "Write the shard again with the files themselves."
                    )
                skip_payload(file, size)
                yield name, offset, size
    except (DamagedTar, OSError) as error:
        raise TaskError(f"The shard {path} is damaged or cut short ({plain(error)}): fetch it again.") from error


SMALL_SUFFIXES = ("cls", "npy", "txt")
MOST = 2**53
"""Numbers of groups are below; larger ones have no exact float, and may have no int64."""
BlankClass = Literal["keep", "drop"]
Sample = dict[str, Any]
"""As `webdataset` groups members: contents by suffix, and of an image where it is, beside `__key__` and `__url__`."""


def is_webdataset(folder: Path) -> bool:
    """Whether a folder is of this layout."""
    return (folder / "test" / "nshards.txt").is_file() or any((folder / "test").glob("*.tar"))


def is_retrieval(folder: Path) -> bool:
    """Whether a folder of this layout says that it holds captions instead of labels."""
    kind = folder / "dataset_type.txt"
    return kind.is_file() and read_lines(kind)[:1] == ("retrieval",)


def open_webdataset(folder: Path, task: Task, *, blank_class: BlankClass = "keep") -> TaskData:
    """Open a `wds_*_test` folder, in which every sample's `.npy` must have the task's fields.

    A blank line of classnames.txt is a class whose name is empty, or (`drop`) nothing at all, as in the benchmark's
    pinned stack. Labels behind a dropped line mean other names: this is only for comparison with published numbers.
    """
    shards = _shards(folder)
    samples = [sample for shard in shards for sample in _read_shard(shard)]
    path_of = {str(shard): shard for shard in shards}
    images = StoredImages([((path_of[s["__url__"]], *_image(s)), f"{s['__key__']} in {s['__url__']}") for s in samples])
    _check_copies(samples, images)
    files = (folder / "test" / "nshards.txt", *shards)
    if is_retrieval(folder):
        captions = tuple(map(_captions, samples))
        return TaskData(folder, "webdataset", images, (*files, folder / "dataset_type.txt"), captions=captions)
    prompts = (folder / "classnames.txt", folder / "zeroshot_classification_templates.txt")
    lines, templates = map(read_lines, prompts)
    classnames = tuple(name for name in lines if name or blank_class == "keep")
    return TaskData(
        folder,
        "webdataset",
        images,
        (*files, *prompts),
        blank_classes=len(lines) - len(classnames),
        labels=np.array([*map(_label, samples)], dtype=np.int64),
        metadata=_metadata(samples, task) if task.fields else None,
        classnames=classnames,
        templates=tuple(filter(None, templates)),
    )


def _shards(folder: Path) -> tuple[Path, ...]:
    """The tars that nshards.txt promises, all of them and no others."""
    test = folder / "test"
    lines = read_lines(test / "nshards.txt")
    if not lines or not re.fullmatch("0{0,9}[1-9][0-9]{0,8}", lines[0]):
        raise TaskError(f"{test / 'nshards.txt'} must hold the number of shards, but holds {plain(lines[:1])}.")
    names = (f"{number}.tar" for number in range(int(lines[0])))  # not a list: the file may be damaged
    missing = list(islice((name for name in names if not (test / name).is_file()), 5))
    shards = () if missing else tuple(test / f"{number}.tar" for number in range(int(lines[0])))
    surplus = sorted(path.name for path in {*test.glob("[!.]*.tar")} - {*shards})
    if missing or surplus:
        what = f"missing: {', '.join(missing)}" if missing else f"too many: {', '.join(surplus[:5])}"
        raise TaskError(
            f"{test}: nshards.txt says {lines[0]} shards, {what}. A score over partial or other data would not be "
            "this task's score: fetch shards and nshards.txt again, and remove what does not belong there."
        )
    return shards


def _read_shard(shard: Path) -> list[Sample]:
    """The samples of one tar."""
    from webdataset.tariterators import base_plus_ext, group_by_keys

    def members() -> Iterator[dict[str, Any]]:
        with shard.open("rb") as file:
            for name, offset, size in read_members(shard):
                key, suffix = base_plus_ext(name)
                if key is None:  # it would be passed over
                    raise ValueError(f"{name} is of no sample, its name has no suffix")
                is_small = suffix.lower() in SMALL_SUFFIXES
                data = os.pread(file.fileno(), size, offset) if is_small else (offset, size)
                yield {"fname": name, "data": data, "__url__": str(shard)}

    try:
        samples = list(group_by_keys(members()))  # a ValueError for a sample with two equal members
        keys = Counter(sample["__key__"] for sample in samples).most_common(1)
        if not keys or keys[0][1] > 1:
            twice = keys and f"sample {keys[0][0]} twice, or its members are not together"
            raise ValueError(f"it holds {twice or 'no samples at all'}")
    except TaskError:
        raise
    except ValueError as error:
        raise TaskError(f"The shard {shard} is damaged or not the task's: {plain(error.args[0])}.") from error
    return samples


def _image(sample: Sample) -> tuple[int, int]:
    """Offset and size of the image."""
    places = [sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample]
    if len(places) != 1:
        raise TaskError(f"{_where(sample)} has {'two images' if places else 'no image'} ({', '.join(IMAGE_SUFFIXES)}).")
    offset, size = places[0]
    return offset, size


def _where(sample: Sample) -> str:
    return f"Sample {sample['__key__']} in {sample['__url__']}"


def _member(sample: Sample, suffix: str) -> bytes:
    if suffix not in sample:
        raise TaskError(f"{_where(sample)} has no .{suffix}.")
    return bytes(sample[suffix])


def _check_copies(samples: Sequence[Sample], images: StoredImages) -> None:
    """No two shards hold the same samples, whatever the tars' dates and names are.

    Sizes and labels are compared first, contents only where these agree.
    """
    known: dict[str, tuple[int, ...]] = {}
    for shard, group in groupby(range(len(samples)), key=lambda index: samples[index]["__url__"]):
        indices = tuple(group)
        small = [[_image(samples[k])[1], *(samples[k].get(suffix) for suffix in SMALL_SUFFIXES)] for k in indices]
        twin = known.setdefault(repr(small), indices)
        if twin is not indices and all(images.read(a) == images.read(b) for a, b in zip(twin, indices, strict=True)):
            first = samples[twin[0]]["__url__"]
            raise TaskError(f"{shard} holds the same {len(indices)} samples as {first}: it is a copy. Fetch it again.")


def _label(sample: Sample) -> int:
    text = _member(sample, "cls").strip()
    if not re.fullmatch(rb"-?[0-9]{1,9}", text):
        raise TaskError(f"{_where(sample)}: .cls holds {text[:20]!r}, not a class number.")
    return int(text)


def _captions(sample: Sample) -> tuple[str, ...]:
    captions = tuple(text_lines(as_text(_member(sample, "txt"), where=_where(sample))))
    if not captions or not all(caption.strip() for caption in captions):
        raise TaskError(f"{_where(sample)}: .txt has no caption or a blank line.")
    return captions


def _metadata(samples: Sequence[Sample], task: Task) -> np.ndarray:
    """[n, fields or more] int64, paired by sample and never by a second reading."""
    columns, rows = len(task.fields), list[np.ndarray]()
    groups = [task.fields.index(name) for name in (task.group, *task.secondary_groups) if name]
    for sample in samples:
        stored = io.BytesIO(_member(sample, "npy"))
        try:
            row = np.lib.format.read_array(stored, allow_pickle=False)
        except Exception as error:  # a damaged header is parsed as Python, and may state any shape
            raise TaskError(f"{_where(sample)}: .npy is damaged ({plain(error)}). Fetch this shard again.") from error
        if row.ndim != 1 or len(row) < columns or (rows and row.shape != rows[0].shape):
            raise TaskError(
                f"{_where(sample)}: .npy has shape {row.shape}, "
                f"but the task needs {columns} columns, the same number for every sample."
            )
        group, numbers = row[groups], row.dtype.kind in "iuf"
        if not (numbers and (abs(row[:columns]) < MOST).all()) or (group < 0).any() or (group % 1).any():
            raise TaskError(
                f"{_where(sample)}: .npy holds {row.tolist()}, but numbers of groups must be whole and not negative "
                f"(columns {', '.join(map(str, groups))}). The shard is of another version: fetch it again."
            )
        rows.append(row.astype(np.int64))
    return np.stack(rows)
