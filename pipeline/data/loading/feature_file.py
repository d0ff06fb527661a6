"""A file of features: one record per sample, read and written by several processes at once.

The file is a numpy array, which `numpy.load` reads. A record is a checksum and the values of one sample; a record that
was never written, or was torn by a kill or a full disk, has no valid checksum and counts as missing. Processes
therefore need no locks: two that write the same sample write the same values up to rounding.
"""

from __future__ import annotations

import io
import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from pipeline.errors import UserError

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
