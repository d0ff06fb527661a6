"""The loss on held-out pairs at intervals, and when it ends a run early."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeline.errors import UserError
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.training.held_out_pairs import HeldOutPairs
from pipeline.training.validation_config import ValidationConfig

ROWS = 1024
"""Rows of the similarity matrix that are computed at a time."""
STOPPED_EARLY = "Stopped early"
"""Beginning of the message when `validation.patience` ends a run."""


@dataclass
class ValidationHistory:
    """The best validation so far; part of every checkpoint."""

    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0
    """Validations since the best one."""

    def add(self, loss: float, *, step: int, min_delta: float) -> bool:
        """Record a validation. Returns whether it is the best so far; a loss that is not finite never is."""
        better = math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss - min_delta)
        if better:
            self.best_loss, self.best_step, self.since_best = loss, step, 0
        else:
            self.since_best += 1
        return better

    def ends_run(self, patience: int | None) -> bool:
        return patience is not None and self.since_best >= patience

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss, "best_step": self.best_step, "since_best": self.since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_loss, self.best_step = state["best_loss"], state["best_step"]
        self.since_best = state["since_best"]


def validation_scores(image: Tensor, text: Tensor, *, tau: float) -> dict[str, float]:
    """The loss of all pairs against each other, and the share whose own partner is the nearest.

    Args:
        image: [n, d] unit-norm features.
        text: [n, d]; row i belongs to image i.
        tau: Temperature.

    Returns:
        `loss`, the mean of both directions' cross-entropies (CLIP, arXiv:2103.00020, figure 3, with n for the batch);
        `image_to_text_r1`, `text_to_image_r1`; and `pairs`, which is n.
    """
    sides = [list(_rows(*pair, tau=tau)) for pair in ((image, text), (text, image))]
    losses, hits = ([sum(part[k] for part in side) / len(image) for side in sides] for k in (0, 1))
    return {
        "loss": sum(losses) / 2,
        "image_to_text_r1": hits[0],
        "text_to_image_r1": hits[1],
        "pairs": float(len(image)),
    }


def _rows(queries: Tensor, candidates: Tensor, *, tau: float) -> Iterator[tuple[float, int]]:
    """Summed cross-entropy and number of hits of blocks of queries."""
    for start in range(0, len(queries), ROWS):
        logits = queries[start : start + ROWS] @ candidates.T / tau
        target = torch.arange(start, start + len(logits))
        loss = F.cross_entropy(logits.double(), target, reduction="sum")
        yield float(loss), int((logits.argmax(1) == target).sum())


class Validation:
    """Validates a run's current weights.

    Args:
        config: The validation section.
        pairs: The held-out pairs.
        tau: Temperature of the loss.
        history: The best validation so far, which is updated.
        report: Called with messages, on rank 0.
    """

    def __init__(
        self,
        config: ValidationConfig,
        *,
        pairs: HeldOutPairs,
        tau: float,
        history: ValidationHistory,
        report: Callable[..., None],
    ) -> None:
        self.config, self.history = config, history
        self._pairs, self._tau, self._report = pairs, config.tau or tau, report
        self._reported = False

    def due(self, step: int, *, last: int) -> bool:
        """Whether the weights after `step` steps are validated; `last` is the run's last step."""
        return step == last or step % self.config.every == 0

    def __call__(self, model: EvaluationModel, *, step: int) -> tuple[dict[str, float], bool]:
        """Scores of a model, and whether its loss is the lowest so far. Collective; the same on all ranks.

        Args:
            model: The weights of this step, on this rank's device.
            step: Number of steps that they have taken.

        Raises:
            UserError: Fewer than two pairs can be used.
        """
        image, text = self._pairs.features(model)
        self._report_dropped(len(image))
        scores = validation_scores(image, text, tau=self._tau)
        best = self.history.add(scores["loss"], step=step, min_delta=self.config.min_delta)
        return scores, best

    @property
    def ends_run(self) -> bool:
        """Whether the loss has not fallen for `patience` validations."""
        return self.history.ends_run(self.config.patience)

    def describe_end(self) -> str:
        """A message for the log when `ends_run`."""
        best = self.history
        wanted, why = "finite loss", "validation.patience"
        if best.best_loss is not None:
            wanted = f"lower loss than {best.best_loss:.4f} at step {best.best_step}"
            if self.config.min_delta:
                wanted, why = f"{wanted} by more than {self.config.min_delta:g}", f"{why}, validation.min_delta"
        return (
            f"{STOPPED_EARLY}: {best.since_best} validations in a row without a {wanted} ({why}). To "
            "train on: --resume latest validation.patience=null."
        )

    def _report_dropped(self, used: int) -> None:
        """Report once how many pairs are used and why others are not. Collective the first time.

        Raises:
            UserError: Fewer than two pairs are used, on every rank.
        """
        if self._reported:
            return
        self._reported = True
        dropped = self._pairs.all_dropped()
        reasons = "".join(f", {count:,} dropped: {reason}" for reason, count in dropped.most_common())
        if used < 2:
            raise UserError(
                f"validation.sources have {used} usable pairs{reasons}. A contrastive loss needs two: name other "
                "shards, or validation.sources=[] for no validation."
            )
        self._report(f"Validation: {used:,} held-out pairs at temperature {self._tau:.4g}{reasons}.")
