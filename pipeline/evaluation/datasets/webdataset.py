"""Tasks stored as `wds_*_test` folders: tars read by position, so that no sample is skipped or read twice unnoticed.

The package webdataset reads them, too, but in one direction, and it takes a tar that was cut between members or
overwritten with zeros for one with fewer samples, a link for nothing, and a sample that occurs twice for two: a score
over what it found would look like any other.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from pipeline.evaluation.datasets.task_data import IMAGE_SUFFIXES, TaskData, TaskError, plain, read_lines
from pipeline.files import PADDING, tar_errors, text_lines, zeros_next


def read_members(path: Path) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar in order.

    Raises:
        TaskError: The tar is damaged, cut short, followed by anything but zeros, holds links, or is not a tar at all.
    """
    try:
        with tar_errors(), tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isfile() or member.issparse():
                    raise TaskError(
                        f"The shard {path}: {member.name} is a link or a sparse file: its content is elsewhere. "
                        "Write the shard again with the files themselves."
                    )
                yield member
            end = archive.offset
        with path.open("rb") as file:
            _check_end(path, file, end)
    except (tarfile.TarError, OSError) as error:
        raise TaskError(f"The shard {path} is damaged or cut short ({plain(error)}): fetch it again.") from error


def _check_end(path: Path, file: BinaryIO, end: int) -> None:
    """Only zeros follow the last member, at least one block of them: otherwise some samples were not read.

    Python's tarfile stops silently at the first block of zeros, at a damaged header and at the end of the file.
    """
    remaining = os.fstat(file.fileno()).st_size - end
    if remaining < tarfile.BLOCKSIZE:
        raise TaskError(f"The shard {path} has no end-of-archive mark: it was cut short. Fetch it again.")
    file.seek(end)
    if any(file.read(tarfile.BLOCKSIZE)):
        raise TaskError(f"The shard {path} is damaged: there is no valid header at byte {end:,}. Fetch it again.")
    zeros, more = zeros_next(file)
    if more:
        raise TaskError(
            f"The shard {path} has zeros where a member should begin (byte {end:,}) and goes on at byte "
            f"{end + tarfile.BLOCKSIZE + zeros:,}: a part of it was overwritten, or two archives were joined. Readers "
            "stop at the zeros and miss what follows. Fetch it again, or write joined archives as separate shards."
        )
    if remaining > PADDING:
        raise TaskError(
            f"The shard {path} ends in {remaining:,} zero bytes, more than any padding: was its download not "
            "finished, or its end overwritten? Fetch it again."
        )


SMALL_SUFFIXES = ("cls", "npy", "txt")
MOST_MISSING = 10_000
"""More shards than this cannot be missing: nshards.txt is damaged."""
MOST = 2**53
"""Numbers of groups are below; larger ones have no exact float, and may have no int64."""
BlankClass = Literal["keep", "drop"]


@dataclass
class TarSample:
    """One sample: where its image is, and the contents of its small members."""

    key: str
    shard: int
    path: Path
    """Of the shard."""
    image: tuple[int, int] | None = None
    small: dict[str, bytes] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"Sample {self.key} in {self.path}"

    def member(self, suffix: str) -> bytes:
        if suffix not in self.small:
            raise TaskError(f"{self.place} has no .{suffix}.")
        return self.small[suffix]


class TarImages:
    """Images in uncompressed tars, read by offset; every process opens the files separately."""

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

    def files_of(self, index: int) -> Iterable[Path]:
        return (self.shards[int(self._at[index][0])],)


def is_webdataset(folder: Path) -> bool:
    """Whether a folder is of this layout."""
    return (folder / "test" / "nshards.txt").is_file() or any((folder / "test").glob("*.tar"))


def is_retrieval(folder: Path) -> bool:
    """Whether a folder of this layout says that it holds captions instead of labels."""
    kind = folder / "dataset_type.txt"
    return kind.is_file() and read_lines(kind)[:1] == ("retrieval",)


def open_webdataset(
    folder: Path, *, columns: int = 0, groups: Sequence[int] = (), blank_class: BlankClass = "keep"
) -> TaskData:
    """Open a `wds_*_test` folder.

    Args:
        folder: The task's folder.
        columns: How many columns every sample's `.npy` must have at least; 0 when the task uses none.
        groups: Which of them are numbers of groups, 0 or more.
        blank_class: What a blank line of classnames.txt is: a class whose name is empty (`keep`), or nothing at all
            (`drop`), as in the benchmark's pinned stack. Labels behind a dropped line mean other names; this is only
            for comparison with published numbers.

    Raises:
        TaskError: A shard is missing, surplus, damaged, empty or a copy of another, or a sample lacks a member.
    """
    shards = _shards(folder)
    samples = [sample for number, shard in enumerate(shards) for sample in _read_shard(shard, number)]
    images = TarImages(shards, samples)
    _check_samples(samples)
    _check_copies(samples, images)
    files = (folder / "test" / "nshards.txt", *shards)
    if is_retrieval(folder):
        captions = tuple(map(_captions, samples))
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
        labels=np.array([*map(_label, samples)], dtype=np.int64),
        metadata=_metadata(samples, columns, groups) if columns else None,
        classnames=classnames,
        templates=templates,
    )


