"""Pairs of image files: listed in a CSV, TSV or JSONL table, beside a text file each, or in COCO's annotations."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from data_prep import reasons
from data_prep.pairs.listing import Listed
from data_prep.pairs.pair import MALFORMED_ROW, MISSING_FILE, SourceOptions, captions_in, choose_columns
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES
from pipeline.errors import UserError
from pipeline.files import other_encoding, text_lines

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
IMAGE_SUFFIXES = frozenset(f".{suffix}" for suffix in FORMAT_SUFFIXES)
CAPTION_SUFFIXES = (".txt", ".caption")
_DELIMITERS = ",\t;|"
_GUESSED_FROM = 20
"""Lines that the delimiter is guessed from."""
_NUMBERED = re.compile(r"(.+\.\w{3,5})#(\d+)$")


@dataclass(frozen=True)
class PairTable:
    """A table on this machine, and where its image paths start."""

    path: Path
    images: Path
    image: str
    caption: str
    header: tuple[str, ...] = ()
    """Column names of a file without a line of names."""

    def rows(self) -> Iterator[Listed]:
        """Stream every row of the table; unreadable rows have a problem."""
        with _open(self.path) as file:
            for number, row in _rows(file, self.path, self.header, table=self):
                place = f"{self.path.name}:{number}"
                if isinstance(row, str):
                    yield Listed(place, problem=MALFORMED_ROW, detail=row)
                    continue
                name = row.get(self.image)
                if not isinstance(name, str) or not name.strip():
                    yield Listed(place, problem=MALFORMED_ROW, detail=f"no image path in {self.image!r}")
                    continue
                yield Listed(place, str(image_path(self.images, name.strip())), captions_in(row.get(self.caption)))

    def names_image(self, line: str, *, delimiter: str, columns: Sequence[str]) -> bool:
        """Whether a line, split without regard to quotes, has one of the images at their place."""
        fields, place = line.strip("\r\n").split(delimiter), columns.index(self.image)
        found = [fields[i] for i in (place, place - len(columns)) if -len(fields) <= i < len(fields)]
        return any(_is_file(self.images / name.strip().strip('"')) for name in found)


def open_table(path: Path, options: SourceOptions) -> PairTable:
    """Read the head of a CSV, TSV or JSONL file to find its columns, and check that its images can be found.

    Raises:
        UserError: The file is empty or unreadable, columns are not found, or none of the first images exists.
    """
    head, found = find_columns(path, options)
    folder = options.images.absolute() if options.images else path.parent
    tried = [image_path(folder, row[found[0]].strip()) for row in head if isinstance(row.get(found[0]), str)]
    if tried and not any(map(_is_file, tried)):
        raise UserError(
            f"None of the first {len(tried)} images of {path} exists, such as {tried[0]}: paths in column "
            f"{found[0]!r} are relative to the table's folder, or to the folder given by --images."
        )
    return PairTable(path, folder, *found, options.header)


def find_columns(path: Path, options: SourceOptions) -> tuple[list[Mapping[str, Any]], tuple[str, str]]:
    """The first rows of a table, and its columns of images and captions; arguments and errors as for `open_table`."""
    with _open(path) as file:
        head = [row for _, row in itertools.islice(_rows(file, path, options.header), 100) if isinstance(row, Mapping)]
    if not head:
        raise UserError(f"{path} has no row that can be read: it must be UTF-8 text with a line of column names"
                        " (CSV, TSV), or one JSON object a line (JSONL).")  # fmt: skip
    names = list(dict.fromkeys(name for row in head for name in row))
    has_names = options.header or _is_json(path)
    note = "" if has_names else "If the table has no line of names, give them: --header image,caption."
    return head, choose_columns(names, options, where=str(path), note=note)


def image_path(folder: Path, name: str) -> Path:
    """The path of a table's image, without the number of the caption that Flickr8k appends: `dog.jpg#0`."""
    numbered = _NUMBERED.match(name)
    return folder / numbered[1] if numbered and not _is_file(folder / name) else folder / name


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # too long for a name
        return False


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        if wrong := other_encoding(file.read(4)):
            raise UserError(f"{path} {wrong}")
    # An invalid byte should affect one row only: it becomes a surrogate, and the row is dropped with a reason.
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


