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
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
        tree = json.loads(text, object_pairs_hook=distinct_names)
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
        rows = [(f"images[{number}]", row) for number, row in _karpathy(path, images, options)]
    else:
        refuse_split(options, f"{path}, which names no splits")
        rows = _listed(path, tree)
    for number, row in rows:
        place = f"{path.name} {number}"
        good = isinstance(row, dict)
        yield (
            place,
            row if good else PairRow(place, problem=MALFORMED_ROW, detail=f"a {type(row).__name__}, not an object"),
        )


def _listed(path: Path, tree: Any) -> list[tuple[str, Any]]:
    """The rows of a list, of a mapping of images to captions or objects, or of columns to lists or values by row.

    Raises:
        UserError: The lists of columns differ in length.
    """
    if isinstance(tree, list):
        return [(f"[{number}]", row) for number, row in enumerate(tree)]
    if not isinstance(tree, dict):
        return []
    values = list(tree.values())
    if _is_columnar(tree) and all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        tree = {name: [column[row] for row in values[0]] for name, column in tree.items()}  # as pandas writes them
    if _is_columnar(tree) and all(isinstance(value, list) for value in tree.values()):
        sizes = {name: len(column) for name, column in tree.items()}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{name[:60]} {size:,}" for name, size in list(sizes.items())[:10])
            raise UserError(f"{path} has columns of different lengths, so that no row is certain: {listed}.")
        return [(f"[{k}]", dict(zip(tree, row, strict=True))) for k, row in enumerate(zip(*tree.values(), strict=True))]
    return [(f"[{shortened(name)}]", {"image": name, **value} if isinstance(value, dict)
             else {"image": name, "caption": value}) for name, value in tree.items()]  # fmt: skip


def _are_objects(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, dict) for item in items)


def _is_columnar(tree: Mapping[str, Any]) -> bool:
    """Whether the names of a mapping are those of columns, as in SBU's captions."""
    names = {name.lower() for name in tree}
    return bool(names & {*IMAGE_NAMES, *URL_NAMES} and names & set(CAPTION_NAMES))


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
