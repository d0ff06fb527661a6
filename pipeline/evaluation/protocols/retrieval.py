"""Image-text retrieval: Recall@K in both directions; an image may have any number of captions.

Shape legend: n images, m captions, d feature dimension.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.compute import TextSide, ranks
from pipeline.evaluation.datasets.datacomp import Task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError, decode
from pipeline.evaluation.protocol import Outcomes, Protocol, register
from pipeline.files import replacing, write_text
from pipeline.pictures.pixels import WHITE

KS = (1, 5, 10)
BLOCK = 256
"""Rows of the similarity matrix at a time. It is fixed, because the last bits of a product depend on its shape."""
TOP = 5
THUMBNAIL = 160
EXAMPLES = 8
"""Captions, and images, that reports show."""
CAPTIONS_NAME, IMAGES_NAME = "examples.json", "images.json"


def outcomes(images: Tensor, texts: Tensor, *, side: TextSide, owner: np.ndarray) -> dict[str, np.ndarray]:
    """Per caption the rank of its image, per image the best rank of its captions; 0 is the first.

    Ties go to the lower index. Images are [n, d] unit features, texts those of the distinct captions, and `owner`, [m],
    has the captions' images.
    """
    own, captions = torch.from_numpy(owner), texts[side.rows]
    starts, by_image = range(0, len(captions), BLOCK), []
    by_caption = [ranks(captions[at : at + BLOCK] @ images.T, own[at : at + BLOCK]) for at in starts]
    for start in range(0, len(images), BLOCK):
        scores = side.similarities(images[start : start + BLOCK], texts)
        others = own[None, :] != torch.arange(start, start + len(scores))[:, None]
        by_image.append(ranks(scores, scores.masked_fill(others, -torch.inf).argmax(1)))
    return {
        "caption_owner": owner,
        "caption_rank": torch.cat(by_caption).numpy(),
        "image_rank": torch.cat(by_image).numpy(),
    }


def metrics(outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Recall@1, 5, 10 in both directions and the mean of both R@1; `text_retrieval` finds captions for an image."""
    values = {}
    for k in KS:
        values[f"image_retrieval_recall@{k}"] = float(np.mean(outcomes["caption_rank"] < k))
        values[f"text_retrieval_recall@{k}"] = float(np.mean(outcomes["image_rank"] < k))
    values["mean_recall@1"] = 0.5 * (values["image_retrieval_recall@1"] + values["text_retrieval_recall@1"])
    return values


@register("retrieval")
class Retrieval(Protocol):
    """The protocol on one task's data."""

    rows = "captions"
    scores = ("mean_recall@1", *(f"{side}_retrieval_recall@{k}" for side in ("image", "text") for k in KS))

    def __init__(self, task: Task, data: TaskData) -> None:
        if len(data.captions) != len(data.images):
            raise TaskError(f"{data.folder}: {len(data.images)} images, but captions for {len(data.captions)} of them.")
        self.task, self.data = task, data
        self.texts = TextSide([caption for own in data.captions for caption in own])

    def finish(self, kept: Outcomes, texts: Tensor) -> Outcomes:
        images = torch.from_numpy(kept["features"])
        owner = np.repeat(np.arange(len(images)), [len(own) for own in self.data.captions])
        return outcomes(images, texts, side=self.texts, owner=owner)

    def metrics(self, outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
        return metrics(outcomes)

    def chance(self) -> float | None:
        if self.task.main_metric != "mean_recall@1":
            return None
        own = np.array([len(captions) for captions in self.data.captions])
        return float(0.5 * (1 / len(own) + np.mean(own / own.sum())))  # of a random order

    def write_details(self, place: Path, *, outcomes: Outcomes, kept: Outcomes, texts: Tensor) -> None:
        features = (torch.from_numpy(kept["features"]), texts[self.texts.rows])
        write_examples(place.with_name(f"{place.name}.examples"), self.data, features=features)


def write_examples(folder: Path, data: TaskData, *, features: tuple[Tensor, Tensor]) -> None:
    """Write a few captions with their best images and images with their best captions.

    They are `EXAMPLES` each, chosen by position, so that two evaluations show the same. The files, which replace those
    in `folder`, are `examples.json` (text to image), `images.json` (image to text) and JPEG thumbnails. The unit-norm
    features are [n, d] of the images and [m, d] of the captions.
    """
    images, captions = features
    flat = [(caption, image) for image, own in enumerate(data.captions) for caption in own]
    by_caption, by_image = list[dict[str, Any]](), list[dict[str, Any]]()
    for k in _spaced(len(flat), EXAMPLES):
        (caption, image), (rank, best) = flat[k], _best(captions[k] @ images.T, {flat[k][1]})
        shown_images = [{"image": i, "file": f"{i}.jpg", **facts} for i, facts in best]
        by_caption.append({"caption": caption, "right": image, "rank": rank, "images": shown_images})
    for image in _spaced(len(images), EXAMPLES):
        rank, best = _best(captions @ images[image], {k for k, (_, owner) in enumerate(flat) if owner == image})
        shown_captions = [{"caption": flat[k][0], **facts} for k, facts in best]
        own = list(data.captions[image])
        by_image.append({"image": image, "file": f"{image}.jpg", "rank": rank, "own": own, "captions": shown_captions})
    shown = {example["right"] for example in by_caption} | {example["image"] for example in by_image}
    shown |= {image["image"] for example in by_caption for image in example["images"]}
    if folder.is_symlink():
        folder.unlink()
    for name in (CAPTIONS_NAME, IMAGES_NAME):  # until all is there again, so that nothing of two evaluations is shown
        (folder / name).unlink(missing_ok=True)
    for index in sorted(shown):
        background = WHITE if data.on_background else None
        image = decode(data.images.read(index), name=data.images.name(index), background=background)
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        with replacing(folder / f"{index}.jpg") as temporary:
            image.save(temporary, "JPEG", quality=85)
    for name, examples in ((CAPTIONS_NAME, by_caption), (IMAGES_NAME, by_image)):
        write_text(folder / name, json.dumps(examples, indent=1, ensure_ascii=False) + "\n", durable=True)
    for name in {path.name for path in folder.glob("[0-9]*.jpg")} - {f"{index}.jpg" for index in shown}:
        (folder / name).unlink(missing_ok=True)  # of earlier data


def _spaced(total: int, count: int) -> list[int]:
    """`count` numbers below `total`, evenly spaced and without repetition."""
    count = min(count, total)
    return [round(k * (total - 1) / max(1, count - 1)) for k in range(count)]


def _best(scores: Tensor, right: set[int]) -> tuple[int, list[tuple[int, dict[str, Any]]]]:
    """The rank of the first right candidate, and the best ones with their scores."""
    order = torch.sort(scores, descending=True, stable=True).indices.tolist()
    best = [(k, {"score": round(float(scores[k]), 4), "right": k in right}) for k in order[:TOP]]
    return next(rank for rank, k in enumerate(order) if k in right), best
