"""`neuclip watch`: evaluate the checkpoints of runs as they are written; templates in jobs/cluster/watch-*."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import click

from pipeline.errors import UserError


@click.command("watch", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("arguments", nargs=-1, required=True, metavar="RUN... [KEY=VALUE...]")
@click.option("--suite", required=True, help="A folder or YAML file of tasks, or a name below --data.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of named suites [$NEUCLIP_EVALUATION_DATA].")
@click.option("--task", "tasks", multiple=True, help="Only this task; may be given several times.")
@click.option("--once", is_flag=True, help="Evaluate pending checkpoints, then exit: for cron and timers.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(
    arguments: tuple[str, ...], suite: str, data: Path | None, tasks: tuple[str, ...], once: bool, device: str
) -> int:
    """Evaluate every new checkpoint of every RUN on a suite, each exactly once, the newest first.

    Any number of watchers may share the work, on one or many machines with a shared file system; if one dies, another
    takes over its work. Settings are KEY=VALUE: interval, every, and those of `neuclip evaluate` as
    evaluation.KEY=VALUE. RUN/evaluation-ledger records what was done; results are in RUN/evaluation, and scores are
    added to RUN/tensorboard.
    """
    from pipeline.config import parse, parse_overrides
    from pipeline.evaluation.datasets.suite import open_suite
    from pipeline.evaluation.run.session import EvaluationConfig, start_processes
    from pipeline.evaluation.watcher import WatchConfig, Watcher
    from pipeline.report import update_scores

    settings = [argument for argument in arguments if re.match(r"^[a-z_.]+=", argument)]
    tree = parse_overrides(settings)
    evaluation = parse(EvaluationConfig, tree.pop("evaluation", {}), prefix="evaluation")
    config = parse(WatchConfig, tree, extra_keys=("evaluation.workers", "evaluation.batch_size"))
    runs = [Path(argument) for argument in arguments if argument not in settings]
    if not runs or not all(map(Path.is_dir, runs)):
        missing = ", ".join(str(run) for run in runs if not run.is_dir())
        raise UserError(f"There is no run folder {missing!r}: give the folder of a training run.")
    opened = open_suite(suite, data=data, tasks=tasks)
    # Schedulers send it before SIGKILL: the attempt does not count.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with start_processes(device) as processes:
        watcher = Watcher(
            runs,
            suite=opened,
            config=config,
            evaluation=evaluation,
            processes=processes,
            say=lambda text: click.echo(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"),
            on_scored=update_scores,
        )
        return 0 if watcher.run(once=once) else 1


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip watch")