def _rows(
    file: TextIO, path: Path, header: Sequence[str], *, table: PairTable | None = None
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Line number and row; an unreadable row is its description. With `table`, quotes are checked as well."""
    return _json_rows(file) if _is_json(path) else _csv_rows(file, path, header, table)


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".jsonl", ".ndjson")


def _json_rows(file: TextIO) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"not JSON: {error}"
            continue
        yield number, row if isinstance(row, dict) else f"a {type(row).__name__}, not an object"


def _csv_rows(
    file: TextIO, path: Path, header: Sequence[str], table: PairTable | None
) -> Iterator[tuple[int, Mapping[str, Any] | str]]:
    """Line number and row; a row with a wrong number of fields is its description.

    Raises:
        UserError: A quote that is never closed makes one row of several.
    """
    csv.field_size_limit(1 << 24)
    head = list(itertools.islice(file, _GUESSED_FROM))
    file.seek(0)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else _delimiter(head)
    lines: list[str] = []

    def noted() -> Iterator[str]:
        for line in file:
            lines.append(line)
            yield line

    reader = csv.reader(noted(), delimiter=delimiter)
    names = list(header) if header else [name.strip() for name in next(reader, [])]
    if twice := sorted(name for name in set(names) if name and names.count(name) > 1):
        raise UserError(
            f"{path} has several columns called {twice[0]!r}: rename all but one of them in its first line."
        )
    while True:
        number = reader.line_num + 1
        lines.clear()
        fields, problem = list[str](), ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = str(error)
        if table is not None and len(lines) > 1:
            _check_quotes(lines, number, table, delimiter=delimiter, columns=names)
        if fields and len(fields) != len(names):
            problem = f"{len(fields)} fields instead of {len(names)}"
        if problem:
            yield number, problem
        elif fields:
            yield number, dict(zip(names, fields, strict=True))


def _delimiter(lines: Sequence[str]) -> str:
    """The delimiter that splits most of the lines into as many fields as the first, which must be several."""

    def agreement(delimiter: str) -> tuple[int, int]:
        counts = []
        with contextlib.suppress(csv.Error):
            counts += [len(fields) for fields in csv.reader(lines, delimiter=delimiter) if fields]
        return (counts.count(counts[0]) if counts and counts[0] > 1 else 0, lines[0].count(delimiter) if lines else 0)

    return max(_DELIMITERS, key=agreement)


def _check_quotes(lines: list[str], number: int, table: PairTable, *, delimiter: str, columns: Sequence[str]) -> None:
    """Refuse a row with the images of several rows: the others' text would become part of its caption.

    Raises:
        UserError: It has.
    """
    named = (line for line in lines if table.names_image(line, delimiter=delimiter, columns=columns))
    if len(list(itertools.islice(named, 2))) == 2:
        raise UserError(
            f"{table.path}: a quote is not closed in the row that begins at line {number:,}, which would swallow "
            f"{len(lines) - 1:,} lines. Close it, double the quotes inside values, or give the table as JSONL."
        )


def folder_rows(folder: Path, *, one_caption: bool) -> Iterator[Listed]:
    """Images below a folder, each with a `.txt` (or `.caption`) file of the same name.

    A line of it is a caption, or with `one_caption` the whole text. Text files without an image come last: theirs may
    be of another format or under another name.
    """
    for name in image_names(folder):
        path = folder / name
        texts = [path.with_suffix(suffix) for suffix in CAPTION_SUFFIXES]
        text = next((one for one in texts if one.is_file()), None)
        if text is None:
            yield Listed(name, problem=reasons.NO_CAPTION, detail=f"no {texts[0].name} beside it")
        else:
            caption = text.read_text(encoding="utf-8-sig", errors="surrogateescape")
            yield Listed(name, str(path), captions_in(caption if one_caption else text_lines(caption)))
    for root, files in _walk(folder):
        images = {Path(name).stem for name in files if Path(name).suffix.lower() in IMAGE_SUFFIXES}
        for name in files:
            if Path(name).suffix.lower() in CAPTION_SUFFIXES and Path(name).stem not in images:
                place = Path(root, name).relative_to(folder).as_posix()
                yield Listed(place, problem=MISSING_FILE, detail="no image of this name beside it")


def image_names(folder: Path) -> Iterator[str]:
    """Relative names of all image files below a folder, sorted folder by folder."""
    for root, files in _walk(folder):
        for name in files:
            if Path(name).suffix.lower() in IMAGE_SUFFIXES and not name.startswith("."):
                yield Path(root, name).relative_to(folder).as_posix()


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders below a folder, links followed, with their files; links to a folder that they are in are left out."""
    for root, below, files in os.walk(folder, followlinks=True):
        here = Path(root).resolve()
        below[:] = sorted(name for name in below if not here.is_relative_to((here / name).resolve()))
        yield root, sorted(files)


Coco = Mapping[str, list[dict[str, Any]]]
"""The lists `images` and `annotations` of COCO's `captions_*.json`, one JSON value that is read whole: 118,000 images
take about 0.5 GB while they are listed."""


def coco_rows(path: Path, tree: Coco, folder: Path) -> Iterator[Listed]:
    """The images of COCO's annotations; an image's captions become one sample."""
    captions: dict[Any, list[Any]] = {}
    lost = []
    known = {_id(image.get("id")) for image in tree["images"]}
    for number, annotation in enumerate(tree["annotations"]):
        if (key := _id(annotation.get("image_id"))) in known:
            captions.setdefault(key, []).append(annotation.get("caption"))
        else:
            lost.append((number, annotation.get("image_id")))
    for number, image in enumerate(tree["images"]):
        place = f"{path.name} images[{number}]"
        name = image.get("file_name")
        if not isinstance(name, str):
            yield Listed(place, problem=MALFORMED_ROW, detail="no file_name")
        else:
            yield Listed(place, str(folder / name), captions_in(captions.get(_id(image.get("id")), [])))
    for number, image_id in lost:
        place = f"{path.name} annotations[{number}]"
        yield Listed(place, problem=MISSING_FILE, detail=f"no image has the id {image_id}")


def _id(value: Any) -> Any:
    """An id as a key; one that is a list or a mapping, as text."""
    return repr(value) if isinstance(value, list | dict) else value


def read_coco(path: Path) -> Coco:
    """Read COCO's caption annotations.

    Raises:
        UserError: The file does not have COCO's format.
    """
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); tables with one object a line end in .jsonl.") from error
    parts = [tree.get(name) if isinstance(tree, dict) else None for name in ("images", "annotations")]
    if not all(isinstance(part, list) and all(isinstance(item, dict) for item in part) for part in parts):
        raise UserError(
            f"{path} is not COCO's caption format, a mapping with the lists `images` and `annotations`. Another JSON "
            "can be written as JSONL, one object with image path and caption a line."
        )
    if not any("caption" in item for item in tree["annotations"]):
        raise UserError(f"The annotations in {path} have no captions: take captions_*.json, not instances_*.json.")
    return {"images": tree["images"], "annotations": tree["annotations"]}


def find_coco_images(path: Path, tree: Coco, *, named: Path | None) -> Path:
    """The folder of the images of COCO's annotations: the one named, or the one near the file that has the first.

    Raises:
        UserError: The images are not found.
    """
    names = [image.get("file_name") for image in tree["images"][:100]]
    first = [name for name in names if isinstance(name, str)]
    if not first:
        raise UserError(f"{path} names no images.")
    near = [path.parent, path.parent.parent]
    candidates = [named.absolute()] if named else near + sorted(p for one in near for p in one.iterdir() if p.is_dir())
    for folder in candidates:
        if any((folder / name).is_file() for name in first):
            return folder
    raise UserError(
        f"The images of {path}, such as {first[0]}, are not in {', '.join(str(folder) for folder in candidates[:6])}: "
        "name their folder with --images."
    )
