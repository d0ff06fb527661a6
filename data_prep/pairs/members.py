"""Samples of several files under one name: members of webdataset tars, or images with captions beside them.

Which of the files are the image and the caption is decided by many samples, and can be named.
"""

from __future__ import annotations

import gzip
import itertools
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.pair import (
    CAPTION_NAMES,
    MALFORMED_ROW,
    MISSING_FILE,
    PairOptions,
    captions_in,
    read_image,
    read_part,
)
from data_prep.reasons import NO_CAPTION
from pipeline.data.shards.tar_reader import split_name
from pipeline.errors import UserError
from pipeline.files import read_bounded, text_lines, walk
from pipeline.pictures import FORMAT_SUFFIXES
from pipeline.tars import DamagedTar, headers, refuse_unended, skip_payload

_LOOKED_AT, _TARS_LOOKED_AT = 1_000, 10
"""Samples, and tars, spread over the source, that decide which members are used."""
_LARGEST_IMAGE, _LARGEST_TEXT = 1 << 30, 1 << 24
_RATIO = 50
"""How many times its own size a compressed tar may have; images hardly shrink."""


@dataclass
class PairFiles:
    """Files of one name: `parts` says by suffix where each is, as file, and in a tar with offset and size."""

    place: str
    parts: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    problem: str = ""

    def text(self, suffix: str) -> str:
        """The text of a part. Raises ValueError if it is too large for a caption, OSError if it cannot be read."""
        file, at = self.parts[suffix]
        if at and at[1] > _LARGEST_TEXT:
            raise ValueError(f"{suffix} has {at[1]:,} bytes")
        body = read_part(file, at) if at else read_bounded(Path(file), most=_LARGEST_TEXT)
        return body.decode("utf-8-sig", "surrogateescape")

    def names(self) -> list[str]:
        """Its suffixes, and as `json:FIELD` the fields of its JSON that hold texts; a damaged JSON has none."""
        tree = None
        with suppress(ValueError, RecursionError, OSError):
            tree = json.loads(self.text("json")) if "json" in self.parts else None
        fields = tree.items() if isinstance(tree, Mapping) else ()
        return [*self.parts, *(f"json:{name}" for name, value in fields if captions_in(value))]


@dataclass(frozen=True)
class Choice:
    """The members in use: suffixes of images, and the places of captions (a suffix or `json:FIELD`) in order."""

    images: tuple[str, ...]
    captions: tuple[str, ...]
    lines: bool
    """Whether each line of a text is a caption."""

    def row(self, sample: PairFiles) -> PairRow:
        """The row of a sample."""

        def lost(problem: str, detail: str) -> PairRow:
            return PairRow(sample.place, problem=problem, detail=detail)

        if sample.problem:
            return lost(MALFORMED_ROW, sample.problem)
        image = next((suffix for suffix in sample.parts if suffix in self.images), None)  # the first, as in training
        if image is None:
            return lost(MISSING_FILE, f"it has only {', '.join(sample.parts)}")
        try:
            captions = next(filter(None, (self._texts(sample, place) for place in self.captions)), ())
        except (ValueError, AttributeError, RecursionError, OSError) as error:
            return lost(MALFORMED_ROW, f"its caption cannot be read ({error})")
        if not captions:
            return lost(NO_CAPTION, f"it has no {' or '.join(self.captions)}, or nothing in it")
        file, at = sample.parts[image]
        return PairRow(sample.place, file, captions, at=at)

    def _texts(self, sample: PairFiles, place: str) -> tuple[str, ...]:
        suffix, _, name = place.partition(":")
        if suffix not in sample.parts:
            return ()
        text = sample.text(suffix)
        return captions_in(json.loads(text).get(name) if name else text_lines(text) if self.lines else text)


