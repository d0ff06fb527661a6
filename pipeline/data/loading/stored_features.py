"""Stored features of all samples of a dataset, which `neuclip features` writes and runs read by sample id.

Either a teacher's unit-norm image and text features in fp16 (`data.teacher_features`), or the outputs of an image tower
before the normalisation to unit length in fp32 (`data.image_features`), behind which a run that locks the tower goes on
as it would from the tower.

They are in a numpy array, which `numpy.load` reads. A record is a checksum and the values of one sample; a record that
was never written, or was torn by a kill or a full disk, has no valid checksum and counts as missing. Processes
therefore need no locks: two that write the same sample write the same values up to rounding.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pipeline.config import first_problem
from pipeline.data.data_config import IMAGES, DataConfig
from pipeline.data.loading.decode import StoredCrops
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.errors import UserError
from pipeline.files import read_bounded

FEATURES, FACTS = "features.npy", "features.json"
LOOKED_AT = 64
"""Records, spread over the file, that are read before a run starts."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
CHECKSUM_BYTES = 4
AGAIN = "run `neuclip features` again, which adds what is missing"


@dataclass(frozen=True)
class FeatureFile:
    """Where the features of the samples [0, samples) are, and their form. It can be sent to other processes."""

    path: Path
    samples: int
    dim: int
    """Values of a sample."""
    dtype: str
    """Of the values, as numpy writes it: "<f2" or "<f4"."""
    seed: int = 0
    """Less than 2^32; mixed into the checksums. Records that were written with another one count as missing."""

    @property
    def record_bytes(self) -> int:
        return CHECKSUM_BYTES + self.dim * np.dtype(self.dtype).itemsize

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + self.samples * self.record_bytes

    @property
    def header(self) -> bytes:
        """numpy's header of the array of records."""
        record = np.dtype([("crc32", "<u4"), ("values", self.dtype, (self.dim,))])
        facts = {"descr": np.lib.format.dtype_to_descr(record), "fortran_order": False, "shape": (self.samples,)}
        out = io.BytesIO()
        np.lib.format.write_array_header_1_0(out, facts)
        return out.getvalue()

    def create(self) -> None:
        """Make the file, or extend what a killed process left of it; a complete one stays as it is.

        Every process may call this at the same time. The disk's blocks are taken as records are written.

        Raises:
            UserError: The disk has too little space for the records that it does not hold yet, or there is another
                file.
            OSError: The file cannot be created.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            header = self.header
            start = os.pread(descriptor, len(header), 0)
            if not header.startswith(start.rstrip(b"\0")):
                raise UserError(f"{self.path} is not a file of features like these, or is damaged: delete it.")
            needed = self.file_bytes - os.fstat(descriptor).st_blocks * 512
            free = shutil.disk_usage(self.path.parent).free
            if needed > free:
                raise UserError(
                    f"The features of {self.samples:,} samples need {needed / 1e9:.3g} GB more in {self.path.parent}, "
                    f"where {free / 1e9:.3g} GB are free: name a folder on another disk."
                )
            os.pwrite(descriptor, header, 0)
            if os.fstat(descriptor).st_size < self.file_bytes:
                os.ftruncate(descriptor, self.file_bytes)
        finally:
            os.close(descriptor)


class FeatureStore:
    """The open file of one process.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no file of this form and size.
    """

    def __init__(self, file: FeatureFile, *, writable: bool = False) -> None:
        self.file = file
        self._offset, self._size = len(file.header), file.record_bytes
        self._descriptor = os.open(file.path, os.O_RDWR if writable else os.O_RDONLY)
        header, size = os.pread(self._descriptor, self._offset, 0), os.fstat(self._descriptor).st_size
        if header != file.header or size < file.file_bytes:
            os.close(self._descriptor)
            raise ValueError(f"{file.path} does not hold {file.samples:,} records of {file.dim} {file.dtype}")

    def read(self, sample_id: int) -> bytes | None:
        """The values of a sample, None if they are missing.

        Raises:
            UserError: The file cannot be read.
        """
        try:
            record = os.pread(self._descriptor, self._size, self._offset + sample_id * self._size)
        except OSError as error:
            raise UserError(f"{self.file.path} cannot be read: {error.strerror}.") from error
        values = record[CHECKSUM_BYTES:]
        return values if record[:CHECKSUM_BYTES] == self._checksum(values, sample_id) else None

    def write(self, sample_ids: Sequence[int], values: Tensor) -> None:
        """Store the values of samples [m], which are [m, d], except those that are not finite.

        Raises:
            OSError: They cannot be written, for example because the disk is full.
        """
        rows = values.cpu().numpy().astype(self.file.dtype)
        for sample_id, row in zip(sample_ids, rows, strict=True):
            if np.isfinite(row).all():
                record = self._checksum(row.tobytes(), sample_id) + row.tobytes()
                written = os.pwrite(self._descriptor, record, self._offset + sample_id * self._size)
                if written < len(record):
                    raise OSError(f"{self.file.path} is full")

    def _checksum(self, values: bytes, sample_id: int) -> bytes:
        """CRC-32 of a sample's number and values; never zero, which is what a hole in the file reads as."""
        start = (sample_id ^ self.file.seed) & 0xFFFFFFFF
        return (zlib.crc32(values, start) or 1).to_bytes(CHECKSUM_BYTES, "little")


