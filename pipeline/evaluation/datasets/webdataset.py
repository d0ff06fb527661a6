"""Tasks stored as `wds_*_test` folders: tars read by position, so that no sample is skipped or read twice unnoticed."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, TaskData, TaskError, read_lines

SMALL_SUFFIXES = ("cls", "npy", "txt")
BlankClass = Literal["keep", "drop"]


@dataclass
class TarSample:
    """One sample: where its image lies, and its small members' contents."""

    key: str
    shard: int
    image: tuple[int, int] | None = None
    small: dict[str, bytes] = field(default_factory=dict)


class TarImages:
    """Images in uncompressed tars, read by offset; every process opens the files for itself."""

    def __init__(self, shards: tuple[Path, ...], samples: list[TarSample]) -> None:
        self.shards = shards
        self._at = np.array([(s.shard, *(s.image or (0, 0))) for s in samples], dtype=np.int64).reshape(-1, 3)
        self._keys = [s.key for s in samples]
        self._open: dict[int, io.FileIO] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._keys)

    def read(self, index: int) -> bytes:
        shard, offset, size = (int(value) for value in self._at[index])
        if shard not in self._open:
            self._open[shard] = io.FileIO(self.shards[shard])
        blob = os.pread(self._open[shard].fileno(), size, offset)
        if len(blob) != size:
            raise TaskError(f"{self.name(index)}: {len(blob)} of {size} bytes could be read. The shard is cut short.")
        return blob

    def name(self, index: int) -> str:
        return f"{self._keys[index]} in {self.shards[int(self._at[index][0])]}"


def is_webdataset(folder: Path) -> bool:
    return (folder / "test" / "nshards.txt").is_file() or any((folder / "test").glob("*.tar"))


def open_webdataset(folder: Path, *, columns: int = 0, blank_class: BlankClass = "keep") -> TaskData:
    """Open a `wds_*_test` folder.

    Args: columns: how many columns every sample's `.npy` must have at least; 0 when the task uses none.
      blank_class: what a blank line of classnames.txt is: a class whose name is empty, or nothing at all, as in
      the benchmark's pinned stack (labels behind it then mean other names; only for comparison with published numbers).
    Raises: TaskError when a shard is missing or cut short, or a sample lacks a member.
    """
    shards = _shards(folder)
    samples = [sample for number, shard in enumerate(shards) for sample in _read_shard(shard, number)]
    if not samples:
        raise TaskError(f"{folder} holds no samples at all.")
    _check_samples(samples, shards)
    images = TarImages(shards, samples)
    files = (folder / "test" / "nshards.txt", *shards)
    kind = read_lines(folder / "dataset_type.txt") if (folder / "dataset_type.txt").is_file() else ("classification",)
    if kind[:1] == ("retrieval",):
        captions = tuple(_captions(sample, shards) for sample in samples)
        return TaskData(folder, "webdataset", images, (*files, folder / "dataset_type.txt"), captions=captions)
    classnames = read_lines(folder / "classnames.txt")
    blank = sum(not name for name in classnames) if blank_class == "drop" else 0
    if blank:
        classnames = tuple(name for name in classnames if name)
    templates = tuple(line for line in read_lines(folder / "zeroshot_classification_templates.txt") if line)
    prompts = (folder / "classnames.txt", folder / "zeroshot_classification_templates.txt")
    return TaskData(
        folder,
        "webdataset",
        images,
        (*files, *prompts),
        blank_classes=blank,
        labels=np.array([_label(sample, shards) for sample in samples], dtype=np.int64),
        metadata=_metadata(samples, shards, columns) if columns else None,
        classnames=classnames,
        templates=templates,
    )


def _shards(folder: Path) -> tuple[Path, ...]:
    lines = read_lines(folder / "test" / "nshards.txt")
    if not lines or not lines[0].isdigit() or int(lines[0]) < 1:
        raise TaskError(f"{folder / 'test' / 'nshards.txt'} must hold the number of shards, but holds {lines[:1]}.")
    shards = tuple(folder / "test" / f"{number}.tar" for number in range(int(lines[0])))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise TaskError(
            f"{folder / 'test'}: {len(missing)} of {len(shards)} shards are missing ({', '.join(missing[:5])}). "
            "A score over partial data would not be this task's score: fetch them."
        )
    return shards


