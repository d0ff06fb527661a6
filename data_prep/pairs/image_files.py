"""Pairs of image files: a folder with a text file beside each image, and COCO's caption annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.pairs.listing import Listed
from data_prep.pairs.pair import MALFORMED_ROW, MISSING_FILE, captions_in
from pipeline.data.shards.tar_reader import FORMAT_SUFFIXES
from pipeline.errors import UserError
from pipeline.files import text_lines

SUFFIXES = frozenset(f".{suffix}" for suffix in FORMAT_SUFFIXES)
CAPTION_SUFFIXES = (".txt", ".caption")


@dataclass(frozen=True)
class ImageFolder:
    """Images below a folder, each with a `.txt` (or `.caption`) file of the same name: a line is a caption."""

    path: Path
    one_caption: bool = False
    """Several lines are one caption."""

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "folder with text files"}

    def rows(self) -> Iterator[Listed]:
        for name in image_names(self.path):
            path = self.path / name
            texts = [path.with_suffix(suffix) for suffix in CAPTION_SUFFIXES]
            text = next((one for one in texts if one.is_file()), None)
            if text is None:
                yield Listed(name, problem=reasons.NO_CAPTION, detail=f"no {texts[0].name} beside it")
            else:
                caption = text.read_text(encoding="utf-8-sig", errors="surrogateescape")
                yield Listed(name, str(path), captions_in(caption if self.one_caption else text_lines(caption)))
        yield from self._lonely_texts()

    def _lonely_texts(self) -> Iterator[Listed]:
        """Text files without an image, which may be images of another format or under another name."""
        for root, files in _walk(self.path):
            images = {Path(name).stem for name in files if Path(name).suffix.lower() in SUFFIXES}
            for name in files:
                if Path(name).suffix.lower() in CAPTION_SUFFIXES and Path(name).stem not in images:
                    place = Path(root, name).relative_to(self.path).as_posix()
                    yield Listed(place, problem=MISSING_FILE, detail="no image of this name beside it")


def image_names(folder: Path) -> Iterator[str]:
    """Relative names of all image files below a folder, sorted folder by folder."""
    for root, files in _walk(folder):
        for name in files:
            if Path(name).suffix.lower() in SUFFIXES and not name.startswith("."):
                yield Path(root, name).relative_to(folder).as_posix()


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders below a folder, links followed, with their files; links to a folder that they are in are left out."""
    for root, below, files in os.walk(folder, followlinks=True):
        here = Path(root).resolve()
        below[:] = sorted(name for name in below if not here.is_relative_to((here / name).resolve()))
        yield root, sorted(files)


@dataclass(frozen=True)
class CocoCaptions:
    """COCO's `captions_*.json`: `images` and `annotations`; an image's captions become one sample.

    The file is one JSON value and is read whole: COCO's 118,000 images take about 0.5 GB while they are listed.
    """

    path: Path
    images: Path

    @property
    def facts(self) -> dict[str, Any]:
        return {"kind": "COCO captions"}

    def rows(self) -> Iterator[Listed]:
        tree = read_coco(self.path)
        captions: dict[Any, list[Any]] = {}
        lost = []
        known = {_id(image.get("id")) for image in tree["images"]}
        for number, annotation in enumerate(tree["annotations"]):
            if (key := _id(annotation.get("image_id"))) in known:
                captions.setdefault(key, []).append(annotation.get("caption"))
            else:
                lost.append((number, annotation.get("image_id")))
        for number, image in enumerate(tree["images"]):
            place = f"{self.path.name} images[{number}]"
            name = image.get("file_name")
            if not isinstance(name, str):
                yield Listed(place, problem=MALFORMED_ROW, detail="no file_name")
            else:
                yield Listed(place, str(self.images / name), captions_in(captions.get(_id(image.get("id")), [])))
        for number, image_id in lost:
            place = f"{self.path.name} annotations[{number}]"
            yield Listed(place, problem=MISSING_FILE, detail=f"no image has the id {image_id}")


def _id(value: Any) -> Any:
    """An id as a key; one that is a list or a mapping, as text."""
    return repr(value) if isinstance(value, list | dict) else value


def read_coco(path: Path) -> dict[str, list[dict[str, Any]]]:
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


def open_coco(path: Path, *, images: Path | None) -> CocoCaptions:
    """COCO's annotations and the folder of their images: the one named, or the one near the file that has the first.

    Raises:
        UserError: The file does not have COCO's format, or the images are not found.
    """
    names = [image.get("file_name") for image in read_coco(path)["images"][:100]]
    first = [name for name in names if isinstance(name, str)]
    if not first:
        raise UserError(f"{path} names no images.")
    near = [path.parent, path.parent.parent]
    candidates = (
        [images] if images is not None else near + sorted(p for one in near for p in one.iterdir() if p.is_dir())
    )
    for folder in candidates:
        if any((folder / name).is_file() for name in first):
            return CocoCaptions(path, folder)
    raise UserError(
        f"The images of {path}, such as {first[0]}, are not in {', '.join(str(folder) for folder in candidates[:6])}: "
        "name their folder with --images."
    )
