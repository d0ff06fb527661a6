"""Steps that could not be applied: how many, and what a run does when they do not end.

A step whose loss or gradient is not finite changes nothing. When more than `max_skipped_steps` follow each other the
run stops, or, where `max_rollbacks` allows it, goes back: weights, moments, objective and step count become those of
the newest good checkpoint from before the first of these steps, while the data goes on behind the last of them. So the
batches between that checkpoint and here, good and bad, are not seen again in this epoch, and the budget of updates is
kept. Later checkpoints and figures are removed. A run killed before its next checkpoint does all of this once more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pipeline.errors import UserError


@dataclass
class Faults:
    """Counts of a run, over all of its resumptions. in_a_row: skipped steps since the last applied one."""

    skipped: int = 0
    rollbacks: int = 0
    in_a_row: int = 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.rollbacks, self.in_a_row = (int(state[k]) for k in ("skipped", "rollbacks", "in_a_row"))

    def note(self, *, applied: bool) -> None:
        """One more step was taken."""
        self.skipped += not applied
        self.in_a_row = 0 if applied else self.in_a_row + 1

    def scalars(self) -> dict[str, float]:
        return {"skipped_steps": self.skipped, "rollbacks": self.rollbacks}

    def check(self, *, step: int, max_skipped_steps: int, max_rollbacks: int) -> bool:
        """Whether to go back now, after step number `step` (from 0). Raises: UserError when that is not allowed."""
        if self.in_a_row <= max_skipped_steps:
            return False
        if self.rollbacks < max_rollbacks:
            return True
        advice = (
            f"It went back {self.rollbacks} times already, as often as max_rollbacks allows."
            if self.rollbacks
            else "max_rollbacks=1 would go back to the checkpoint before them and on behind their data."
        )
        raise UserError(
            f"{self.in_a_row} steps in a row could not be applied, up to step {step} (max_skipped_steps = "
            f"{max_skipped_steps}): the run has diverged. Their sample ids are in metrics.jsonl. {advice} Resume from "
            "an earlier checkpoint with a smaller optimizer.lr."
        )
