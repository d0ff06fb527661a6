"""`neuclip evaluate`: evaluate one or more checkpoints on a suite of tasks.

With several processes: `accelerate launch --num_processes 4 --module jobs.evaluate CHECKPOINT --suite DIR`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.errors import UserError
from pipeline.run_files import check_model

if TYPE_CHECKING:
    from pipeline.evaluation.run.results import Evaluation

EXIT_SOME_FAILED = 1
SHOWN_LEFT_OUT = 3
KEY_WIDTH = 51  # the longest key of the benchmark has 50 letters


@click.command("evaluate", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("arguments", nargs=-1, required=True, metavar="CHECKPOINT... [KEY=VALUE...]")
@click.option("--suite", required=True, help="A folder or YAML file of tasks, or a name below --data.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of named suites [$NEUCLIP_EVALUATION_DATA].")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for the results [RUN/evaluation/CHECKPOINT].")
@click.option("--task", "tasks", multiple=True, help="Only this task; may be given several times.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    arguments: tuple[str, ...], suite: str, data: Path | None, output: Path | None, tasks: tuple[str, ...], device: str
) -> int:
    """Evaluate every CHECKPOINT on a suite, all of them in one pass over its images.

    A CHECKPOINT is a checkpoint folder (RUN/checkpoints/step-00000500), a run (its latest checkpoint), a hub folder, or
    ARCH:PRETRAINED, where ARCH is an open_clip name or a model config in JSON (my-model.json) and PRETRAINED one of its
    tags or a weights file (ViT-B-32:openai, my-model.json:weights.safetensors). A suite is a folder of tasks, a YAML
    file that describes tasks, or datacomp or scenes in the folder --data. Settings are KEY=VALUE, for example workers=8
    batch_size=256; only micro_batch, precision and blank_class (keep or drop) can change a score. The results are one
    JSON file per task, a summary, eval_results.jsonl in the benchmark's format, and scores.csv. Results whose inputs
    have not changed are reused. Scores of a run's checkpoints are added to RUN/tensorboard. Exits with 1 if a task
    failed.
    """
    settings = [argument for argument in arguments if re.match(r"^[a-z_]+=", argument)]
    checkpoints = [argument for argument in arguments if argument not in settings]
    if not checkpoints:
        raise UserError("No CHECKPOINT was given, only settings: name a checkpoint folder, a run or ARCH:PRETRAINED.")
    for checkpoint in checkpoints:
        check_model(checkpoint)  # before imports that take seconds
    from pipeline.config import parse, parse_overrides
    from pipeline.evaluation import evaluate
    from pipeline.evaluation.datasets.suite import open_suite
    from pipeline.evaluation.run.session import EvaluationConfig, start_processes
    from pipeline.report import update_scores

    config = parse(EvaluationConfig, parse_overrides(settings))
    opened = open_suite(suite, data=data, tasks=tasks)
    with start_processes(device) as processes:
        say = click.echo if processes[0].rank == 0 else (lambda text: None)
        if len(checkpoints) > 1:  # lines that number the checkpoints and the columns
            numbers = [f"[{number}]" for number in range(1, len(checkpoints) + 1)]
            say("\n".join(f"{number} {checkpoint}" for number, checkpoint in zip(numbers, checkpoints, strict=True)))
            say(" " * KEY_WIDTH + "".join(f"{number:>8}" for number in numbers))
        evaluations = evaluate(
            checkpoints,
            suite=opened,
            output=output,
            config=config,
            processes=processes,
            progress=lambda key, done: say("\n".join(_lines(key, done))),
        )
        for evaluation in evaluations:
            say("\n".join(_report(evaluation)))
        if processes[0].rank == 0:
            for run in {evaluation.run: None for evaluation in evaluations if evaluation.run}:
                update_scores(run)
    return EXIT_SOME_FAILED if any(evaluation.failures for evaluation in evaluations) else 0


def _lines(key: str, evaluations: Sequence[Evaluation]) -> list[str]:
    """The line of a task with one score per checkpoint, followed by failures and the checkpoints they affect."""
    cells = ["FAILED" if key in e.failures else f"{e.results[key].score:.4f}" for e in evaluations]
    lines = [f"{key:<{KEY_WIDTH}}" + "".join(f"{cell:>8}" for cell in cells)]
    scored = [e for e in evaluations if key in e.results]
    if scored:
        result = scored[0].results[key]
        chance = f"(chance {result.chance:.4f})" if result.chance is not None else ""
        timing = next((e.timings[key] for e in scored if key in e.timings), None)
        rate = timing["images_per_second"] if timing else 0.0
        speed = f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.2g} images/s" if timing else "unchanged"
        lines[0] += f"   {f'{result.main_metric} {chance}':<40} {speed:>14}"
    reasons: dict[str, list[int]] = {}
    for number, evaluation in enumerate(evaluations, 1):
        if key in evaluation.failures:
            reasons.setdefault(evaluation.failures[key], []).append(number)
    for reason, numbers in reasons.items():
        whose = "" if len(numbers) == len(evaluations) else "".join(f"[{number}] " for number in numbers)
        lines.append(f"    {whose}{reason}")
    return lines


def _report(evaluation: Evaluation) -> list[str]:
    """The summary: all tasks of this suite with these settings, evaluated now or earlier in the same folder."""
    from pipeline.evaluation.run.results import describe

    summary = evaluation.summary
    if summary is None:  # on all processes but the first
        return []
    earlier = len(summary.results) - len(evaluation.results)
    with_earlier = f" ({earlier} of them evaluated earlier)" if earlier else ""
    tasks = "1 task" if len(summary.results) == 1 else f"{len(summary.results)} tasks"
    counts = f"{tasks}{with_earlier}, {len(summary.failures)} failed"
    lines = [f"{evaluation.model.source}: {counts}"]
    lines += [f"FAILED {key}" for key in summary.failures if key not in evaluation.failures]
    lines += [f"Not counted: {key} ({reason})" for key, reason in list(summary.left_out.items())[:SHOWN_LEFT_OUT]]
    if len(summary.left_out) > SHOWN_LEFT_OUT:
        lines.append(f"Not counted: {len(summary.left_out) - SHOWN_LEFT_OUT} more, see summary.json")
    lines += [describe(value) for value in summary.aggregates.values()]
    return [*lines, f"Results: {evaluation.folder}"]


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip evaluate")
