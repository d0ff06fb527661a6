"""The state of a run: what a checkpoint stores, and how it is restored on any ZeRO stage and number of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import Snapshot
from pipeline.config import to_tree
from pipeline.data.loading.loader import Batch, Loader
from pipeline.distributed.world import World
from pipeline.engine.ema import WeightAverage
from pipeline.engine.engine_protocol import Engine
from pipeline.model.resize import resized_moments, resized_state
from pipeline.objectives import Objective
from pipeline.training.new_batch_size import PREVIOUS
from pipeline.training.recipe import RunConfig
from pipeline.training.skipped_steps import SkippedSteps
from pipeline.training.validation import ValidationHistory
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
    ema: WeightAverage | None = None
    """The average of the weights; None without one."""
    validation: ValidationHistory = field(default_factory=ValidationHistory)
    step: int = 0
    """Updates taken."""

    @property
    def evaluates_average(self) -> bool:
        return self.ema is not None and self.run.ema.evaluate

    def weights_to_evaluate(self) -> dict[str, Tensor]:
        """The weights that are evaluated while training, as full fp32 tensors on every rank. Collective."""
        average = self.ema if self.evaluates_average else None
        return dict(self.engine.state.weights() if average is None else average.weights())

    def snapshot(self, batch: Batch) -> Snapshot:
        """The state after `batch`, on the CPU. Collective: all ranks gather, and rank 0 keeps the result."""
        state, main = self.engine.state, self.world.is_main
        moments = {(name, key): value for name, key, value in state.moments(keep=main)}
        return Snapshot(
            step=self.step,
            weights=dict(state.weights(keep=main)),
            moments=moments,
            counter=state.counter(),
            objective={name: value.detach().cpu().clone() for name, value in self.objective.state_dict().items()},
            rows=self.objective.row_blocks(),
            logit=self.objective.logit_parameters(),
            facts=self._facts(batch),
            ema=None if self.ema is None else dict(self.ema.weights(keep=main)),
            best=self.run.validation.keep_best and self.validation.best_step == self.step,
        )

    def _facts(self, batch: Batch) -> dict[str, Any]:
        return {
            "samples": self.step * self.run.batch_size,
            "data": self.loader.state_dict(batch.position),
            "faults": self.skipped.state_dict(),
            "validation": self.validation.state_dict(),
            **({} if self.ema is None else {"ema_updates": self.ema.updates}),
            "config": to_tree(self.run),
            "world_size": self.world.size,
            "versions": versions(),
        }

    def restore(self, checkpoint: Checkpoint) -> int:
        """Continue from a checkpoint. Collective. Returns the samples skipped because of another batch size."""
        skipped = self.loader.load_state_dict(checkpoint.meta["data"], new_batch_size=PREVIOUS in checkpoint.meta)
        self.skipped.load_state_dict(checkpoint.meta.get("faults", SkippedSteps().state_dict()))
        self.restore_training(checkpoint)
        return skipped

    def restore_training(self, checkpoint: Checkpoint) -> None:
        """Restore everything but the position in the data and the counts of skipped steps. Collective.

        Position embeddings of a stage with another image size are interpolated, and so is their optimizer state.
        """
        shapes = self.engine.state.shapes() if self.run.schedule.stages else {}
        average = checkpoint.ema() if self.ema is not None else None
        if self.ema is not None and average is not None:
            self.ema.load(resized_state(average, shapes=shapes), updates=checkpoint.meta["ema_updates"])
        self.engine.state.load(
            weights=resized_state(checkpoint.weights(), shapes=shapes),
            moments=resized_moments(checkpoint.moments(), shapes=shapes),
            counter=checkpoint.meta["counter"],
        )
        objective, before = checkpoint.objective(), checkpoint.meta.get(PREVIOUS)
        if before is not None:
            objective["steps"] = (objective["steps"] * before / self.run.batch_size).round().long()
        self.objective.load_state_dict(objective)
        self.objective.load_row_state_dict(checkpoint.read_rows)
        if self.ema is not None and average is None:  # the run had no average before
            self.ema.reset()
        stored = checkpoint.meta.get("validation") if before is None else None
        self.validation.load_state_dict(stored or ValidationHistory().state_dict())
        self.step = checkpoint.step
