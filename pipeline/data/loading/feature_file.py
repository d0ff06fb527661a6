"""Outputs of towers on disk, one record per sample, read and written by all processes of a run at once.

The file is a numpy array, which `numpy.load` reads. A record is a checksum and the values of one sample; a record that
was never written, or was torn by a kill or a full disk, has no valid checksum and counts as missing. Processes
therefore need no locks: two that write the same sample write the same values up to rounding.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.errors import UserError

CHECKSUM_BYTES = 4
VALUES = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2"}  # numpy has no bf16: its bits
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredFeatures:
    """What is stored for the rows of a batch."""

    values: Tensor
    """[b, d]; the rows that are missing are arbitrary."""
    missing: Tensor
    """int64 [m], ascending: rows that are not stored."""


@dataclass(frozen=True)
class FeatureFile:
    """Where the outputs of the samples [0, samples) are, and their form. It can be sent to other processes."""

    path: Path
    samples: int
    dim: int
    dtype: torch.dtype
    """Of the values; fp32, fp16 or bf16."""
    seed: int = 0
    """Less than 2^32; mixed into the checksums. Records that were written with another one count as missing."""

    @property
    def value_bytes(self) -> int:
        """Of one sample, without its checksum."""
        return self.dim * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + self.samples * (CHECKSUM_BYTES + self.value_bytes)

    @property
    def header(self) -> bytes:
        """numpy's header of the array of records."""
        record = np.dtype([("crc32", "<u4"), ("values", VALUES[self.dtype], (self.dim,))])
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
            found = os.pread(descriptor, len(header), 0)
            if not header.startswith(found.rstrip(b"\0")):
                raise UserError(f"{self.path} is not a file of image features like these, or is damaged: delete it.")
            needed = self.file_bytes - os.fstat(descriptor).st_blocks * 512
            free = shutil.disk_usage(self.path.parent).free
            if needed > free:
                raise UserError(
                    f"The features of {self.samples:,} images need {needed / 1e9:.3g} GB more in {self.path.parent}, "
                    f"where {free / 1e9:.3g} GB are free: name a folder on another disk."
                )
            os.pwrite(descriptor, header, 0)
            if os.fstat(descriptor).st_size < self.file_bytes:
                os.ftruncate(descriptor, self.file_bytes)
        finally:
            os.close(descriptor)


class FeatureStore:
    """The open file of one process. Bad records and failures to read or write only cost time: see the module.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no file of this form and size.
    """

    def __init__(self, file: FeatureFile, *, writable: bool = True) -> None:
        self.file = file
        self._offset, self._size = len(file.header), CHECKSUM_BYTES + file.value_bytes
        self._descriptor = os.open(file.path, os.O_RDWR if writable else os.O_RDONLY)
        header, size = os.pread(self._descriptor, self._offset, 0), os.fstat(self._descriptor).st_size
        if header != file.header or size < file.file_bytes:
            self.close()
            raise ValueError(f"{file.path} does not hold {file.samples:,} records of {file.dim} {file.dtype}")
        self._readable, self.writable = True, writable
        """`writable` is False from the first record on that could not be written."""

    def close(self) -> None:
        os.close(self._descriptor)

    def read(self, sample_id: int) -> bytes | None:
        """The values of a sample, None if they are missing."""
        if not self._readable:
            return None
        try:
            record = os.pread(self._descriptor, self._size, self._offset + sample_id * self._size)
        except OSError as error:
            self._readable = False
            log.warning("%s cannot be read (%s): image features are computed instead.", self.file.path, error)
            return None
        values = record[CHECKSUM_BYTES:]
        return values if record[:CHECKSUM_BYTES] == self._checksum(values, sample_id) else None

    def write(self, sample_ids: NDArray[np.int64], values: Tensor) -> None:
        """Store the values of samples [m], which are [m, d] on the CPU, except those that are not finite.

        After a failure, such as a full disk, nothing more is written; training goes on.
        """
        values = values.to(self.file.dtype)
        finite = values.isfinite().all(dim=1).tolist()
        rows = values.contiguous().view(torch.uint8).numpy()
        for sample_id, row, usable in zip(sample_ids.tolist(), rows, finite, strict=True):
            if usable and self.writable:
                self._write(sample_id, row.tobytes())

    def _write(self, sample_id: int, values: bytes) -> None:
        record = self._checksum(values, sample_id) + values
        try:
            written = os.pwrite(self._descriptor, record, self._offset + sample_id * self._size)
            problem = "" if written == len(record) else "it is full"
        except OSError as error:
            problem = str(error.strerror)
        if problem:
            self.writable = False
            log.warning(
                "%s takes no more features (%s). What is stored can be read; a run that trains computes the rest in "
                "every epoch.",
                self.file.path,
                problem,
            )

    def _checksum(self, values: bytes, sample_id: int) -> bytes:
        """CRC-32 of a sample's number and values; never zero, which is what a hole in the file reads as."""
        start = (sample_id ^ self.file.seed) & 0xFFFFFFFF
        return (zlib.crc32(values, start) or 1).to_bytes(CHECKSUM_BYTES, "little")
