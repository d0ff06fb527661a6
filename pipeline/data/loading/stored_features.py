"""Stored features of all samples of a dataset, which `neuclip features` writes and runs read by sample id.

They are a teacher's unit-norm image and text features in fp16 (`data.teacher_features`), or a locked image tower's
outputs before the normalisation to unit length in fp32 (`data.image_features`), in an array that `numpy.load` reads. A
record is a checksum and the values of one sample; one that was never written, or was torn by a kill or a full disk, has
no valid checksum and counts as missing. So processes need no locks: two that write the same sample write the same
values up to rounding.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pipeline.config import first_problem
from pipeline.data.data_config import CENTRAL_SQUARE, IMAGES, DataConfig
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.errors import UserError
from pipeline.files import read_bounded

FEATURES, FACTS = "features.npy", "features.json"
LOOKED_AT = 64
"""Records, spread over the file, that are read before a run starts."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
CHECKSUM_BYTES = 4
AGAIN = "run `neuclip features` again, which adds what is missing"


@dataclass(eq=False)
class FeatureFile:
    """The features of the samples [0, samples) in a file. Each process that this is sent to opens the file itself."""

    path: Path
    samples: int
    dim: int
    """Values of a sample."""
    dtype: str
    """Of the values, as numpy writes it: "<f2" or "<f4"."""
    seed: int = 0
    """Less than 2^32; mixed into the checksums. Records that were written with another one count as missing."""
    _descriptor: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        record = np.dtype([("crc32", "<u4"), ("values", self.dtype, (self.dim,))])
        out, descr = io.BytesIO(), np.lib.format.dtype_to_descr(record)
        shape = {"descr": descr, "fortran_order": False, "shape": (self.samples,)}
        np.lib.format.write_array_header_1_0(out, shape)
        self.header, self.record_bytes = out.getvalue(), record.itemsize
        self.file_bytes = len(self.header) + self.samples * self.record_bytes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": -1}

    def open(self) -> int:
        """The descriptor of the file, opened for reading if needed; OSError or ValueError if it is no such file."""
        if self._descriptor < 0:
            descriptor = os.open(self.path, os.O_RDONLY)
            header, size = os.pread(descriptor, len(self.header), 0), os.fstat(descriptor).st_size
            if header != self.header or size < self.file_bytes:
                os.close(descriptor)
                raise ValueError(f"{self.path} does not hold {self.samples:,} records of {self.dim} {self.dtype}")
            self._descriptor = descriptor
        return self._descriptor

    def create(self) -> None:
        """Open the file for writing: a new one, or what a killed process left of it, also in several processes at once.

        UserError if there is another file, or too little space, which is taken as records are written; OSError if it
        cannot be made.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        start = os.pread(self._descriptor, len(self.header), 0)
        if not self.header.startswith(start.rstrip(b"\0")):
            raise UserError(f"{self.path} is not a file of features like these, or is damaged: delete it.")
        needed = self.file_bytes - os.fstat(self._descriptor).st_blocks * 512
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise UserError(
                f"The features of {self.samples:,} samples need {needed / 1e9:.3g} GB more in {self.path.parent}, "
                f"where {free / 1e9:.3g} GB are free: name a folder on another disk."
            )
        os.pwrite(self._descriptor, self.header, 0)
        if os.fstat(self._descriptor).st_size < self.file_bytes:
            os.ftruncate(self._descriptor, self.file_bytes)

    def read(self, sample_id: int) -> bytes | None:
        """The values of a sample, None if they are missing; UserError if the file cannot be read."""
        try:
            record = os.pread(self.open(), self.record_bytes, len(self.header) + sample_id * self.record_bytes)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}.") from error
        values = record[CHECKSUM_BYTES:]
        return values if record[:CHECKSUM_BYTES] == self._checksum(values, sample_id) else None

    def write(self, sample_ids: Sequence[int], values: Tensor) -> None:
        """After `create`, store the values [m, d] of samples [m] but those that are not finite; OSError if it fails."""
        rows = values.cpu().numpy().astype(self.dtype)
        for sample_id, row in zip(sample_ids, rows, strict=True):
            if np.isfinite(row).all():
                record = self._checksum(row.tobytes(), sample_id) + row.tobytes()
                written = os.pwrite(self._descriptor, record, len(self.header) + sample_id * self.record_bytes)
                if written < len(record):
                    raise OSError(f"{self.path} is full")

    def missing(self, sample_id: int) -> UserError:
        """What to raise when a sample that can be read has no features."""
        return UserError(f"{self.path.parent} has no features of sample {sample_id}, or damaged ones: {AGAIN}.")

    def _checksum(self, values: bytes, sample_id: int) -> bytes:
        """CRC-32 of a sample's number and values; never zero, which is what a hole in the file reads as."""
        start = (sample_id ^ self.seed) & 0xFFFFFFFF
        return (zlib.crc32(values, start) or 1).to_bytes(CHECKSUM_BYTES, "little")


