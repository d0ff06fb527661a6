"""Canonical tars: the same samples give the same bytes, on every machine and in any order of arrival.

Members are sorted by name and have no owner, date 0 and plain USTAR headers: PAX records, which every reader would have
to skip, stand only before members whose name or size needs them.
"""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from pipeline.data.shards.tar_reader import DamagedTar, members, split_name
from pipeline.errors import UserError
from pipeline.files import NotAFile, regular
from pipeline.pictures import FORMAT_SUFFIXES


def samples(path: str | Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Iterate over a webdataset tar as `(key, {extension: payload})`, in order.

    Raises:
        DamagedTar: The file is not a complete tar.
    """
    with open(path, "rb", opener=regular) as file:
        every = members(file, wanted=lambda suffix: True, strict=True)
        for key, parts in itertools.groupby(every, key=lambda member: split_name(member[0])[0]):
            yield key, {name.removeprefix(f"{key}."): payload for name, payload in parts}


def intact_samples(path: str | Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """`samples`, for callers that cannot do without any of them.

    Raises:
        UserError: The file is missing, or not a complete tar.
    """
    try:
        yield from samples(path)
    except (DamagedTar, FileNotFoundError, NotAFile) as error:
        raise UserError(
            f"{path} is missing or not a complete tar ({error}). Run `neuclip verify` to find all damage."
        ) from error


def picture(parts: Mapping[str, bytes]) -> bytes:
    """The encoded image among a sample's parts, or nothing."""
    return next((payload for name, payload in parts.items() if name.lower() in FORMAT_SUFFIXES), b"")


def write(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write a canonical tar of sorted `(name, payload)`."""
    with path.open("wb") as file:
        for name, payload in members:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(payload), 0o644, 0
            try:
                header = info.tobuf(tarfile.USTAR_FORMAT)
            except ValueError:
                header = info.tobuf(tarfile.PAX_FORMAT)
            file.writelines((header, payload, bytes(-len(payload) % tarfile.BLOCKSIZE)))
        file.write(bytes(2 * tarfile.BLOCKSIZE))