def _choose(
    samples: Sequence[PairFiles], options: PairOptions, *, where: str, lines: bool = False
) -> tuple[Choice, str]:
    """Which members are image and caption: as named, else the usual ones that most of these samples have; and a note
    about it for the user, also about what the samples without these captions have instead."""
    present = [sample.names() for sample in samples]
    counts = Counter(name for names in present for name in names)
    some = ", ".join(f"{name[:40]} {count:,}" for name, count in counts.most_common(15))
    listed = f"Members of {len(samples):,} samples: {some}{', ...' if len(counts) > 15 else ''}."
    pictures = [suffix for suffix, _ in counts.most_common() if suffix.rpartition(".")[2] in FORMAT_SUFFIXES]
    plain = [suffix for suffix in pictures if "." not in suffix]
    images = [options.image] if options.image is not None else plain or pictures
    if options.image is not None and options.image not in counts:
        raise UserError(f"--image {options.image!r} is in no sample of {where}. {listed}")
    if not images:
        raise UserError(f"{where} has no images: these are not image-text pairs. {listed}")
    if len(images) > 1 and not plain:
        raise UserError(f"{where} has several images in a sample: name one with --image. {listed}")
    texts = [name for name in counts if name not in pictures and name != "json"]
    captions = []
    for wanted in options.caption:
        if not (known := [name for name in (wanted, f"json:{wanted}") if name in texts]):
            raise UserError(f"--caption {wanted!r} is in no sample of {where}. {listed}")
        captions.append(known[0])
    usual = ("txt", "caption", *(f"json:{name}" for name in CAPTION_NAMES))
    if not captions:
        dotted = [name for name in texts if name.endswith((".txt", ".caption"))]
        names = (*usual[:2], *(dotted if len(dotted) == 1 else ()), *usual[2:])
        most = max((counts[name] for name in names), default=0)
        captions = [name for name in names if counts[name] and 2 * counts[name] >= most][:1]
    if not captions:
        raise UserError(f"{where} has no caption under a usual name: name it with --caption. {listed}")
    choice = Choice(tuple(images), tuple(captions), lines)
    problems = [choice.row(sample).problem for sample in samples]
    has = sum(problem not in (NO_CAPTION, MISSING_FILE) for problem in problems)
    without = (names for names, problem in zip(present, problems, strict=True) if problem == NO_CAPTION)
    others = Counter(name for names in without for name in names if name in usual)
    instead = "".join(f"; {count:,} others have {name}" for name, count in others.most_common(1))
    return choice, (
        f"images: {', '.join(images)}; captions: {', else '.join(captions)} "
        f"({has:,} of {len(samples):,} samples looked at have both{instead}; --caption and --image choose others)"
    )