def _shards(folder: Path) -> tuple[Path, ...]:
    """The tars that nshards.txt promises, all of them and no others."""
    test = folder / "test"
    lines = read_lines(test / "nshards.txt")
    if not lines or not lines[0].isdecimal() or int(lines[0]) < 1:
        raise TaskError(f"{test / 'nshards.txt'} must hold the number of shards, but holds {lines[:1]}.")
    there = sorted(path.name for path in test.glob("*.tar") if not path.name.startswith("."))
    count = int(lines[0])
    if count > len(there) + MOST_MISSING:
        raise TaskError(f"{test}: nshards.txt says {count:,} shards, but there are {len(there)} tars: fetch them.")
    shards = tuple(test / f"{number}.tar" for number in range(count))
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise TaskError(
            f"{test}: {len(missing)} of {len(shards)} shards are missing ({', '.join(missing[:5])}). "
            "A score over partial data would not be this task's score: fetch them."
        )
    surplus = sorted(set(there) - {shard.name for shard in shards})
    if surplus:
        raise TaskError(
            f"{test}: nshards.txt says {len(shards)} shards, but there are {len(there)} tars "
            f"({', '.join(surplus[:5])} too many). Fetch nshards.txt again, or remove what does not belong there."
        )
    return shards


def _read_shard(shard: Path, number: int) -> Iterator[TarSample]:
    """The samples of one tar: neighbouring members with the same name up to the first dot."""
    sample: TarSample | None = None
    with shard.open("rb") as file:
        for member in read_members(shard):
            folder, base = os.path.split(member.name)
            key, _, suffix = base.partition(".")
            key, suffix = os.path.join(folder, key), suffix.lower()
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = TarSample(key, number, shard)
            if suffix in IMAGE_SUFFIXES:
                if sample.image is not None:
                    raise TaskError(f"{sample.place} has two images.")
                sample.image = (member.offset_data, member.size)
            elif suffix in SMALL_SUFFIXES:
                if suffix in sample.small:
                    raise TaskError(f"{sample.place} has two members .{suffix}.")
                sample.small[suffix] = os.pread(file.fileno(), member.size, member.offset_data)
    if sample is None:
        raise TaskError(f"The shard {shard} holds no samples at all: it is damaged or not the task's. Fetch it again.")
    yield sample


def _check_samples(samples: Sequence[TarSample]) -> None:
    seen: set[tuple[int, str]] = set()
    for sample in samples:
        if (sample.shard, sample.key) in seen:
            raise TaskError(f"{sample.path} holds sample {sample.key} twice, or its members are not together.")
        seen.add((sample.shard, sample.key))
    for sample in samples:
        if sample.image is None:
            allowed = ", ".join(f".{suffix}" for suffix in IMAGE_SUFFIXES)
            raise TaskError(f"{sample.place} has no image ({allowed}).")


def _check_copies(samples: Sequence[TarSample], images: TarImages) -> None:
    """No two shards hold the same samples, whatever the tars' dates and names are.

    Sizes and labels are compared first, contents only where these agree.
    """
    by_shard: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_shard.setdefault(sample.shard, []).append(index)
    known: dict[object, list[int]] = {}
    for indices in by_shard.values():
        facts = tuple((samples[k].image[1], tuple(sorted(samples[k].small.items()))) for k in indices)  # type: ignore[index]
        twin = known.setdefault(facts, indices)
        if twin is not indices and all(images.read(a) == images.read(b) for a, b in zip(twin, indices, strict=True)):
            first, second = samples[twin[0]].path, samples[indices[0]].path
            raise TaskError(f"{second} holds the same {len(indices)} samples as {first}: it is a copy. Fetch it again.")


def _label(sample: TarSample) -> int:
    text = sample.member("cls").strip()
    if not re.fullmatch(rb"-?[0-9]{1,9}", text):
        raise TaskError(f"{sample.place}: .cls holds {text[:20]!r}, not a class number.")
    return int(text)


def _captions(sample: TarSample) -> tuple[str, ...]:
    try:
        captions = tuple(text_lines(sample.member("txt").decode("utf-8")))
    except UnicodeDecodeError as error:
        raise TaskError(f"{sample.place}: .txt is not UTF-8 ({error}).") from error
    if not captions or not all(caption.strip() for caption in captions):
        raise TaskError(f"{sample.place}: .txt has no caption or a blank line.")
    return captions


def _metadata(samples: Sequence[TarSample], columns: int, groups: Sequence[int]) -> np.ndarray:
    """[n, columns or more] int64, paired by sample and never by a second reading."""
    rows: list[np.ndarray] = []
    for sample in samples:
        try:
            row = np.lib.format.read_array(io.BytesIO(sample.member("npy")), allow_pickle=False)
        except TaskError:
            raise
        except Exception as error:  # a damaged header is parsed as Python, and may state any shape
            raise TaskError(f"{sample.place}: .npy is damaged ({plain(error)}). Fetch this shard again.") from error
        if row.ndim != 1 or len(row) < columns or (rows and row.shape != rows[0].shape):
            raise TaskError(
                f"{sample.place}: .npy has shape {row.shape}, "
                f"but the task needs {columns} columns, the same number for every sample."
            )
        group, numbers = row[list(groups)], row.dtype.kind in "iuf"
        if not (numbers and (abs(row[:columns]) < MOST).all()) or (group < 0).any() or (group % 1).any():
            raise TaskError(
                f"{sample.place}: .npy holds {row.tolist()}, but the numbers of groups must be whole and not negative "
                f"(columns {', '.join(map(str, groups))}). The shard is of another version: fetch it again."
            )
        rows.append(row.astype(np.int64))
    return np.stack(rows)
