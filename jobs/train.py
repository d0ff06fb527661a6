"""Train a CLIP model from a recipe.

neuclip train --recipe jobs/recipes/demo.yaml output=runs/one optimizer.lr=1e-3
deepspeed --num_gpus 8 --module jobs.train --recipe ... ;  torchrun --nproc-per-node 8 -m jobs.train --recipe ...
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import click

from jobs.recipe_option import TRAINING, RecipePath, load_run
from pipeline.distributed.signals import exit_on_stop_signals
from pipeline.errors import UserError

EXIT_CODES = (
    "Exit codes: 0 done, 2 invalid input, 74 the last checkpoint could not be written, 75 stopped by a signal (while "
    "training: after a checkpoint), 76 another rank or a loading worker hangs or has died (printed: which one, where)."
)


@click.command(name="train", epilog=EXIT_CODES)
@click.option("--recipe", type=RecipePath(TRAINING), help="YAML with the run's settings, or a name: cc12m.")
@click.option("--resume", metavar="latest|DIR", help="Continue from the newest good checkpoint, or from the given one.")
@click.option(
    "--dry-run", is_flag=True, help="Check the settings, print what would be trained and every setting, and exit."
)
@click.option("--announced", is_flag=True, hidden=True)  # by the launcher of --ranks
@click.option("--local_rank", "--local-rank", type=int, hidden=True, help="Set by the deepspeed launcher.")
@click.option("--ranks", type=click.IntRange(min=1), help="Number of processes to start on this machine, one per GPU.")
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
def command(
    recipe: str | None,
    resume: str | None,
    dry_run: bool,
    announced: bool,
    local_rank: int | None,
    ranks: int | None,
    overrides: tuple[str, ...],
) -> int:
    """Train a CLIP model from a recipe; defaults < recipe < SECTION.KEY=VALUE.

    \b
    Example:  neuclip train --recipe cc3m data.sources=data/cc3m output=runs/mine optimizer.lr=5e-4
    Several GPUs:  neuclip train --ranks 8 --recipe cc3m output=runs/mine

    `neuclip settings` and docs/settings.md list every setting with its default. config.yaml, metrics.jsonl,
    tensorboard/ and checkpoints/ are written to the run's folder (`output`).
    """
    exit_on_stop_signals()
    scaled: dict[str, str] = {}
    run = load_run(recipe, overrides, scaled=scaled)
    from pipeline.config import dump
    from pipeline.data.order.mixture import load_mixture
    from pipeline.planning.run_plan import start_lines
    from pipeline.training.recipe import check_captions_of, check_run

    if ranks is not None:
        check_run(run, world_size=ranks)
    check_captions_of(run)
    if dry_run:
        from pipeline.model.towers import check_model

        check_model(run.model)
        pairs = None
        with suppress(UserError):
            pairs = load_mixture(run.data).epoch_samples
        for line in start_lines(run, pairs=pairs, ranks=ranks or 1, scaled=scaled):
            click.echo(f"# {line}")
        click.echo(dump(run), nl=False)
        return 0
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main and not announced and run.telemetry.progress != "quiet":
        with suppress(UserError):  # the start says what is wrong, on every rank
            pairs, size = load_mixture(run.data).epoch_samples, ranks or int(os.environ.get("WORLD_SIZE", "1"))
            click.echo("\n".join(start_lines(run, pairs=pairs, ranks=size, scaled=scaled)))
            sys.stdout.flush()
    if ranks is not None and ranks > 1:
        from pipeline.distributed.launch import launch

        given = [f"--{name}={value}" for name, value in (("recipe", recipe), ("resume", resume)) if value is not None]
        return launch("jobs.train", [*given, "--announced", *overrides], ranks=ranks)
    from pipeline.distributed.launch import end_with_launcher

    end_with_launcher()  # before the imports below, which take seconds
    from pipeline.training.run import train

    code = train(run, resume=resume)
    if code == 0 and is_main and run.telemetry.progress != "quiet":
        click.echo(after_training(Path(run.output)))
    return code


def after_training(run: Path) -> str:
    """Three lines for the end of training: the model with its best validation, the report, the next command."""
    from pipeline.checkpoint.layout import best_checkpoint, validated_model
    from pipeline.run_files import finished_checkpoints, read_meta

    best, last = best_checkpoint(run), finished_checkpoints(run)[-1:]
    validated = best and validated_model(best)
    lines = [f"Model:   {path}" for path in last]
    if best is not None:
        lines = [f"Best validation: loss {read_meta(best)['validation']['best_loss']:.4f}, {validated}"]
    model = shlex.quote(str(validated or next(iter(last), run)))
    lines.append(f"Report:  neuclip report {shlex.quote(str(run))}")
    lines.append(f"Next:    neuclip evaluate {model} --suite FOLDER")
    return "\n".join(lines)


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.train")
