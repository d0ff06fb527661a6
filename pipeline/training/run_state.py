"""The state of a run: what a checkpoint stores, and how it is restored on any ZeRO stage and number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import Snapshot
from pipeline.config import to_tree
from pipeline.data.loading.decode import normalize
from pipeline.data.loading.loader import Batch, Loader
from pipeline.data.loading.position import Position
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import Engine
from pipeline.engine.state import WeightAverage
from pipeline.errors import UserError
from pipeline.model.architectures import Architecture
from pipeline.model.finetuning import Adapters, is_adapter, merged
from pipeline.model.model_folder import resized_state, weights_digest
from pipeline.objectives import Objective
from pipeline.training.recipe import RunConfig
from pipeline.training.run_folder import read_origin
from pipeline.training.step import StepResult
from pipeline.versions import versions

EXIT_DONE, EXIT_NOT_SAVED = 0, 74
"""74 (EX_IOERR): the last checkpoint could not be written; make room, and start again with --resume latest."""
STOPPED_EARLY = "Stopped early"
"""Beginning of the message when `validation.patience` ends a run."""
FINITE_STEPS = 3
"""Applied steps after a checkpoint that show that its weights were not ruined already."""


class RunEnds(Exception):
    """The end of a trainer: raised on all ranks at once where that is before its last step.

    Args:
        reason: For the log; `Trainer.fit` raises it as a `UserError` if that is the exit code.
        code: The exit code.
        save: Write a checkpoint first, unless there is one of the last step.
        start: From where another trainer continues: the end of this stage, or the checkpoint of a roll-back; None: the
            process ends.
    """

    def __init__(
        self,
        reason: str = "",
        *,
        code: int = EXIT_DONE,
        save: bool = False,
        start: Checkpoint | Literal["latest"] | None = None,
    ) -> None:
        super().__init__(reason)
        self.code, self.save, self.start = code, save, start


@dataclass
class SkippedSteps:
    """Counts of a run, which survive resuming."""

    skipped: int = 0
    rollbacks: int = 0
    in_a_row: int = 0
    """Skipped steps since the last applied one."""
    rolled_back_to: int | None = None
    """The step of the checkpoint to which the last roll-back returned."""

    def last_good(self, step: int) -> int:
        """After `step` steps, checkpoints of this step and of earlier ones are good."""
        return step - self.in_a_row - FINITE_STEPS

    def choose(self, newest: Callable[[int], Checkpoint | None], *, step: int) -> Checkpoint | None:
        """The checkpoint to roll back to; None if there is none from before the skipped steps.

        `newest` returns the newest checkpoint up to a step; `step` counts the skipped steps, too.
        """
        checkpoint = newest(self.last_good(step)) or newest(step - self.in_a_row)
        if checkpoint is not None and checkpoint.step == self.rolled_back_to:
            return newest(checkpoint.step - 1) or checkpoint
        return checkpoint

    def check(self, run: RunConfig, *, step: int) -> bool:
        """Whether to roll back now, after step number `step` (from 0); a `UserError` if no further rollback is allowed,
        and too many steps were skipped."""
        if self.in_a_row <= run.max_skipped_steps:
            return False
        if self.rollbacks < run.max_rollbacks:
            return True
        advice = (
            f"The run has already rolled back {self.rollbacks} times, as often as max_rollbacks allows."
            if self.rollbacks
            else "With max_rollbacks=1 the run would return to the checkpoint before them and skip their data."
        )
        raise UserError(
            f"{self.in_a_row} steps in a row were skipped, up to step {step} (max_skipped_steps = "
            f"{run.max_skipped_steps}): the run has diverged. Their sample ids are in metrics.jsonl. {advice} Resume "
            "from an earlier checkpoint with a smaller optimizer.lr."
        )


@dataclass
class ValidationHistory:
    """The best validation so far; part of every checkpoint."""

    best_loss: float | None = None
    best_step: int | None = None
    since_best: int = 0
    """Validations since the best one."""
    step: int = 0
    """Step of the last validation."""

    def add(self, loss: float, *, step: int) -> None:
        """Record a validation; a loss that is not finite is never the best."""
        self.step = step
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            self.best_loss, self.best_step, self.since_best = loss, step, 0
        else:
            self.since_best += 1

    def ends_run(self, patience: int | None) -> bool:
        return patience is not None and self.since_best >= patience

    def describe_end(self) -> str:
        """A message for the log when `ends_run`."""
        wanted = "finite loss"
        if self.best_loss is not None:
            wanted = f"lower loss than {self.best_loss:.4f} at step {self.best_step}"
        return (
            f"{STOPPED_EARLY}: {self.since_best} validations in a row without a {wanted} (validation.patience). To "
            "train on: --resume latest validation.patience=null."
        )


@dataclass(kw_only=True)
class RunState:
    """The parts of a run that have state."""

    run: RunConfig
    end: int
    """The step at which the stage ends."""
    world: World
    architecture: Architecture
    loader: Loader
    engine: Engine
    objective: Objective
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    ema: WeightAverage | None = field(default=None, init=False)
    """The average of the weights; None without one."""
    validation: ValidationHistory = field(default_factory=ValidationHistory)
    base: str = ""
    """Digest of the weights beside which adapters are trained; known once it was needed."""
    micro_batch: int | None = None
    """What `engine.micro_batch=auto` has come to."""
    step: int = 0
    """Updates taken."""
    features: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the stored features are of that the run trains with, by the setting that names them."""
    position: Position = field(default_factory=Position)
    """Position in the data after the last batch that was trained on."""

    def __post_init__(self) -> None:
        mean, std, engine = self.architecture.mean, self.architecture.std, self.engine
        if self.run.ema.decay is not None:
            self.ema = WeightAverage(self.run.ema, engine.state)
        self.normalized: Callable[[Tensor], Tensor] = partial(
            normalize, mean=mean, std=std, dtype=engine.dtype, memory_format=engine.module.image_format
        )
        """uint8 images [b, 3, H, W] on the device -> images as the engine takes them."""

    def mark(self, phase: str) -> None:
        """Enter a phase between two steps, for the heartbeats."""
        if self.world.phases is not None:
            self.world.phases.mark(phase)

    def advance(self, batch: Batch, result: StepResult) -> None:
        """Count a step that was taken or skipped."""
        self.step, self.position = self.step + 1, batch.position
        self.skipped.skipped += not result.applied
        self.skipped.in_a_row = 0 if result.applied else self.skipped.in_a_row + 1

    def average(self, batch: Batch, result: StepResult) -> None:
        """Add the weights after a step to their average, if there is one."""
        if self.ema is not None and result.applied:
            self.ema.update()

    @property
    def ended_early(self) -> bool:
        """Whether the validation loss ends the run."""
        return self.validation.ends_run(self.run.validation.patience)

    def weights_to_evaluate(self) -> dict[str, Tensor]:
        """The weights that are evaluated while training, as full fp32 tensors on every rank. Collective."""
        weights = dict(self.engine.state.weights() if self.ema is None else self.ema.weights())
        return merged(weights, self.run.model.lora)

    def snapshot(self) -> Snapshot:
        """The state after the last step, on the CPU. Collective: all ranks gather, and rank 0 keeps the result."""
        state, main = self.engine.state, self.world.is_main
        weights, lora = dict(state.weights(keep=main)), self.run.model.lora
        moments = {(name, key): value for name, key, value in state.moments(keep=main)}
        return Snapshot(
            step=self.step,
            weights=merged(weights, lora),
            moments=moments,
            counter=state.counter(),
            objective={name: value.detach().cpu().clone() for name, value in self.objective.state_dict().items()},
            rows=self.objective.row_blocks(),
            logit=self.objective.logit_parameters(),
            facts=self._facts(),
            ema=None if self.ema is None else dict(self.ema.weights(keep=main)),
            adapters=None if lora.rank is None else self._adapters(weights),
            best=self.validation.best_step == self.step,
            last_good=self.skipped.last_good(self.step) if self.run.max_rollbacks else None,
        )

    def _adapters(self, weights: Mapping[str, Tensor]) -> Adapters:
        """The adapters among the engine's weights."""
        if weights and not self.base:
            self.base = weights_digest({name: value for name, value in weights.items() if not is_adapter(name)})
        tensors = {name: value for name, value in weights.items() if is_adapter(name)}
        return Adapters(self.engine.module.clip.adapters, tensors, self.base)

    def _weights_of(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """A checkpoint's weights as the engine has them: with adapters, beside the pretrained weights. Collective."""
        base, stored = checkpoint.meta.get("adapters_of"), checkpoint.adapters()
        if (stored is None) != (self.run.model.lora.rank is None):
            raise UserError(
                f"{checkpoint.path} has {'no ' if stored is None else ''}adapters, and model.lora.rank = "
                f"{self.run.model.lora.rank}, which cannot change within a run. A new run can start from its merged "
                f"weights: model.arch=pretrained model.pretrained={checkpoint.path}"
            )
        if stored is None:
            return checkpoint.weights()
        weights = dict(self.engine.state.weights())
        if self._adapters(weights).base != base:
            raise UserError(
                f"model.pretrained = {self.run.model.pretrained} has other weights than those beside which the "
                f"adapters of {checkpoint.path} were trained. Give the same ones, or start a new run from the merged "
                f"weights: model.arch=pretrained model.pretrained={checkpoint.path}"
            )
        return {**weights, **stored}

    def _facts(self) -> dict[str, Any]:
        return {
            "samples": self.step * self.run.batch_size,
            "features": self.features,
            "data": self.loader.state_dict(self.position),
            "faults": asdict(self.skipped),
            "validation": asdict(self.validation),
            **({} if self.ema is None else {"ema_updates": self.ema.updates}),
            "config": to_tree(self.run),
            **({} if (origin := read_origin(Path(self.run.output))) is None else {"origin": asdict(origin)}),
            "world_size": self.world.size,
            **({} if self.micro_batch is None else {"micro_batch": self.micro_batch}),
            "versions": versions(),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint. Collective.

        Position embeddings of a stage with another image size are interpolated, and so is their optimizer state.
        """
        data, size = checkpoint.meta["data"], self.architecture.image_size
        if self.run.schedule.stages:  # the loader need not warn of the image size that they change
            data = {**data, "pixels": {**data["pixels"], "image size": size}}
        self.loader.load_state_dict(data)
        self.skipped = SkippedSteps(**checkpoint.meta["faults"])
        self.features = dict(checkpoint.meta.get("features", {}))
        self.position = self.loader.position
        shapes = self.engine.state.shapes() if self.run.schedule.stages else {}
        average = checkpoint.ema() if self.ema is not None else None
        if self.ema is not None and average is not None:
            self.ema.load(resized_state(average, shapes=shapes), updates=checkpoint.meta["ema_updates"])
        self.engine.state.load(
            weights=resized_state(self._weights_of(checkpoint), shapes=shapes),
            moments=resized_state(checkpoint.moments(), shapes=shapes),
            counter=checkpoint.meta["counter"],
        )
        self.objective.load_state_dict(checkpoint.objective())
        self.objective.load_row_state_dict(checkpoint.read_rows)
        if self.ema is not None and average is None:  # the run had no average before
            self.ema.reset()
        self.validation = ValidationHistory(**checkpoint.meta["validation"])
        self.step = checkpoint.step
