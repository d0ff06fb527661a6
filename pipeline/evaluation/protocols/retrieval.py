"""Image-text retrieval: Recall@K in both directions; an image may have any number of captions.

Shape legend: n images, m captions, d feature dimension.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pipeline.evaluation.datasets.task import Task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.runner.texts import TextSide

KS = (1, 5, 10)
BLOCK = 256
"""Rows of the similarity matrix at a time. It is fixed, because the last bits of a product depend on its shape."""


def check(data: TaskData) -> None:
    """Check that every image has captions.

    Raises:
        TaskError: There are no captions, or not for every image.
    """
    if len(data.captions) != len(data.images):
        raise TaskError(f"{data.folder}: {len(data.images)} images, but captions for {len(data.captions)} of them.")
    bare = [index for index, own in enumerate(data.captions) if not own]
    if bare:
        raise TaskError(
            f"{len(bare)} of {len(data.images)} images have no caption, the first: {data.images.name(bare[0])}."
        )


def owners(data: TaskData) -> np.ndarray:
    """[m] the image of every caption, captions in the order of their images."""
    return np.repeat(np.arange(len(data.captions)), [len(own) for own in data.captions])


def outcomes(images: Tensor, texts: Tensor, *, side: TextSide, owner: np.ndarray) -> dict[str, np.ndarray]:
    """Per caption the rank of its image, per image the best rank of its captions; 0 is the first.

    Ties go to the lower index.

    Args:
        images: [n, d] unit features.
        texts: [distinct captions, d] unit features.
        side: The captions.
        owner: [m] the captions' images.
    """
    own, captions = torch.from_numpy(owner), texts[side.rows]
    image_rank = [
        _rank(captions[start : start + BLOCK] @ images.T, own[start : start + BLOCK])
        for start in range(0, len(captions), BLOCK)
    ]
    text_rank = [
        _best_rank(side.similarities(images[start : start + BLOCK], texts), own, first=start)
        for start in range(0, len(images), BLOCK)
    ]
    return {
        "caption_owner": owner,
        "caption_rank": torch.cat(image_rank).numpy(),
        "image_rank": torch.cat(text_rank).numpy(),
    }


def _rank(scores: Tensor, target: Tensor) -> Tensor:
    """[rows, candidates], [rows] -> how many candidates come before the target."""
    value = scores.gather(1, target[:, None])
    lower = torch.arange(scores.shape[1])[None, :] < target[:, None]
    return (scores > value).sum(1) + ((scores == value) & lower).sum(1)


def _best_rank(scores: Tensor, owner: Tensor, *, first: int) -> Tensor:
    """[images, m] -> the rank of every image's best own caption."""
    own = owner[None, :] == torch.arange(first, first + len(scores))[:, None]
    best = scores.masked_fill(~own, -torch.inf).argmax(1)
    return _rank(scores, best)


def metrics(found: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Recall@1, 5, 10 in both directions and the mean of both R@1; `text_retrieval` finds captions for an image."""
    values = {}
    for k in KS:
        values[f"image_retrieval_recall@{k}"] = float(np.mean(found["caption_rank"] < k))
        values[f"text_retrieval_recall@{k}"] = float(np.mean(found["image_rank"] < k))
    values["mean_recall@1"] = 0.5 * (values["image_retrieval_recall@1"] + values["text_retrieval_recall@1"])
    return values


def chance(data: TaskData) -> float:
    """Expected mean R@1 of a random order."""
    own = np.array([len(captions) for captions in data.captions])
    return float(0.5 * (1 / len(own) + np.mean(own / own.sum())))


class Retrieval:
    """The protocol on one task's data."""

    def __init__(self, task: Task, data: TaskData) -> None:
        check(data)
        self.task, self.data = task, data
        self.texts = TextSide([caption for own in data.captions for caption in own])

    def keep(self, features: Tensor, texts: Tensor, *, start: int) -> dict[str, np.ndarray]:
        return {"features": features.cpu().numpy()}

    def finish(self, kept: dict[str, np.ndarray], texts: Tensor) -> dict[str, np.ndarray]:
        images = torch.from_numpy(kept["features"])
        return outcomes(images, texts, side=self.texts, owner=owners(self.data))

    def metrics(self, found: Mapping[str, np.ndarray]) -> dict[str, float]:
        return metrics(found)

    def chance(self) -> float | None:
        return chance(self.data) if self.task.main_metric == "mean_recall@1" else None
