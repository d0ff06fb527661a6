"""WinoGAViL: pick the k candidate images that belong to a cue, k being the number of true associations.

Source: Bitton et al., 2022; scored as in the DataComp benchmark by the Jaccard index on instances with 10 or 12
candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb

import numpy as np
from torch import Tensor

from pipeline.evaluation.compute import TextSide
from pipeline.evaluation.datasets.datacomp import Task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.protocol import Outcomes, Protocol, register

MANY = 10


def prompt(cue: str) -> str:
    """The cue as a text: lower case, with an article."""
    cue = cue.lower()
    return f"{'An' if cue[:1] in set('aeiou') else 'A'} {cue}"


def jaccard(scores: np.ndarray, truth: np.ndarray) -> float:
    """Jaccard index between the true candidates and as many of the highest scores; ties go to the lower index."""
    picked = np.argsort(-scores, kind="stable")[: int(truth.sum())]
    hits = int(truth[picked].sum())
    union = 2 * int(truth.sum()) - hits
    return hits / union if union else 0.0


def metrics(outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Means of the Jaccard index by number of candidates; numbers that do not occur give no metric."""
    scores, sizes = outcomes["jaccard"], outcomes["candidates"]
    chosen = {
        "avg_jaccard_score": sizes > 0,
        **{f"jaccard_score_{size}": sizes == size for size in (5, 6, 10, 12)},
        "jaccard_score_5-6": sizes <= 6,
        "jaccard_score_10-12": sizes >= MANY,
    }
    return {name: float(scores[mask].mean()) for name, mask in chosen.items() if mask.any()}


@register("association")
class Association(Protocol):
    """The protocol on one task's data."""

    rows = "instances"
    scores = ("jaccard_score_10-12",)

    def __init__(self, task: Task, data: TaskData) -> None:
        if not data.instances:
            raise TaskError(f"{data.folder} holds no instances.")
        if not any(len(instance.candidates) >= MANY for instance in data.instances):
            raise TaskError(f"{data.folder}: no instance has {MANY} or more candidates, and the score is their mean.")
        self.task, self.data = task, data
        self.texts = TextSide([prompt(instance.cue) for instance in data.instances])

    def finish(self, kept: Outcomes, texts: Tensor) -> Outcomes:
        images, cues = kept["features"].astype(np.float64), texts[self.texts.rows].double().numpy()
        similarities = [
            jaccard((images[list(instance.candidates)] * cue).sum(1), np.array(instance.associated, dtype=bool))
            for instance, cue in zip(self.data.instances, cues, strict=True)
        ]
        sizes = [len(instance.candidates) for instance in self.data.instances]
        return {"jaccard": np.array(similarities), "candidates": np.array(sizes)}

    def metrics(self, outcomes: Mapping[str, np.ndarray]) -> dict[str, float]:
        return metrics(outcomes)

    def chance(self) -> float:
        values = []
        for instance in self.data.instances:  # hits among k of N candidates picked at random are hypergeometric
            n, k = len(instance.candidates), sum(instance.associated)
            if n >= MANY:
                ways = ((h, comb(k, h) * comb(n - k, k - h)) for h in range(k + 1) if k - h <= n - k)
                values.append(sum(h / (2 * k - h) * count for h, count in ways if h) / comb(n, k))
        return float(np.mean(values))
