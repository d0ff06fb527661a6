"""Offsets of the members of an uncompressed tar. A tar is read to its end, and inconsistent ones are refused."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.evaluation.datasets.task_data import TaskError, plain

PADDING = 2 * tarfile.RECORDSIZE
"""Zero bytes that may follow the last member. Writers end with 1,024 and fill up a record of 10,240."""


class TarMember(NamedTuple):
    """A regular file in a tar and where its content is."""

    name: str
    offset: int
    size: int


def read_members(path: Path) -> Iterator[TarMember]:
    """The regular files of a tar in order.

    Raises:
        TaskError: The tar is damaged, cut short, followed by anything but zeros, holds links, or is not a tar at all.
    """
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isfile() or member.issparse():
                    raise TaskError(
                        f"The shard {path}: {member.name} is a link or a sparse file: its content is elsewhere. "
                        "Write the shard again with the files themselves."
                    )
                yield TarMember(member.name, member.offset_data, member.size)
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
    position = end + tarfile.BLOCKSIZE
    while block := file.read(1 << 20):
        if any(block):
            start = position + next(index for index, byte in enumerate(block) if byte)
            raise TaskError(
                f"The shard {path} has zeros where a member should begin (byte {end:,}) and goes on at byte {start:,}: "
                "a part of it was overwritten, or two archives were joined. Readers stop at the zeros and miss what "
                "follows. Fetch it again, or write joined archives as separate shards."
            )
        position += len(block)
    if remaining > PADDING:
        raise TaskError(
            f"The shard {path} ends in {remaining:,} zero bytes, more than any padding: was its download not "
            "finished, or its end overwritten? Fetch it again."
        )
