"""Evaluation at intervals while training, by the code of `neuclip evaluate` on the run's own ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from pipeline.checkpoint.layout import name_of
from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.datasets.task_data import plain
from pipeline.evaluation.runner.aggregate import aggregate
from pipeline.evaluation.runner.session import EvaluationConfig
from pipeline.metrics.sinks import METRICS_NAME
from pipeline.model.evaluation_model import EvaluationModel


@section
class InTrainingConfig:
    """Evaluation of a small suite while training; the ranks share the work. For larger suites use `neuclip watch`."""

    suite: str | None = None
    """A folder of tasks, or a YAML file that describes tasks; None: no evaluation while training."""
    every: int = Field(default=1000, ge=1)
    """Steps between evaluations; the weights of the last step are always evaluated."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that decode images on each rank. None: one per core; 0: the rank itself, fastest for tiny suites."""
    cache: str | None = None
    """Folder that keeps decoded images, so that only the first evaluation decodes them."""


@dataclass(frozen=True)
class PeriodicScores:
    """What an evaluation found."""

    scores: Mapping[str, float]
    """By task, and by aggregate if all of its tasks were evaluated."""
    failures: Mapping[str, str]
    """Reasons, by task."""


class PeriodicEvaluation:
    """Evaluates a run's current weights.

    Args:
        config: The evaluation section.
        run: The run's folder.
        world: The ranks.

    Raises:
        UserError: The suite is missing or incomplete.
    """

    def __init__(self, config: InTrainingConfig, *, run: Path, world: World) -> None:
        self._suite = open_suite(config.suite or "")
        self._run, self._world = run, world
        self._settings = EvaluationConfig(workers=config.workers, cache=config.cache)
        self._failed: dict[str, list[int]] = {}

    def __call__(self, model: EvaluationModel, *, step: int) -> PeriodicScores:
        """Evaluate. Collective.

        The results are stored as those of the step's checkpoint, so that `neuclip evaluate` reuses them if it evaluates
        the same weights. Whatever fails is returned, on all ranks alike, because training continues.

        Args:
            model: The weights of this step, on this rank's device.
            step: Number of steps that they have taken.
        """
        folder = self._run / "evaluation" / name_of(step)
        processes = (self._world, self._world.device)
        try:
            (evaluation,) = evaluate(
                model, suite=self._suite, output=folder, config=self._settings, processes=processes
            )
            results, failures = evaluation.results, dict(evaluation.failures)
        except UserError as error:  # a full disk, a damaged lock
            results, failures = {}, dict.fromkeys(self._suite.keys, str(error))
        for task in failures:
            self._failed.setdefault(task, []).append(step)
        scores = {task: result.score for task, result in results.items()}
        means = {name: value.score for name, value in aggregate(results).items()}
        complete = {name: mean for name, mean in means.items() if mean is not None}
        return PeriodicScores({**scores, **complete}, failures)

    def logged(self, step: int) -> bool:
        """Whether the scores after this step are in the run's metrics, into which they come last. Collective."""
        found = False
        if self._world.is_main and (path := self._run / METRICS_NAME).exists():
            with path.open(encoding="utf-8") as lines:
                records = (json.loads(line) for line in lines if '"evaluation"' in line)
                found = any(record["kind"] == "evaluation" and record["step"] == step for record in records)
        return bool(self._world.gather_objects(found)[0])

    def unscored(self) -> str:
        """One sentence on the tasks that failed since this process started; empty when none did."""
        if not self._failed:
            return ""
        found = "; ".join(f"{task} (step {', '.join(map(str, steps))})" for task, steps in self._failed.items())
        where = self._run / "evaluation"
        return f"Tasks without a score: {plain(found, longest=600)}. The reasons are in {where}/step-*/summary.json."
