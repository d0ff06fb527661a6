"""Skipped steps: how many there were, and when a run rolls back or stops because of them.

A step whose loss or gradient is not finite is skipped: it changes nothing. After more than `max_skipped_steps` in a row
the run stops or, if `max_rollbacks` allows it, rolls back: weights, moments, objective and step count are restored from
the newest undamaged checkpoint from before these steps, while the data continues after the last of them. The batches
since that checkpoint, good and bad, are not seen again in this epoch, and the number of updates stays as planned. Later
checkpoints and metrics are removed. A run that is killed before its next checkpoint does all of this again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import UserError


@dataclass
class SkippedSteps:
    """Counts of a run, which survive resuming."""

    skipped: int = 0
    rollbacks: int = 0
    in_a_row: int = 0
    """Skipped steps since the last applied one."""

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.rollbacks, self.in_a_row = (int(state[k]) for k in ("skipped", "rollbacks", "in_a_row"))

    def note(self, *, applied: bool) -> None:
        """Count one more step."""
        self.skipped += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1

    def scalars(self) -> dict[str, float]:
        return {"skipped_steps": self.skipped, "rollbacks": self.rollbacks}

    def check(self, *, step: int, max_skipped_steps: int, max_rollbacks: int) -> bool:
        """Whether to roll back now, after step number `step` (from 0).

        Raises:
            UserError: Too many steps were skipped, and no further rollback is allowed.
        """
        if self.in_a_row <= max_skipped_steps:
            return False
        if self.rollbacks < max_rollbacks:
            return True
        advice = (
            f"The run has already rolled back {self.rollbacks} times, as often as max_rollbacks allows."
            if self.rollbacks
            else "With max_rollbacks=1 the run would return to the checkpoint before them and skip their data."
        )
        raise UserError(
            f"{self.in_a_row} steps in a row were skipped, up to step {step} (max_skipped_steps = "
            f"{max_skipped_steps}): the run has diverged. Their sample ids are in metrics.jsonl. {advice} Resume from "
            "an earlier checkpoint with a smaller optimizer.lr."
        )
