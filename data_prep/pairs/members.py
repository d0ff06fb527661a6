"""Samples of several files under one name: members of webdataset tars, or images with captions beside them.

Which of the files are the image and the caption is decided by many samples, and can be named.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.pair import CAPTION_NAMES, MALFORMED_ROW, MISSING_FILE, SourceOptions, captions_in, read_image
from data_prep.reasons import NO_CAPTION
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES, split_name
from pipeline.errors import UserError
from pipeline.files import read_bounded, text_lines
from pipeline.tars import DamagedTar, headers, refuse_unended, skip_payload

_LOOKED_AT, _TARS_LOOKED_AT = 1_000, 10
"""Samples, and tars, spread over the source, that decide which members are used."""
TEXT_SUFFIXES = ("txt", "caption", "json")
"""Of captions beside images."""
LARGEST_IMAGE, LARGEST_TEXT = 1 << 30, 1 << 24
_RATIO = 50
"""How many times its own size a compressed tar may have; images hardly shrink."""


@dataclass
class PairFiles:
    """Files of one name: `parts` says by suffix where each is, offset and size in a tar or a path."""

    place: str
    file: str
    parts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    def text(self, suffix: str) -> str:
        """The text of a part. Raises ValueError if it is too large for a caption, OSError if it cannot be read."""
        where = self.parts[suffix]
        if not isinstance(where, tuple):
            return read_bounded(Path(where), most=LARGEST_TEXT).decode("utf-8-sig", "surrogateescape")
        offset, size = where
        if size > LARGEST_TEXT:
            raise ValueError(f"{suffix} has {size:,} bytes")
        with open(self.file, "rb") as file:
            file.seek(offset)
            return file.read(size).decode("utf-8-sig", "surrogateescape")


@dataclass(frozen=True)
class Choice:
    """The members in use: suffixes of images, and the places of captions (a suffix or `json:FIELD`) in order."""

    images: tuple[str, ...]
    captions: tuple[str, ...]
    lines: bool
    """Whether each line of a text is a caption."""

    def row(self, sample: PairFiles) -> PairRow:
        """The row of a sample."""
        if sample.problem:
            return PairRow(sample.place, problem=MALFORMED_ROW, detail=sample.problem)
        image = next((suffix for suffix in sample.parts if suffix in self.images), None)  # the first, as in training
        if image is None:
            return PairRow(sample.place, problem=MISSING_FILE, detail=f"it has only {', '.join(sample.parts)}")
        try:
            captions = next(filter(None, (self._texts(sample, place) for place in self.captions)), ())
        except (ValueError, AttributeError, RecursionError, OSError) as error:
            return PairRow(sample.place, problem=MALFORMED_ROW, detail=f"its caption cannot be read ({error})")
        if not captions:
            return PairRow(
                sample.place, problem=NO_CAPTION, detail=f"it has no {' or '.join(self.captions)}, or nothing in it"
            )
        where = sample.parts[image]
        at = where if isinstance(where, tuple) else ()
        return PairRow(sample.place, sample.file if at else where, captions, at=at)

    def _texts(self, sample: PairFiles, place: str) -> tuple[str, ...]:
        suffix, _, name = place.partition(":")
        if suffix not in sample.parts:
            return ()
        text = sample.text(suffix)
        if name:
            return captions_in(json.loads(text).get(name))
        return captions_in(text_lines(text) if self.lines else text)


def choose(samples: Sequence[PairFiles], options: SourceOptions, *, where: str, lines: bool = False) -> Choice:
    """Which members are image and caption: as named, else the usual ones that most of these samples have.

    Raises:
        UserError: What is named is in no sample, or there is nothing usual; the message lists the members.
    """
    counts: Counter[str] = Counter()
    for sample in samples:
        counts.update([*sample.parts, *_fields(sample)])
    pictures = [suffix for suffix, _ in counts.most_common() if suffix.rpartition(".")[2] in FORMAT_SUFFIXES]
    plain = [suffix for suffix in pictures if "." not in suffix]
    listed = f"Members of {len(samples):,} samples: {_shown(counts)}."
    if options.image is not None and options.image not in counts:
        raise UserError(f"--image {options.image!r} is in no sample of {where}. {listed}")
    images = [options.image] if options.image is not None else plain or pictures
    if not images:
        raise UserError(f"{where} has no images: these are not image-text pairs. {listed}")
    if len(images) > 1 and not plain:
        raise UserError(f"{where} has several images in a sample: name one with --image. {listed}")
    texts = [name for name in counts if name not in pictures and name != "json"]
    captions = []
    for wanted in options.caption:
        found = next((name for name in (wanted, f"json:{wanted}") if name in texts), None)
        if found is None:
            raise UserError(f"--caption {wanted!r} is in no sample of {where}. {listed}")
        captions.append(found)
    if not captions:
        dotted = [name for name in texts if name.endswith((".txt", ".caption"))]
        usual = ("txt", "caption", *(dotted if len(dotted) == 1 else ()), *(f"json:{name}" for name in CAPTION_NAMES))
        most = max((counts[name] for name in usual), default=0)
        captions = [name for name in usual if counts[name] and 2 * counts[name] >= most][:1]
    if not captions:
        raise UserError(f"{where} has no caption under a usual name: name it with --caption. {listed}")
    return Choice(tuple(images), tuple(captions), lines)


def _fields(sample: PairFiles) -> Iterator[str]:
    """The fields of a sample's JSON that hold texts."""
    if "json" in sample.parts:
        try:
            tree = json.loads(sample.text("json"))
        except (ValueError, RecursionError, OSError):  # a damaged one has no fields
            return
        if isinstance(tree, Mapping):
            yield from (f"json:{name}" for name, value in tree.items() if captions_in(value))