def _spread(items: list[Any], count: int) -> list[Any]:
    """At most `count` of these, spread evenly."""
    return [items[len(items) * k // count] for k in range(count)] if len(items) > count else items


def open_tars(root: Path, tars: list[Path], options: PairOptions, cache: Path) -> PairSource:
    """The samples of tars; compressed ones are unpacked into `cache` first.

    Raises:
        UserError: A tar is not complete, or the members are not clear; the message names it.
    """
    names = [tar.relative_to(root).as_posix() for tar in tars]
    files = [(_unpacked(tar, cache / f"{number}.tar"), name)
             for number, (tar, name) in enumerate(zip(tars, names, strict=True))]  # fmt: skip
    where = str(tars[0]) if len(tars) == 1 else str(root)
    samples = [sample for file in _spread(files, _TARS_LOOKED_AT) for sample in _tar_samples(*file)]
    samples = samples or [sample for file in files for sample in _tar_samples(*file)]
    if not samples:
        raise UserError(f"{where} holds no samples.")
    choice, note = _choose(_spread(samples, _LOOKED_AT), options, where=where)
    rows = (choice.row(sample) for file in files for sample in _tar_samples(*file))
    about = {"kind": "webdataset tars", "image": list(choice.images), "caption": list(choice.captions)}
    return PairSource(about, rows, root, read_image, notes=(note, *_gaps(names)))


def _gaps(tars: list[str]) -> Iterator[str]:
    """A note about numbers that are missing among the names of tars."""
    numbers = {int(stem) for name in tars if (stem := name.rpartition("/")[2].partition(".")[0]).isdecimal()}
    dense = numbers and max(numbers) - min(numbers) < 2 * len(numbers) + 100  # others are dates, for instance
    if dense and (missing := sorted(set(range(min(numbers), max(numbers))) - numbers)[:1_000]):
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        yield f"numbers are missing among the tars, from {min(numbers)} to {max(numbers)}: {some}"


def _tar_samples(tar: Path, shown: str) -> list[PairFiles]:
    """The samples of a tar by its headers; members of one name need not be neighbours. Refuses a damaged tar."""
    samples: list[PairFiles] = []
    known: dict[str, PairFiles] = {}
    last = ""
    try:
        with tar.open("rb") as file:
            for name, size, offset, kind in headers(file, strict=True, on_unended=refuse_unended):
                skip_payload(file, size)
                if name.rpartition("/")[2].find(".") <= 0:
                    continue  # webdataset's rule, which ignores `README` and macOS's `._0.jpg`
                key, suffix = split_name(name)
                sample = known.get(key)
                if sample is None or (suffix in sample.parts and key != last):
                    again = " (again)" if sample else ""  # webdataset, too, takes it for another sample
                    sample = known[key] = PairFiles(f"{shown}:{key}{again}")
                    samples.append(sample)
                if suffix in sample.parts:
                    sample.problem = f"two members of its sample have the same suffix: {name}"
                elif kind:
                    sample.problem = f"its member {name} is {kind}: store the file itself"
                elif size > _LARGEST_IMAGE:
                    sample.problem = f"its member {name} is large: {size:,} bytes"
                sample.parts[suffix] = (str(tar), (offset, size))
                last = key
    except (DamagedTar, OSError) as error:
        raise UserError(
            f"{shown} is not a complete tar, after {len(samples):,} samples ({error}): fetch it again, or move it away."
        ) from error
    return samples


def _unpacked(tar: Path, copy: Path) -> Path:
    """The tar, or if it is compressed, an unpacked copy with its date, unless that is many times larger."""
    with tar.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return tar
    limit = _RATIO * tar.stat().st_size + (1 << 20)
    try:
        with gzip.open(tar) as packed, copy.open("wb") as file:
            while piece := packed.read(1 << 24):
                file.write(piece)
                if file.tell() > limit:
                    raise UserError(f"{tar} has more than {_RATIO} times its size unpacked: no images do.")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{tar} is not a complete gzip file ({error}): fetch it again, or move it away.") from error
    shutil.copystat(tar, copy)
    return copy


def open_folder(folder: Path, options: PairOptions) -> PairSource:
    """Images below a folder, with files of the same name for their captions.

    A line of a text file is a caption, unless `options.captions` is "one". Text files without an image come last.

    Raises:
        UserError: There are no captions, or what is named is not there.
    """
    some = _spread(list(itertools.islice(_image_samples(folder), 10 * _LOOKED_AT)), _LOOKED_AT)
    choice, note = _choose(some, options, where=str(folder), lines=options.captions != "one")
    about = {"kind": "folder of images with captions beside them", "caption": list(choice.captions)}

    def rows() -> Iterator[PairRow]:
        yield from map(choice.row, _image_samples(folder))
        suffixes = tuple(f".{place}" for place in choice.captions if not place.startswith("json:"))
        for files in walk(folder):
            pictures = {known for file in files if is_image(file) for known in (file.name, file.stem)}
            for file in files:
                if file.suffix.lower() in suffixes and file.stem not in pictures:
                    place = file.relative_to(folder).as_posix()
                    yield PairRow(place, problem=MISSING_FILE, detail="no image of this name beside it")

    return PairSource(about, rows(), folder, read_image, notes=(note,))


def _image_samples(folder: Path) -> Iterator[PairFiles]:
    """An image each, with the paths of the files of its name: `dog.txt` or `dog.jpg.txt` of `dog.jpg`."""
    for files in walk(folder):
        texts: dict[str, dict[str, Any]] = {}
        for file in itertools.filterfalse(is_image, files):
            texts.setdefault(file.stem, {})[file.suffix.lower()[1:]] = (str(file), ())
        for file in filter(is_image, files):
            image = {file.suffix.lower()[1:]: (str(file), ())}
            parts = {**image, **texts.get(file.name, {}), **texts.get(file.stem, {})}
            yield PairFiles(file.relative_to(folder).as_posix(), parts)


def is_image(file: Path) -> bool:
    """Whether a file is an image by its name."""
    return file.name.rpartition(".")[2].lower() in FORMAT_SUFFIXES and not file.name.startswith(".")
