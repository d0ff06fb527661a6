"""A few captions with their best images and images with their best captions, for reports.

They are chosen by position, so that two evaluations show the same.
"""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.evaluation.datasets.task_data import TaskData, decode
from pipeline.files import write_text

TOP = 5
THUMBNAIL = 160
CAPTIONS_NAME, IMAGES_NAME = "examples.json", "images.json"


def write_examples(folder: Path, data: TaskData, *, features: tuple[Tensor, Tensor], count: int) -> None:
    """Write `examples.json` (text to image), `images.json` (image to text) and JPEG thumbnails.

    Args:
        folder: Output folder; existing files are replaced.
        data: The task's images and captions.
        features: [n, d] of the images and [m, d] of the captions, unit norm.
        count: How many captions and how many images, evenly spaced.
    """
    images, captions = features
    flat = [(caption, image) for image, own in enumerate(data.captions) for caption in own]
    by_caption = [_best_images(flat[k], captions[k] @ images.T) for k in _spaced(len(flat), count)]
    by_image = [_best_captions(k, flat, captions @ images[k]) for k in _spaced(len(images), count)]
    shown = {example["right"] for example in by_caption} | {example["image"] for example in by_image}
    shown |= {image["image"] for example in by_caption for image in example["images"]}
    made = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
    try:
        made.mkdir(parents=True)
        for index in sorted(shown):
            image = decode(data.images.read(index), name=data.images.name(index))
            image.thumbnail((THUMBNAIL, THUMBNAIL))
            image.save(made / f"{index}.jpg", quality=85)
        for name, examples in ((CAPTIONS_NAME, by_caption), (IMAGES_NAME, by_image)):
            write_text(made / name, json.dumps(examples, indent=1, ensure_ascii=False) + "\n", durable=True)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another evaluation has just written the same
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _spaced(total: int, count: int) -> list[int]:
    """`count` numbers below `total`, evenly spaced and without repetition."""
    return list(dict.fromkeys(round(k * (total - 1) / max(1, count - 1)) for k in range(min(count, total))))


def _best_images(caption: tuple[str, int], scores: Tensor) -> dict[str, Any]:
    text, right = caption
    order = torch.sort(scores, descending=True, stable=True).indices
    best = [
        {"image": k, "file": f"{k}.jpg", "score": round(float(scores[k]), 4), "right": k == right}
        for k in order[:TOP].tolist()
    ]
    return {"caption": text, "right": right, "rank": int((order == right).nonzero()), "images": best}


def _best_captions(image: int, flat: Sequence[tuple[str, int]], scores: Tensor) -> dict[str, Any]:
    order = torch.sort(scores, descending=True, stable=True).indices.tolist()
    best = [
        {"caption": flat[k][0], "score": round(float(scores[k]), 4), "right": flat[k][1] == image} for k in order[:TOP]
    ]
    rank = next(position for position, k in enumerate(order) if flat[k][1] == image)
    own = [text for text, owner in flat if owner == image]
    return {"image": image, "file": f"{image}.jpg", "rank": rank, "own": own, "captions": best}