def _shown(counts: Counter[str]) -> str:
    found = [f"{name[:40]} {count:,}" for name, count in counts.most_common(15)]
    return ", ".join(found) + (", ..." if len(counts) > len(found) else "")


def _spread(samples: list[Any], count: int) -> list[Any]:
    return [samples[len(samples) * k // count] for k in range(count)] if len(samples) > count else samples


def note_of(choice: Choice, samples: Sequence[PairFiles]) -> str:
    """Which members are used, for the user, and what the samples without these captions have instead."""
    has = sum(choice.row(sample).problem not in (NO_CAPTION, MISSING_FILE) for sample in samples)
    without = [sample for sample in samples if choice.row(sample).problem == NO_CAPTION]
    usual = {"txt", "caption", *(f"json:{name}" for name in CAPTION_NAMES)}
    others = Counter(name for sample in without for name in {*sample.parts, *_fields(sample)} & usual)
    instead = "".join(f"; {count:,} others have {name}" for name, count in others.most_common(1))
    return (
        f"images: {', '.join(choice.images)}; captions: {', else '.join(choice.captions)} "
        f"({has:,} of {len(samples):,} samples looked at have both{instead}; --caption and --image choose others)"
    )


def open_tars(root: Path, tars: list[Path], options: SourceOptions, cache: Path) -> PairSource:
    """The samples of tars; compressed ones are unpacked into `cache` first.

    Raises:
        UserError: A tar is not complete, or the members are not clear; the message names it.
    """
    names = {tar: tar.relative_to(root).as_posix() for tar in tars}
    tars = [_unpacked(tar, cache, number) for number, tar in enumerate(tars)]
    shown = dict(zip(tars, names.values(), strict=True))
    looked = [sample for tar in _spread(tars, _TARS_LOOKED_AT) for sample in _tar_samples(tar, shown[tar])]
    if not looked:
        looked = [sample for tar in tars for sample in _tar_samples(tar, shown[tar])]
    where = str(root / names[next(iter(names))]) if len(tars) == 1 else str(root)
    if not looked:
        raise UserError(f"{where} holds no samples.")
    choice = choose(some := _spread(looked, _LOOKED_AT), options, where=where)
    rows = (choice.row(sample) for tar in tars for sample in _tar_samples(tar, shown[tar]))
    about = {"kind": "webdataset tars", "image": list(choice.images), "caption": list(choice.captions)}
    notes = (note_of(choice, some), *_gaps(list(names)))
    return PairSource(about, rows, root, read_image, group=False, notes=notes)


def _gaps(tars: list[Path]) -> Iterator[str]:
    """A note about numbers that are missing among the names of tars."""
    numbers = {int(tar.name.partition(".")[0]) for tar in tars if tar.name.partition(".")[0].isdecimal()}
    dense = numbers and max(numbers) - min(numbers) < 2 * len(numbers) + 100  # others are dates, for instance
    if dense and (missing := sorted(set(range(min(numbers), max(numbers))) - numbers)[:1_000]):
        some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        yield f"numbers are missing among the tars, from {min(numbers)} to {max(numbers)}: {some}"


def _tar_samples(tar: Path, shown: str) -> list[PairFiles]:
    """The samples of a tar by its headers; members of one name need not be neighbours.

    Raises:
        UserError: The tar is not complete.
    """
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
                    sample = known[key] = PairFiles(f"{shown}:{key}{again}", str(tar))
                    samples.append(sample)
                if suffix in sample.parts:
                    sample.problem = f"two members of its sample have the same suffix: {name}"
                elif kind:
                    sample.problem = f"its member {name} is {kind}: store the file itself"
                elif size > LARGEST_IMAGE:
                    sample.problem = f"its member {name} is large: {size:,} bytes"
                sample.parts[suffix] = (offset, size)
                last = key
    except (DamagedTar, OSError) as error:
        raise UserError(
            f"{shown} is not a complete tar, after {len(samples):,} samples ({error}): fetch it again, or move it away."
        ) from error
    return samples


def _unpacked(tar: Path, cache: Path, number: int) -> Path:
    """The tar, or if it is compressed, an unpacked copy with its date.

    Raises:
        UserError: It cannot be unpacked, or is many times larger than compressed.
    """
    with tar.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            return tar
    copy, limit = cache / f"{number}.tar", _RATIO * tar.stat().st_size + (1 << 20)
    cache.mkdir(parents=True, exist_ok=True)
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


def open_folder(folder: Path, options: SourceOptions) -> PairSource:
    """Images below a folder, with files of the same name for their captions.

    A line of a text file is a caption, unless `options.captions` is "one". Text files without an image come last.

    Raises:
        UserError: There are no captions, or what is named is not there.
    """
    some = _spread(list(itertools.islice(_image_samples(folder), 10 * _LOOKED_AT)), _LOOKED_AT)
    choice = choose(some, options, where=str(folder), lines=options.captions != "one")
    about = {"kind": "folder of images with captions beside them", "caption": list(choice.captions)}

    def rows() -> Iterator[PairRow]:
        for sample in _image_samples(folder):
            yield choice.row(sample)
        suffixes = tuple(f".{place}" for place in choice.captions if not place.startswith("json:"))
        for root, files in walk(folder):
            pictures = {known for name in files if is_image(name) for known in (name, Path(name).stem)}
            for name in files:
                if Path(name).suffix.lower() in suffixes and Path(name).stem not in pictures:
                    place = Path(root, name).relative_to(folder).as_posix()
                    yield PairRow(place, problem=MISSING_FILE, detail="no image of this name beside it")

    return PairSource(about, rows(), folder, read_image, notes=(note_of(choice, some),))


def _image_samples(folder: Path) -> Iterator[PairFiles]:
    """An image each, with the paths of the files of its name: `dog.txt` or `dog.jpg.txt` of `dog.jpg`."""
    for root, files in walk(folder):
        texts: dict[str, dict[str, str]] = {}
        for name in files:
            if not is_image(name):
                texts.setdefault(Path(name).stem, {})[Path(name).suffix.lower()[1:]] = os.path.join(root, name)
        for name in files:
            if is_image(name):
                path = Path(root, name)
                parts = {path.suffix.lower()[1:]: str(path), **texts.get(name, {}), **texts.get(path.stem, {})}
                yield PairFiles(path.relative_to(folder).as_posix(), str(path), parts)


def is_image(name: str) -> bool:
    """Whether a file is an image by its name."""
    return name.rpartition(".")[2].lower() in FORMAT_SUFFIXES and not name.startswith(".")


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders below a folder, links followed, with their files.

    Hidden folders, such as `.ipynb_checkpoints`, and links to a folder that they are in are left out.
    """
    for root, below, files in os.walk(folder, followlinks=True):
        here = Path(root).resolve()
        visible = (name for name in below if not name.startswith("."))
        below[:] = sorted(name for name in visible if not here.is_relative_to((here / name).resolve()))
        yield root, sorted(files)


def files_below(folder: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """The files with wanted names below a folder, in the order of `walk`.

    Raises:
        UserError: One is a link to nothing, a pipe or a device.
    """
    for path in (Path(root, name) for root, files in walk(folder) for name in files if wanted(name)):
        if not path.is_file():
            raise UserError(f"{path} is not a file, nor a link to one: mend it, or move it away.")
        yield path