def _read_shard(shard: Path, number: int) -> Iterator[TarSample]:
    sample: TarSample | None = None
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                key, _, suffix = os.path.basename(member.name).partition(".")
                key = os.path.join(os.path.dirname(member.name), key)
                if sample is None or sample.key != key:
                    if sample is not None:
                        yield sample
                    sample = TarSample(key, number)
                suffix = suffix.lower()
                if suffix in IMAGE_SUFFIXES:
                    if sample.image is not None:
                        raise TaskError(f"Sample {key} in {shard} has two images.")
                    sample.image = (member.offset_data, member.size)
                elif suffix in SMALL_SUFFIXES:
                    sample.small[suffix] = archive.extractfile(member).read()  # type: ignore[union-attr]
            _check_end(shard, archive.offset)
    except (tarfile.TarError, OSError) as error:
        raise TaskError(f"The shard {shard} is damaged or cut short ({error}): fetch it again.") from error
    if sample is not None:
        yield sample


def _check_end(shard: Path, end: int) -> None:
    """A complete tar ends in zero blocks; nothing else shows that a file was cut between two members."""
    with shard.open("rb") as file:
        file.seek(max(0, end - tarfile.BLOCKSIZE))
        tail = file.read(2 * tarfile.BLOCKSIZE)
    if tarfile.NUL * tarfile.BLOCKSIZE not in tail:
        raise TaskError(f"The shard {shard} has no end-of-archive mark: it was cut short. Fetch it again.")


def _check_samples(samples: list[TarSample], shards: tuple[Path, ...]) -> None:
    seen: set[tuple[int, str]] = set()
    for sample in samples:
        if (sample.shard, sample.key) in seen:
            raise TaskError(f"{shards[sample.shard]} holds sample {sample.key} twice, or its members lie apart.")
        seen.add((sample.shard, sample.key))
    for sample in samples:
        if sample.image is None:
            allowed = ", ".join(f".{suffix}" for suffix in IMAGE_SUFFIXES)
            raise TaskError(f"Sample {sample.key} in {shards[sample.shard]} has no image ({allowed}).")


def _member(sample: TarSample, suffix: str, shards: tuple[Path, ...]) -> bytes:
    if suffix not in sample.small:
        raise TaskError(f"Sample {sample.key} in {shards[sample.shard]} has no .{suffix}.")
    return sample.small[suffix]


def _label(sample: TarSample, shards: tuple[Path, ...]) -> int:
    text = _member(sample, "cls", shards)
    try:
        return int(text)
    except ValueError:
        raise TaskError(
            f"Sample {sample.key} in {shards[sample.shard]}: .cls holds {text[:20]!r}, not a number."
        ) from None


def _captions(sample: TarSample, shards: tuple[Path, ...]) -> tuple[str, ...]:
    captions = tuple(_member(sample, "txt", shards).decode("utf-8").splitlines())
    if not captions:
        raise TaskError(f"Sample {sample.key} in {shards[sample.shard]} has no captions.")
    return captions


def _metadata(samples: list[TarSample], shards: tuple[Path, ...], columns: int) -> np.ndarray:
    """[n, columns or more] int64, paired by sample and never by a second reading."""
    rows: list[np.ndarray] = []
    for sample in samples:
        row = np.load(io.BytesIO(_member(sample, "npy", shards)), allow_pickle=False)
        if row.ndim != 1 or len(row) < columns or (rows and row.shape != rows[0].shape):
            raise TaskError(
                f"Sample {sample.key} in {shards[sample.shard]}: .npy has shape {row.shape}, "
                f"but the task needs {columns} columns, the same number for every sample."
            )
        rows.append(row.astype(np.int64))
    return np.stack(rows)
