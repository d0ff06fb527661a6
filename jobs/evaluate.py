"""`neuclip evaluate`: scores of one or several checkpoints on a suite of tasks.

Several processes: `accelerate launch --num_processes 4 --module jobs.evaluate CHECKPOINT --suite DIR`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.evaluation.evaluator import Evaluation

EXIT_SOME_FAILED = 1


@click.command("evaluate", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("arguments", nargs=-1, required=True, metavar="CHECKPOINT... [KEY=VALUE...]")
@click.option("--suite", required=True, help="A folder of tasks, or datacomp or scenes below --data.")
@click.option("--data", type=click.Path(path_type=Path), help="Where named suites live [$NEUCLIP_EVALUATION_DATA].")
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the results [RUN/evaluation/CHECKPOINT].")
@click.option("--task", "tasks", multiple=True, help="Only this task; may be given several times.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    arguments: tuple[str, ...], suite: str, data: Path | None, output: Path | None, tasks: tuple[str, ...], device: str
) -> int:
    """Evaluate every CHECKPOINT on a suite, all of them in one pass over its images.

    A CHECKPOINT is a folder of ours (RUN/checkpoints/step-00000500), a run (its latest), a hub folder, or
    ARCH:PRETRAINED with an open_clip tag or a weights file. Settings are KEY=VALUE, for example workers=8
    batch_size=256; only micro_batch and blank_class (keep or drop) can change a score. Results are one JSON per task;
    a result whose inputs have not changed is not computed again. Exits with 1 when a task failed.
    """
    from pipeline.config import parse, parse_overrides
    from pipeline.evaluation import evaluate
    from pipeline.evaluation.evaluator import EvaluationConfig
    from pipeline.evaluation.suite import open_suite
    from pipeline.evaluation.world import start_processes

    settings = [argument for argument in arguments if re.match(r"^[a-z_]+=", argument)]
    checkpoints = [argument for argument in arguments if argument not in settings]
    if not checkpoints:
        raise UserError("No CHECKPOINT was given, only settings: name a checkpoint folder, a run or ARCH:PRETRAINED.")
    config = parse(EvaluationConfig, parse_overrides(settings))
    opened = open_suite(suite, data=data)
    if tasks:
        opened = opened.only(tasks)
    with start_processes(device) as processes:
        say = click.echo if processes[0].rank == 0 else (lambda text: None)
        evaluations = evaluate(
            checkpoints,
            suite=opened,
            output=output,
            config=config,
            processes=processes,
            progress=lambda key, found: say("\n".join(_lines(key, found))),
        )
        for evaluation in evaluations:
            say("\n".join(_summary(evaluation)))
    return EXIT_SOME_FAILED if any(evaluation.failures for evaluation in evaluations) else 0


def _lines(key: str, evaluations: Sequence[Evaluation]) -> list[str]:
    lines = []
    for evaluation in evaluations:
        if key in evaluation.failures:
            lines.append(f"{key:<44} FAILED   {evaluation.failures[key]}")
            continue
        result, timing = evaluation.results[key], evaluation.timings.get(key)
        chance = f"(chance {result.chance:.4f})" if result.chance is not None else ""
        speed = f"{timing['images_per_second']:8.0f} images/s" if timing else "unchanged"
        lines.append(f"{key:<44} {result.score:.4f}   {result.main_metric} {chance} {speed}")
    return lines


def _summary(evaluation: Evaluation) -> list[str]:
    from pipeline.evaluation.aggregate import aggregate, describe

    lines = [f"{evaluation.model.source}: {len(evaluation.results)} tasks, {len(evaluation.failures)} failed"]
    lines += [describe(value) for value in aggregate(evaluation.results).values()]
    return [*lines, f"Results: {evaluation.folder}"]


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip evaluate")