@dataclass(frozen=True)
class FeatureFacts:
    """What stored features are of."""

    model: str
    """Hash of the model's weights; of outputs of an image tower, of the tower's."""
    source: str
    """Where they were loaded from."""
    tau: Annotated[Finite, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    data: list[str]
    """Hash of each source's contents; sample ids run over the sources in this order."""
    caption: str
    """Where captions are; empty for outputs of an image tower."""
    samples: Annotated[int, Field(gt=0)]
    bias: Finite | None = None
    """The bias of a model trained with a sigmoid loss."""
    crops: None = None
    """Features of several crops of an image, which version 0.2 could store, are not read any more."""
    tower: dict[str, Any] | None = None
    """Of outputs of an image tower, what else determines them; None: a teacher's features."""

    @property
    def sides(self) -> int:
        """1 for images, 2 for images and texts."""
        return 2 if self.tower is None else 1

    def file(self, folder: Path) -> FeatureFile:
        """The file of the features: those of images, and a teacher's of the text behind them.

        Its seed depends on what determines the records, so that those of another model or data are not valid.
        """
        dtype = "<f2" if self.tower is None else "<f4"
        names = ["model", "data", "caption", "samples", "dim", "crops", *(["tower"] if self.tower else [])]
        plain = asdict(self)
        seed = zlib.crc32(json.dumps([plain[name] for name in names]).encode()) or 1
        return FeatureFile(folder / FEATURES, self.samples, self.sides * self.dim, dtype, seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the features of given data, as plain values."""
        names = ("model", "caption", "tau", "bias", "crops") if self.tower is None else ("tower", "crops")
        plain = json.loads(json.dumps(asdict(self)))
        return {name: plain[name] for name in names}


class StoredFeatures:
    """Complete features of `neuclip features`, read by sample id, in a folder that `data.teacher_features` or
    `data.image_features` (`setting`) names.

    UserError if there are none for this setting, or `features.json` and the file do not go together.
    """

    def __init__(self, folder: Path, *, setting: str) -> None:
        self.named = f"{setting}={folder}"
        try:
            tree: dict[str, Any] = json.loads(read_bounded(folder / FACTS).decode())
            facts = json.dumps(tree["facts"])  # strict validation takes a dataclass from JSON only
            self.facts = TypeAdapter(FeatureFacts).validate_json(facts, strict=True)
            if (self.facts.tower is None) == (setting == IMAGES):
                kind = "a teacher's features" if setting == IMAGES else "the outputs of an image tower"
                raise ValueError(f"these are {kind}")
            self.file = self.facts.file(folder)
            self.file.open()
            self.missing: int = self.facts.samples - tree.get("stored", 0)
            """Samples without features, such as corrupt ones."""
            if self.missing not in range(self.facts.samples + 1):
                raise ValueError(f"{FACTS} says that {tree['stored']} of {self.facts.samples} samples have features")
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            why = first_problem(error, file=FACTS) if isinstance(error, ValidationError) else error
            raise UserError(
                f"{self.named}: no features of `neuclip features` ({why}). Write them with "
                f"{how_to_write(setting, folder)}."
            ) from error
        if "stored" not in tree:
            raise UserError(f"{self.named}: the features are not complete: {AGAIN}.")
        rows = range(0, self.facts.samples, max(1, self.facts.samples // LOOKED_AT))
        lost = [row for row in rows if self.file.read(row) is None]
        if len(lost) > self.missing or len(lost) == len(rows):
            raise UserError(
                f"{self.named}: {len(lost)} of the {len(rows)} features checked are missing, damaged or "
                f"of another model (that of sample {lost[-1]}, for one), and {FACTS} says that {self.missing:,} of all "
                f"{self.facts.samples:,} are missing: {AGAIN}."
            )

    def describe(self) -> str:
        """The model, and what has no features, for the log."""
        facts = self.facts
        tau = f", tau {facts.tau:.4g}" if facts.tower is None else ""
        lacks = (
            f"; {self.missing:,} of {facts.samples:,} samples have no features: the run ends if it reaches one that "
            "the loader can read"
        )
        return f"{facts.source} (weights {facts.model[:12]}{tau}{lacks if self.missing else ''})"

    def read(self, sample_ids: Tensor) -> Tensor:
        """The features [sides, b, d] of samples, [b] int64; UserError if those of one are missing or damaged."""
        values = np.empty((len(sample_ids), self.file.dim), dtype=self.file.dtype)
        for row, sample_id in enumerate(sample_ids.tolist()):
            record = self.file.read(sample_id)
            values[row] = np.nan if record is None else np.frombuffer(record, dtype=self.file.dtype)
            if not np.isfinite(values[row]).all():
                raise self.file.missing(sample_id)
        return torch.from_numpy(values.reshape(len(values), -1, self.facts.dim).swapaxes(0, 1))


def how_to_write(setting: str, folder: str | Path) -> str:
    """The command that writes the features that a setting names."""
    model = "MODEL --images-only" if setting == IMAGES else "TEACHER"
    return f"`neuclip features {model} --data DATA --output {folder}`"


def open_features(data: DataConfig, digests: Iterable[str], *, named: Mapping[str, str]) -> dict[str, StoredFeatures]:
    """Stored features for a run by the setting that names their folder, of data whose sources have these `digests`.

    UserError if they are not complete, or of other data or crops.
    """
    opened = {setting: StoredFeatures(Path(folder), setting=setting) for setting, folder in named.items()}
    captions = sorted({str(CaptionField.parse(source.caption or data.caption)) for source in data.sources})
    for stored in opened.values():
        facts, given, wanted = stored.facts, {"data": stored.facts.data}, {"data": list(digests)}
        if facts.tower is None:
            given["captions"], wanted["captions"] = [facts.caption], captions
        if other := [name for name in wanted if wanted[name] != given[name]]:
            raise UserError(
                f"{stored.named} are of other {' and '.join(other)} than this run "
                f"({'; '.join(f'{given[name]}, now {wanted[name]}' for name in other)}): run `neuclip features` on "
                "data.sources, in their order, with --caption as in data.caption."
            )
        if facts.tower is not None and data.crop != CENTRAL_SQUARE:
            raise UserError(
                f"{stored.named} are of the central square of each image: set data.crop.scale=[1,1] "
                "data.crop.ratio=[1,1]."
            )
    return opened
