"""Tests of the current weights while training: the loss on held-out pairs, and the evaluation of a suite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.checkpoint.layout import EMA_NAME, FOLDER_NAME, name_of
from pipeline.evaluation.watch.watcher import brief
from pipeline.metrics.logger import Telemetry
from pipeline.model.evaluation_model import EvaluationModel, copy_for_evaluation
from pipeline.training.periodic_eval import PeriodicEvaluation
from pipeline.training.run_state import RunState
from pipeline.training.validation import Validation


@dataclass
class PeriodicTests:
    """Validation and evaluation. They share a copy of the weights (or of their average), which exists only meanwhile.

    After a signal nothing is tested before the last step, because the job is killed within minutes.
    """

    state: RunState
    telemetry: Telemetry
    validation: Validation | None
    """None: no loss on held-out pairs."""
    evaluation: PeriodicEvaluation | None
    """None: no evaluation while training."""
    _model: EvaluationModel | None = None

    @property
    def ended_run(self) -> bool:
        """Whether the validation loss ends the run early."""
        return self.validation is not None and self.validation.ends_run

    def validate(self, *, stop: bool) -> bool:
        """Validate if that is due. Collective. Returns whether a checkpoint of these weights is to be kept as the best.

        Args:
            stop: A signal has ended the run.
        """
        step, last = self.state.step, self.state.run.total_steps
        if self.validation is None or not self.validation.due(step, last=last) or (stop and step < last):
            return False
        scores, best = self.validation(self._copy("validation"), step=step)
        self.telemetry.validation(step=step, scores=scores)
        return best and self.validation.config.keep_best

    def evaluate(self, *, stop: bool) -> None:
        """Evaluate the suite if that is due. Collective; call it after `validate`, which it ends."""
        step = self.state.step
        if self.evaluation is not None and self._evaluation_is_due(stop=stop):
            found = self.evaluation(self._copy("evaluation"), step=step)
            self.telemetry.evaluation(step=step, scores=found.scores)
            if found.failures:
                self.telemetry.warning(
                    f"Evaluation at step {step}: {len(found.failures)} tasks failed. {brief(found.failures)}",
                    step=step,
                    failures=dict(found.failures),
                )
        self._model = None

    def finish_evaluation(self, *, resized: bool) -> None:
        """Evaluate the restored weights if that was due, but the run ended meanwhile. Collective.

        Args:
            resized: They were restored for the next stage, so that they are no longer those of the checkpoint.
        """
        step = self.state.step
        if self.evaluation is None or not self._evaluation_is_due(stop=False) or self.evaluation.logged(step):
            return
        if resized:
            self.telemetry.warning(
                f"The evaluation after step {step} was not finished; `neuclip evaluate` makes up for it.", step=step
            )
            return
        self.telemetry.event(f"The evaluation after step {step} was not finished: doing it now.", step=step)
        self.evaluate(stop=False)

    def _evaluation_is_due(self, *, stop: bool) -> bool:
        step, run = self.state.step, self.state.run
        return step == run.total_steps or self.ended_run or (step % run.evaluation.every == 0 and not stop)

    def report_end(self) -> None:
        """Log which tasks have failed since this process started, if any."""
        if self.evaluation is not None and (unscored := self.evaluation.unscored()):
            self.telemetry.warning(unscored)

    def _copy(self, phase: str) -> EvaluationModel:
        if self.state.world.phases is not None:
            self.state.world.phases.mark(phase)
        if self._model is None:
            state = self.state
            source = Path(state.run.output) / FOLDER_NAME / name_of(state.step)
            folder = source / EMA_NAME if state.evaluates_average else source
            self._model = copy_for_evaluation(
                state.run.model, state.weights_to_evaluate(), device=state.world.device, source=str(folder)
            )
        return self._model
