"""The ways to score a task: classes with `@register` in `protocols/`, or in a package of one's own. Imports no torch.

A package of one's own names its module in its metadata, for example in `pyproject.toml`:

    [project.entry-points."neuclip.protocols"]
    my_protocol = "my_package.my_protocol"
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from pipeline.config import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.evaluation.datasets.datacomp import Task
    from pipeline.evaluation.datasets.task_data import TaskData
    from pipeline.evaluation.protocols.texts import TextSide

Outcomes = dict[str, np.ndarray]


class Protocol(ABC):
    """How one task's data is scored; one object serves all checkpoints.

    Shape legend: n images, M micro-batch, d feature dimension.
    """

    rows: ClassVar[Literal["labels", "captions", "instances"]]
    """The field of `TaskData` that it scores; a task of a `tasks.yaml` has `labels` or `captions`."""
    scores: ClassVar[tuple[str, ...]]
    """The metrics that a `tasks.yaml` may choose as the score; the first is the default."""
    stores_texts: ClassVar[bool] = False
    """Whether later evaluations of a checkpoint, and other tasks, are likely to need the same text features."""
    texts: TextSide
    """What is encoded by the text tower."""

    @abstractmethod
    def __init__(self, task: Task, data: TaskData) -> None:
        """Check the data.

        Raises:
            TaskError: The task cannot be scored with this data.
        """

    def keep(self, features: Tensor, texts: Tensor, *, start: int) -> Outcomes:
        """What to keep of a micro-batch, one row per image; by default the features.

        Args:
            features: [rows, d] unit-norm image features, on the device.
            texts: [distinct texts, d] unit-norm text features, on the device.
            start: The number of the first image.
        """
        return {"features": features.cpu().numpy()}

    @abstractmethod
    def finish(self, kept: Outcomes, texts: Tensor) -> Outcomes:
        """The outcomes per sample that the metrics are a function of, from what was kept of all n images."""

    @abstractmethod
    def metrics(self, found: Mapping[str, np.ndarray]) -> dict[str, float]:
        """The metrics, from `finish`'s outcomes, which are stored beside the result."""

    def chance(self) -> float | None:
        """The expected score of guessing; None where it has no simple form."""
        return None

    def write_details(  # noqa: B027  (most protocols write none)
        self, place: Path, *, found: Outcomes, kept: Outcomes, texts: Tensor, examples: int
    ) -> None:
        """Write what reports show beside the score.

        Args:
            place: The result's path without `.json`.
            found: The outcomes.
            kept: What was kept of all images.
            texts: [distinct texts, d] text features.
            examples: How many examples to write (`EvaluationConfig.examples`).
        """


PROTOCOLS: Registry[type[Protocol]] = Registry(
    "evaluation protocol", setting="protocol", package="pipeline.evaluation.protocols", group="neuclip.protocols"
)
register = PROTOCOLS.register
