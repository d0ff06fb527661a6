"""The samples of webdataset tars: listed by their headers, then read one at a time."""

from __future__ import annotations

import contextlib
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.pairs.listing import Listed, ListedSource
from data_prep.pairs.pair import CAPTION_NAMES, MALFORMED_ROW, Pair, captions_in
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES, DamagedTar, samples, split_name
from pipeline.errors import UserError
from pipeline.files import as_text


class TarSource(ListedSource):
    """Samples of webdataset tars, as found by their headers; payloads are read one sample at a time.

    `about["caption"]` is the suffix of the caption's member, or `json:FIELD`.
    """

    def pair(self, row: Listed) -> Pair:
        """The sample of a row."""
        try:
            key, parts = read_sample(row.image, row.offset)
        except (OSError, tarfile.TarError) as error:
            return Pair(row.place, problem=MALFORMED_ROW, detail=f"the tar cannot be read at this position ({error})")
        if not row.place.endswith(f":{as_text(key)}"):
            return Pair(row.place, problem=MALFORMED_ROW, detail="the tar has another sample at this position")
        image = next((body for suffix, body in parts.items() if suffix in FORMAT_SUFFIXES), b"")
        suffix, colon, field = self.about["caption"].partition(":")
        if suffix not in parts:
            return Pair(row.place, image)
        text = parts[suffix].decode("utf-8", "surrogateescape")
        if not colon:
            return Pair(row.place, image, captions_in(text))
        try:
            return Pair(row.place, image, captions_in(json.loads(text).get(field)))
        except (ValueError, AttributeError, RecursionError) as error:
            return Pair(row.place, problem=MALFORMED_ROW, detail=f"its JSON cannot be read ({error})")


def read_sample(path: str, offset: int) -> tuple[str, dict[str, bytes]]:
    """The key and, by suffix, the members of the sample that begins at this byte of a tar: webdataset's reader.

    Raises:
        OSError: The file cannot be read.
        tarfile.TarError: It is no tar there, or two members of the sample have the same suffix.
    """
    from webdataset.tariterators import group_by_keys, tar_file_iterator  # which imports torch

    with open(path, "rb") as file:
        file.seek(offset)
        members = ({**member, "__url__": path} for member in tar_file_iterator(file, skip_meta=None))
        try:
            sample: dict[str, Any] = next(group_by_keys(members, keys=_key_and_suffix), {"__key__": ""})
        except ValueError as error:
            name = error.args[0].rpartition(": duplicate file name")[0]
            raise tarfile.ReadError(f"two members of its sample have the same suffix: {name}") from error
    return sample["__key__"], {name: body for name, body in sample.items() if not name.startswith("__")}


def _key_and_suffix(name: str) -> tuple[str | None, str | None]:
    """As the list has them; None for what belongs to no sample."""
    stem, suffix = split_name(name)
    return (stem, suffix) if suffix and stem.rpartition("/")[2] else (None, None)


def tar_rows(root: Path, tars: list[Path]) -> Iterator[Listed]:
    """List one row per sample.

    Raises:
        UserError: A tar is not complete; the message names it.
    """
    for tar in tars:
        shown = tar.relative_to(root).as_posix() if tar != root else tar.name
        count, seen = 0, set[str]()
        try:
            with tar.open("rb") as file:
                for key, start in samples(file, strict=True):
                    count += 1
                    if key in seen:
                        detail = "its name occurs before in this tar: the files of a sample must be neighbours"
                        yield Listed(f"{shown}:{key}", problem=MALFORMED_ROW, detail=detail)
                        continue
                    seen.add(key)
                    yield Listed(f"{shown}:{key}", str(tar), offset=start)
        except (DamagedTar, OSError) as error:
            remedy = "it is compressed: gunzip it first" if _is_gzip(tar) else "fetch it again, or move it away"
            raise UserError(f"{tar} is not a complete tar, after {count:,} samples ({error}): {remedy}.") from error


def _is_gzip(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
    return False


def find_caption(tars: list[Path], *, wanted: str | None) -> str:
    """Where the captions are: a member's suffix or `json:FIELD`, as given, or as found in the first sample.

    Malformed samples before it are passed over here, and counted when all are read.

    Raises:
        UserError: The sample has no image or no caption; the message lists its members.
    """
    problem, parts = f"{tars[0]} holds no samples.", dict[str, bytes]()
    for row in (row for tar in tars for row in tar_rows(tar, [tar]) if not row.problem):
        try:
            _, parts = read_sample(row.image, row.offset)
            break
        except tarfile.TarError as error:
            problem = f"No sample of {tars[0]} can be read: {error}."
    else:
        raise UserError(problem)
    if not any(name in FORMAT_SUFFIXES for name in parts):
        raise UserError(f"The first sample of {tars[0]} has no image, but {', '.join(parts)}: not image-text pairs.")
    fields: list[str] = []
    if "json" in parts:
        with contextlib.suppress(ValueError, RecursionError):  # a damaged one has no fields
            tree = json.loads(parts["json"])
            fields = list(tree) if isinstance(tree, Mapping) else []
    offered = [name for name in parts if name not in FORMAT_SUFFIXES and name != "json"] + [
        f"json:{name}" for name in fields
    ]
    if wanted is not None:
        if wanted in offered or f"json:{wanted}" in offered:
            return wanted if wanted in offered else f"json:{wanted}"
        raise UserError(f"--caption {wanted!r} is not in {tars[0]}. Its first sample has: {', '.join(offered)}.")
    usual = ["txt", "caption", *(f"json:{name}" for name in CAPTION_NAMES)]
    found = next((name for name in usual if name in offered), None)
    if found is None:
        raise UserError(
            f"The first sample of {tars[0]} has no caption under a usual name: name it with --caption. It has: "
            f"{', '.join(offered) or 'nothing but the image'}."
        )
    return found
