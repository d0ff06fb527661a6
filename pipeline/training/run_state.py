"""The state of a run: what a checkpoint stores, and how it is restored on any ZeRO stage and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import Snapshot
from pipeline.config import to_tree
from pipeline.data.loading.loader import Batch, Loader
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import Engine
from pipeline.model.resize import resized_moments, resized_state
from pipeline.objectives import Objective
from pipeline.training.recipe import RunConfig
from pipeline.training.skipped_steps import SkippedSteps
from pipeline.versions import versions


@dataclass(kw_only=True)
class RunState:
    """The parts of a run that have state."""

    run: RunConfig
    world: World
    loader: Loader
    engine: Engine
    objective: Objective
    skipped: SkippedSteps
    step: int = 0
    """Updates taken."""

    def snapshot(self, batch: Batch) -> Snapshot:
        """The state after `batch`, on the CPU. Collective: all ranks gather, and rank 0 keeps the result."""
        state, main = self.engine.state, self.world.is_main
        moments = {(name, key): value for name, key, value in state.moments() if main}
        return Snapshot(
            step=self.step,
            weights={name: value for name, value in state.weights() if main},
            moments=moments,
            counter=state.counter(),
            objective={name: value.detach().cpu().clone() for name, value in self.objective.state_dict().items()},
            rows=self.objective.row_blocks(),
            logit=self.objective.logit_parameters(),
            facts=self._facts(batch),
        )

    def _facts(self, batch: Batch) -> dict[str, Any]:
        return {
            "samples": self.step * self.run.batch_size,
            "data": self.loader.state_dict(batch.position),
            "faults": self.skipped.state_dict(),
            "config": to_tree(self.run),
            "world_size": self.world.size,
            "versions": versions(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Collective."""
        self.loader.load_state_dict(checkpoint.meta["data"])
        self.skipped.load_state_dict(checkpoint.meta.get("faults", SkippedSteps().state_dict()))
        self.restore_training(checkpoint)

    def restore_training(self, checkpoint: Checkpoint) -> None:
        """Restore everything but the position in the data and the counts of skipped steps. Collective.

        Position embeddings of a stage with another image size are interpolated, and so is their optimizer state.
        """
        shapes = self.engine.state.shapes() if self.run.schedule.stages else {}
        self.engine.state.load(
            weights=resized_state(checkpoint.weights(), shapes=shapes),
            moments=resized_moments(checkpoint.moments(), shapes=shapes),
            counter=checkpoint.meta["counter"],
        )
        self.objective.load_state_dict(checkpoint.objective())
        self.objective.load_row_state_dict(checkpoint.read_rows)
        self.step = checkpoint.step
