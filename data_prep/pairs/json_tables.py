"""Tables of image files in one JSON: a list, a mapping, COCO's annotations or Karpathy's splits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.pairs.listing import PairRow
from data_prep.pairs.pair import (
    CAPTION_NAMES,
    IMAGE_NAMES,
    MALFORMED_ROW,
    MISSING_FILE,
    URL_NAMES,
    SourceOptions,
    refuse_split,
    shortened,
)
from data_prep.sources.text_rows import json_items, open_text
from pipeline.errors import UserError
from pipeline.files import distinct_names

SPLITS = "splits"
"""Field of a row of Karpathy's splits: the names of all."""

Read = Iterator[tuple[str, Mapping[str, Any] | PairRow]]
"""Place and row; an unreadable row is a `PairRow` with its problem."""


def tree_rows(path: Path, options: SourceOptions) -> Read:
    """The rows of a JSON file, which is read whole: 118,000 images of COCO take about 0.5 GB.

    Raises:
        UserError: It is not JSON, or of no known form.
    """
    try:
        with open_text(path) as file:
            tree = json.load(file, object_pairs_hook=distinct_names)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); tables with one object a line end in .jsonl.") from error
    images: Any
    annotations: Any
    images, annotations = (tree.get(name) if isinstance(tree, dict) else None for name in ("images", "annotations"))
    if _are_objects(images) and _are_objects(annotations):
        if not any("caption" in item for item in annotations):
            raise UserError(f"The annotations in {path} have no captions: take captions_*.json, not instances_*.json.")
        refuse_split(options, f"{path}, which names no splits")
        yield from _coco(path.name, images, annotations)
        return
    if _are_objects(images) and any("sentences" in item for item in images):
        for number, row in _karpathy(path, images, options):
            yield f"{path.name} images[{number}]", row
        return
    refuse_split(options, f"{path}, which names no splits")
    columns = _columns(tree)
    is_columnar = columns is not None
    for name, item in json_items(path, columns or tree, key="image", value="caption", is_columnar=is_columnar):
        place = f"{path.name} [{shortened(name) if isinstance(name, str) else name}]"
        yield place, PairRow(place, problem=MALFORMED_ROW, detail=item) if isinstance(item, str) else item


def _are_objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _columns(tree: Any) -> dict[str, Any] | None:
    """The columns by name, if a mapping has lists of them, as SBU's captions, or values by row, as pandas writes."""
    if not isinstance(tree, dict):
        return None
    names, values = {name.lower() for name in tree}, list(tree.values())
    if not (names & {*IMAGE_NAMES, *URL_NAMES} and names & set(CAPTION_NAMES)):
        return None
    if all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        return {name: [column[row] for row in values[0]] for name, column in tree.items()}
    return tree if all(isinstance(value, list) for value in values) else None


def _karpathy(path: Path, images: list[dict[str, Any]], options: SourceOptions) -> Iterator[tuple[int, dict[str, Any]]]:
    """Andrej Karpathy's splits of COCO and Flickr, of which training takes `train` unless others are named."""
    splits = list(dict.fromkeys(str(image.get("split")) for image in images))
    wanted = options.split.split(",") if options.split else ["train"] if "train" in splits else splits
    if unknown := [name for name in wanted if name not in splits]:
        raise UserError(f"{path} has no split {unknown[0]!r}: choose with --split. It has: {', '.join(splits)}.")
    for number, image in enumerate(images):
        if str(image.get("split")) in wanted:
            parts = [str(image[name]) for name in ("filepath", "filename") if image.get(name)]
            yield number, {"image": "/".join(parts), "caption": image.get("sentences"), SPLITS: ", ".join(splits)}


def _coco(name: str, images: list[dict[str, Any]], annotations: list[dict[str, Any]]) -> Read:
    """The images of COCO's annotations, each with all of its captions; last, annotations without an image."""
    ids = Counter(_id(image.get("id")) for image in images)
    captions: dict[Any, list[Any]] = {key: [] for key in ids}
    lost = []
    for number, annotation in enumerate(annotations):
        if (key := _id(annotation.get("image_id"))) in captions:
            captions[key].append(annotation.get("caption"))
        else:
            lost.append((f"{name} annotations[{number}]", annotation.get("image_id")))
    for number, image in enumerate(images):
        place, key = f"{name} images[{number}]", _id(image.get("id"))
        twice = PairRow(place, problem=MALFORMED_ROW, detail=f"{ids[key]:,} images have the id {shortened(str(key))}")
        yield place, twice if ids[key] > 1 else {"file_name": image.get("file_name"), "caption": captions[key]}
    for place, image_id in lost:
        detail = f"no image has the id {shortened(str(image_id))}"
        yield place, PairRow(place, problem=MISSING_FILE, detail=detail)


def _id(value: Any) -> Any:
    """An id as a key; one that is a list or a mapping, as text."""
    return repr(value) if isinstance(value, list | dict) else value
