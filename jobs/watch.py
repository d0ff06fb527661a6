"""`neuclip watch`: evaluate the checkpoints of runs as they are written; templates in jobs/cluster/watch-*."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

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
    runs = _runs([argument for argument in arguments if argument not in settings])
    opened = open_suite(suite, data=data)
    if tasks:
        opened = opened.only(tasks)
    opened.check_places()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, _interrupt)  # sent by schedulers before SIGKILL: the attempt does not count
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
        complete = watcher.run(stop, once=once)
    return 0 if complete else 1


def _runs(arguments: list[str]) -> list[Path]:
    missing = [path for path in arguments if not Path(path).is_dir()]
    if missing or not arguments:
        raise UserError(f"There is no run folder {missing[0] if missing else ''!r}: give the folder of a training run.")
    return [Path(path) for path in arguments]


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="neuclip watch")
