"""Tests of the current weights while training: the loss on held-out pairs, and the evaluation of a suite."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.checkpoint.reader import Checkpoint
from pipeline.data.loading.loader import Batch
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.run.results import aggregate
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.evaluation.watcher import brief
from pipeline.metrics.logger import Telemetry
from pipeline.model.evaluation_model import EvaluationModel, copy_for_evaluation
from pipeline.pictures.pixels import colour_of
from pipeline.run_files import EMA_NAME, FOLDER_NAME, METRICS_NAME, name_of, read_records
from pipeline.training.recipe import InTrainingConfig, RunConfig
from pipeline.training.run_state import RunState
from pipeline.training.step import StepResult
from pipeline.training.validation import HeldOutPairs, ValidationHistory


class PeriodicEvaluation:
    """Evaluates a run's current weights.

    Raises:
        UserError: The suite is missing or incomplete.
    """

    def __init__(self, config: InTrainingConfig, *, run: Path, world: World) -> None:
        self._suite = open_suite(config.suite or "")
        self._suite.check_places()
        self._run, self._world = run, world
        self._settings = EvaluationConfig(workers=config.workers, allow_outside=config.allow_outside)

    def __call__(self, model: EvaluationModel, *, step: int) -> tuple[dict[str, float], dict[str, str]]:
        """Evaluate the weights after `step` steps, which are on this rank's device. Collective.

        The results are stored as those of the step's checkpoint, so that `neuclip evaluate` reuses them if it evaluates
        the same weights. Whatever fails is returned, on all ranks alike, because training continues.

        Returns:
            Scores by task, and by aggregate if all of its tasks were evaluated; reasons of failures by task.
        """
        folder = self._run / "evaluation" / name_of(step)
        processes = (replace(self._world, patient=True), self._world.device)
        try:
            (evaluation,) = evaluate(
                model, suite=self._suite, output=folder, config=self._settings, processes=processes
            )
            results, failures = evaluation.results, dict(evaluation.failures)
        except UserError as error:  # a full disk, a damaged lock
            results, failures = {}, dict.fromkeys(self._suite.keys, str(error))
        scores = {task: result.score for task, result in results.items()}
        means = {name: mean.score for name, mean in aggregate(results).items() if mean.score is not None}
        return {**scores, **means}, failures


def missed_tests(run: RunConfig, checkpoint: Checkpoint, *, world: World) -> set[str]:
    """Which of `validation` and `evaluation` were due at a checkpoint, but prevented (signal, kill). Collective."""
    step = checkpoint.step
    history = ValidationHistory(**checkpoint.meta["validation"])
    validated = history.step == step or not run.validation.sources
    ended = history.ends_run(run.validation.patience)
    evaluated = run.evaluation.suite is None or not evaluation_is_due(run, step=step, ended=ended)
    missed = set()
    if not validated and validation_is_due(run, step=step):
        missed.add("validation")
    records = read_records(Path(run.output, METRICS_NAME)) if world.is_main and not evaluated else []
    evaluated |= any(record.get("kind") == "evaluation" and record.get("step") == step for record in records)
    if not world.gather_objects(evaluated)[0]:
        missed.add("evaluation")
    return missed


def validation_is_due(run: RunConfig, *, step: int) -> bool:
    """Whether the weights after `step` steps are validated; those of the last step always are."""
    return step == run.total_steps or step % run.validation.every == 0


def evaluation_is_due(run: RunConfig, *, step: int, ended: bool) -> bool:
    """Whether the weights after `step` steps are evaluated: also if the validation loss has ended the run with them."""
    return ended or step == run.total_steps or step % run.evaluation.every == 0


@dataclass
class PeriodicTests:
    """Validation and evaluation. They share a copy of the weights (or of their average), which exists only meanwhile.

    After a signal nothing is tested before the last step, because the job is killed within minutes.
    """

    state: RunState
    telemetry: Telemetry
    _model: EvaluationModel | None = None

    def __post_init__(self) -> None:
        run, world = self.state.run, self.state.world
        self._pairs = self._evaluation = None
        if run.validation.sources:
            self._pairs = HeldOutPairs(run.validation, run.data, world, self.telemetry.event)
            # Else the temperature with which the objective starts: a checkpoint is restored later.
            self._tau = run.validation.tau or math.exp(-self.state.objective.logit_parameters()[0])
        if run.evaluation.suite is not None:
            self._evaluation = PeriodicEvaluation(run.evaluation, run=Path(run.output), world=world)

    def validate(self, batch: Batch | None = None, result: StepResult | None = None) -> None:
        """Validate if that is due. Collective."""
        step = self.state.step
        if self._pairs is not None and validation_is_due(self.state.run, step=step) and not self._stopped(result):
            scores = self._pairs.scores(self._copy("validation"), tau=self._tau)
            self.state.validation.add(scores["loss"], step=step)
            self.telemetry.scalars("validation", step=step, values=scores)

    def evaluate(self, batch: Batch | None = None, result: StepResult | None = None) -> None:
        """Evaluate the suite if that is due. Collective; call it after `validate`, which it ends."""
        step = self.state.step
        due = evaluation_is_due(self.state.run, step=step, ended=self.state.ended_early) and not self._stopped(result)
        if self._evaluation is not None and due:
            scores, failures = self._evaluation(self._copy("evaluation"), step=step)
            self.telemetry.scalars("evaluation", step=step, values=scores)
            if failures:
                self.telemetry.warning(
                    f"Evaluation at step {step}: {len(failures)} tasks failed. {brief(failures)}",
                    step=step,
                    failures=failures,
                )
        self._model = None

    def make_up(self, missed: Collection[str]) -> bool:
        """Test the restored weights where that was prevented, see `missed_tests`. Collective.

        Returns:
            Whether the history of validations has changed, so that the checkpoint is to be written again.
        """
        step = self.state.step
        for name, test in (("validation", self.validate), ("evaluation", self.evaluate)):
            if name in missed:
                self.telemetry.event(f"The {name} after step {step} was not finished: doing it now.", step=step)
                test()
        self._model = None
        return "validation" in missed

    def _stopped(self, result: StepResult | None) -> bool:
        """Whether a signal has ended the run before its last step."""
        return result is not None and result.stop and self.state.step < self.state.run.total_steps

    def _copy(self, phase: str) -> EvaluationModel:
        self.state.mark(phase)
        if self._model is None:
            state = self.state
            source = Path(state.run.output) / FOLDER_NAME / name_of(state.step)
            folder = source / EMA_NAME if state.ema is not None else source
            self._model = copy_for_evaluation(
                state.run.model,
                state.weights_to_evaluate(),
                device=state.world.device,
                source=str(folder),
                background=colour_of(state.run.data.background),
            )
        return self._model