def no_features(file: FeatureFile, sample_id: int) -> UserError:
    """What to raise when a sample that can be read has no features."""
    return UserError(f"{file.path.parent} has no features of sample {sample_id}, or damaged ones: {AGAIN}.")


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
    crops: StoredCrops | None = None
    """Of which the image features are; None: of the whole image, or the tower's outputs of the central square."""
    tower: dict[str, Any] | None = None
    """Of outputs of an image tower, what else determines them; None: a teacher's features."""

    @property
    def sides(self) -> int:
        """1 for images, 2 for images and texts."""
        return 2 if self.tower is None else 1

    @property
    def images(self) -> int:
        """Image features of each sample."""
        return self.crops.count if self.crops else 1

    def file(self, folder: Path) -> FeatureFile:
        """The file of the features: those of images, and a teacher's of the text behind them."""
        dim, dtype = (self.images + self.sides - 1) * self.dim, "<f2" if self.tower is None else "<f4"
        return FeatureFile(folder / FEATURES, samples=self.samples, dim=dim, dtype=dtype, seed=self._seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the features of given data, as plain values."""
        names = ("model", "caption", "tau", "bias", "crops") if self.tower is None else ("tower", "crops")
        plain = json.loads(json.dumps(asdict(self)))
        return {name: plain[name] for name in names}

    @property
    def _seed(self) -> int:
        """CRC-32 of what determines the records, so that those of another model, data or crops are not valid."""
        plain = asdict(self)
        names = ["model", "data", "caption", "samples", "dim", "crops", *(["tower"] if self.tower else [])]
        return zlib.crc32(json.dumps([plain[name] for name in names]).encode()) or 1


class StoredFeatures:
    """Complete features of `neuclip features`, which are read by sample id.

    Args:
        folder: Where they are.
        setting: Which names it: `data.teacher_features` or `data.image_features`.
        seed: Of the run, by which each epoch shows one of several crops.

    Raises:
        UserError: There are no complete features for this setting, or `features.json` and the file do not go together.
    """

    def __init__(self, folder: Path, *, setting: str, seed: int = 0) -> None:
        self.named, self._seed = f"{setting}={folder}", seed
        try:
            tree: dict[str, Any] = json.loads(read_bounded(folder / FACTS).decode())
            facts = json.dumps(tree["facts"])  # strict validation takes a dataclass from JSON only
            self.facts = TypeAdapter(FeatureFacts).validate_json(facts, strict=True)
            if (self.facts.tower is None) == (setting == IMAGES):
                kind = "a teacher's features" if setting == IMAGES else "the outputs of an image tower"
                raise ValueError(f"these are {kind}")
            self.file = self.facts.file(folder)
            self._store = FeatureStore(self.file)
            stored = tree.get("stored", 0)
            if not (type(stored) is int and 0 <= stored <= self.facts.samples):
                raise ValueError(f"{FACTS} says that {stored} of {self.facts.samples} samples have features")
            self.missing = self.facts.samples - stored
            """Samples without features, such as corrupt ones."""
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            why = first_problem(error, file=FACTS) if isinstance(error, ValidationError) else error
            raise UserError(
                f"{self.named}: no features of `neuclip features` ({why}). Write them with "
                f"{how_to_write(setting, folder)}."
            ) from error
        if "stored" not in tree:
            raise UserError(f"{self.named}: the features are not complete: {AGAIN}.")
        rows = range(0, self.facts.samples, max(1, self.facts.samples // LOOKED_AT))
        lost = [row for row in rows if self._store.read(row) is None]
        if len(lost) > self.missing or len(lost) == len(rows):
            raise UserError(
                f"{self.named}: {len(lost)} of the {len(rows)} features checked are missing, damaged or "
                f"of another model (that of sample {lost[-1]}, for one), and {FACTS} says that {self.missing:,} of all "
                f"{self.facts.samples:,} are missing: {AGAIN}."
            )

    def describe(self) -> str:
        """The model, and what has no features, for the log."""
        facts, lacks = self.facts, ""
        if self.missing:
            lacks = (
                f"; {self.missing:,} of {facts.samples:,} samples have no features: the run ends if it reaches one "
                "that the loader can read"
            )
        crops = f", {facts.crops.count} crops of each image" if facts.crops else ""
        tau = f", tau {facts.tau:.4g}" if facts.tower is None else ""
        return f"{facts.source} (weights {facts.model[:12]}{tau}{crops}{lacks})"

    def read(self, sample_ids: Tensor, *, epoch: int) -> Tensor:
        """The features [sides, b, d] of samples, [b] int64, that an epoch shows.

        Raises:
            UserError: Those of a sample are missing or damaged.
        """
        ids, crops, images = sample_ids.tolist(), self.facts.crops, self.facts.images
        values = np.empty((len(ids), self.file.dim), dtype=self.file.dtype)
        for row, sample_id in enumerate(ids):
            record = self._store.read(sample_id)
            if record is not None:
                values[row] = np.frombuffer(record, dtype=self.file.dtype)
            if record is None or not np.isfinite(values[row]).all():
                raise no_features(self.file, sample_id)
        of_each = values.reshape(len(ids), -1, self.facts.dim)
        shown = [crops.shown(sample_id, seed=self._seed, epoch=epoch) if crops else 0 for sample_id in ids]
        return torch.from_numpy(np.stack([of_each[range(len(ids)), shown], *of_each[:, images:].swapaxes(0, 1)]))


def how_to_write(setting: str, folder: str | Path) -> str:
    """The command that writes the features that a setting names."""
    return (
        f"`neuclip features {'MODEL --images-only' if setting == IMAGES else 'TEACHER'} --data DATA --output {folder}`"
    )


def open_features(
    data: DataConfig, digests: Iterable[str], *, seed: int, named: Mapping[str, Sequence[str]]
) -> dict[str, list[StoredFeatures]]:
    """Stored features for a run.

    Args:
        data: The `data` section.
        digests: Hash of each source's contents.
        seed: Of the run.
        named: Folders by the setting that names them.

    Raises:
        UserError: They are not complete, of other data or crops, or a setting names the same ones twice.
    """
    opened = {
        setting: [StoredFeatures(Path(folder), setting=setting, seed=seed) for folder in folders]
        for setting, folders in named.items()
    }
    for setting, group in opened.items():
        for number, stored in enumerate(group):
            _check_fit(stored, data, list(digests))
            if stored.facts.identity in [other.facts.identity for other in group[:number]]:
                raise UserError(
                    f"{setting} has the features of {stored.facts.source} twice (number {number + 1} for one): list "
                    "each teacher once."
                )
    return opened


def _check_fit(stored: StoredFeatures, data: DataConfig, digests: list[str]) -> None:
    facts = stored.facts
    captions = sorted({str(CaptionField.parse(source.caption or data.caption)) for source in data.sources})
    given, wanted = {"data": facts.data}, {"data": digests}
    if facts.tower is None:
        given["captions"], wanted["captions"] = [facts.caption], captions
    if other := [name for name in wanted if wanted[name] != given[name]]:
        raise UserError(
            f"{stored.named} are of other {' and '.join(other)} than this run "
            f"({'; '.join(f'{given[name]}, now {wanted[name]}' for name in other)}): run `neuclip features` on "
            "data.sources, in their order, with --caption as in data.caption."
        )
    theirs = own = (data.crop.scale, data.crop.ratio)
    if facts.crops is not None:
        theirs = (facts.crops.scale, facts.crops.ratio)
    elif facts.tower is not None:
        theirs = ((1.0, 1.0), (1.0, 1.0))
    if theirs != own:
        raise UserError(
            f"{stored.named} are of crops with scale {list(theirs[0])} and ratio {list(theirs[1])}, and this run has "
            f"data.crop.scale={list(own[0])} data.crop.ratio={list(own[1])}: set them to the former, or run `neuclip "
            "features` with --augmentations, --crop-scale and --crop-ratio."
        )


def common_crops(opened: Mapping[str, Sequence[StoredFeatures]]) -> StoredCrops | None:
    """The crops that a run shows, from stored features by the setting that names them; None: its own.

    Raises:
        UserError: They are of different crops.
    """
    distinct = {
        f"{setting} ({number})": stored.facts.crops
        for setting, group in opened.items()
        for number, stored in enumerate(group, 1)
        if stored.facts.crops is not None
    }
    if len(set(distinct.values())) > 1:
        listed = "; ".join(f"{name}: {crops.count} with seed {crops.seed}" for name, crops in distinct.items())
        raise UserError(
            f"The stored features are of different crops, and a step shows one of a sample: {listed}. Run `neuclip "
            "features` with the same --augmentations and --seed."
        )
    return next(iter(distinct.values()), None)
