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
from pipeline.training.recipe import InTrainingConfig, RunConfig, ValidationConfig
from pipeline.training.run_state import RunState
from pipeline.training.step import StepResult
from pipeline.training.validation import HeldOutPairs, ValidationHistory


def is_due(config: ValidationConfig | InTrainingConfig, run: RunConfig, *, step: int, ended: bool = False) -> bool:
    """Whether the weights after `step` steps are tested; those of the run's end, which `ended` may be, always are."""
    return ended or step == run.total_steps or step % config.every == 0


def missed_tests(run: RunConfig, checkpoint: Checkpoint, *, world: World) -> set[str]:
    """Which of `validation` and `evaluation` were due at a checkpoint, but prevented (signal, kill). Collective."""
    step, missed = checkpoint.step, set[str]()
    history = ValidationHistory(**checkpoint.meta["validation"])
    if run.validation.sources and history.step != step and is_due(run.validation, run, step=step):
        missed.add("validation")
    ended = history.ends_run(run.validation.patience)
    if run.evaluation.suite is not None and is_due(run.evaluation, run, step=step, ended=ended):
        records = read_records(Path(run.output, METRICS_NAME)) if world.is_main else []
        logged = any(record.get("kind") == "evaluation" and record.get("step") == step for record in records)
        if not world.gather_objects(logged)[0]:
            missed.add("evaluation")
    return missed


@dataclass
class PeriodicTests:
    """Validation and evaluation. They share a copy of the weights (or of their average), which exists only meanwhile.

    After a signal nothing is tested before the last step, because the job is killed within minutes.

    Raises:
        UserError: The suite, or the held-out pairs, are missing or incomplete.
    """

    state: RunState
    telemetry: Telemetry
    _model: EvaluationModel | None = None

    def __post_init__(self) -> None:
        run = self.state.run
        self._pairs = self._suite = None
        if run.validation.sources:
            self._pairs = HeldOutPairs(run.validation, run.data, self.state.world, self.telemetry.event)
            # Else the temperature with which the objective starts: a checkpoint is restored later.
            self._tau = run.validation.tau or math.exp(-self.state.objective.logit_parameters()[0])
        if run.evaluation.suite is not None:
            self._suite = open_suite(run.evaluation.suite)
            self._suite.check_places()

    def validate(self, batch: Batch | None = None, result: StepResult | None = None) -> None:
        """Validate if that is due. Collective."""
        step, run = self.state.step, self.state.run
        if self._pairs is not None and is_due(run.validation, run, step=step) and not self._stopped(result):
            scores = self._pairs.scores(self._copy("validation"), tau=self._tau)
            self.state.validation.add(scores["loss"], step=step)
            self.telemetry.validation(step=step, scores=scores)

    def evaluate(self, batch: Batch | None = None, result: StepResult | None = None) -> None:
        """Evaluate the suite if that is due. Collective; call it after `validate`, whose copy of the weights it frees.

        The results are stored as those of the step's checkpoint, so that `neuclip evaluate` reuses them if it evaluates
        the same weights. Whatever fails is logged, on all ranks alike, because training continues.
        """
        step, run, world = self.state.step, self.state.run, self.state.world
        due = is_due(run.evaluation, run, step=step, ended=self.state.ended_early) and not self._stopped(result)
        if self._suite is not None and due:
            model = self._copy("evaluation")
            config = EvaluationConfig(workers=run.evaluation.workers, allow_outside=run.evaluation.allow_outside)
            try:
                (evaluation,) = evaluate(
                    model,
                    suite=self._suite,
                    output=Path(run.output) / "evaluation" / name_of(step),
                    config=config,
                    processes=(replace(world, patient=True), world.device),
                )
                results, failures = evaluation.results, dict(evaluation.failures)
            except UserError as error:  # a full disk, a damaged lock
                results, failures = {}, dict.fromkeys(self._suite.keys, str(error))
            means = {name: mean.score for name, mean in aggregate(results).items() if mean.score is not None}
            scores = {task: result.score for task, result in results.items()}
            self.telemetry.evaluation(step=step, scores={**scores, **means})
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
            self._model = copy_for_evaluation(
                state.run.model,
                state.weights_to_evaluate(),
                device=state.world.device,
                source=str(source if state.ema is None else source / EMA_NAME),
                background=colour_of(state.run.data.background),
            )
        return self._model
