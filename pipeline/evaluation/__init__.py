"""Deterministic evaluation of CLIP models: zero-shot classification, retrieval and association on DataComp's tasks.

    from pipeline.evaluation import evaluate
    evaluate("runs/a/checkpoints/step-00000500", suite="data/scenes")

Importing this package is cheap; torch and open_clip come with the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.distributed.world import World
    from pipeline.evaluation.datasets.suite import Suite
    from pipeline.evaluation.run.results import Evaluation
    from pipeline.evaluation.run.session import EvaluationConfig
    from pipeline.model.evaluation_model import EvaluationModel


def evaluate(
    checkpoints: str | EvaluationModel | Sequence[str | EvaluationModel],
    *,
    suite: str | Path | Suite,
    output: str | Path | None = None,
    config: EvaluationConfig | None = None,
    processes: tuple[World, Any] | None = None,
    progress: Callable[[str, Sequence[Evaluation]], None] | None = None,
) -> list[Evaluation]:
    """Evaluate checkpoints on every task of a suite, all of them in one pass over its images.

    Args:
        checkpoints: What `load_for_evaluation` takes, or models in memory; one or several.
        suite: A folder of tasks, a YAML file of tasks, `datacomp`, or what `open_suite` returns.
        output: The folder for one checkpoint's results; for several, of one folder each. By default
            RUN/evaluation/<checkpoint> for a checkpoint inside a run.
        config: Settings; by default those of `EvaluationConfig`.
        processes: Ranks and this process's device, from `start_processes` or a training run; by default one process.
        progress: Called after every task with its key and the evaluations.

    Returns:
        One `Evaluation` per checkpoint, the same on every process. A task that failed is in its `failures`.

    Raises:
        UserError: A checkpoint or the suite cannot be loaded at all, or results cannot be written to `output`.
    """
    import torch

    from pipeline.distributed.world import World
    from pipeline.evaluation.compute import Compute
    from pipeline.evaluation.datasets.suite import Suite, open_suite
    from pipeline.evaluation.run.evaluator import Evaluator, load_checkpoint, prepare
    from pipeline.evaluation.run.results import write_summary
    from pipeline.evaluation.run.session import EvaluationConfig, Session
    from pipeline.model.evaluation_model import EvaluationModel

    opened = suite if isinstance(suite, Suite) else open_suite(suite)
    world, device = processes or (World(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    settings = config or EvaluationConfig()
    compute = Compute(device, precision=settings.precision, on_result=world.progress)
    session = Session(settings, world, compute)
    given = [checkpoints] if isinstance(checkpoints, str | EvaluationModel) else list(checkpoints)
    models = [load_checkpoint(item, device=device) if isinstance(item, str) else item for item in given]
    evaluations, opened = prepare(models, opened, output=output, session=session)
    Evaluator(evaluations, session=session).run(opened, progress=progress)

    def summarize() -> None:
        for evaluation in evaluations:
            evaluation.summary = write_summary(evaluation, opened)

    session.on_main(summarize)
    return evaluations
