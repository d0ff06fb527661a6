"""Train a CLIP model from a recipe.

neuclip train --recipe jobs/recipes/demo.yaml output=runs/one optimizer.lr=1e-3
deepspeed --num_gpus 8 --module jobs.train --recipe ... ;  torchrun --nproc-per-node 8 -m jobs.train --recipe ...
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.plan import counted
from jobs.recipe_option import TRAINING, RecipePath, load_run
from pipeline.cores import usable_cores
from pipeline.distributed.processes import end_with_launcher, launch
from pipeline.distributed.signals import exit_on_stop_signals
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.training.recipe import RunConfig

CORE_GFLOPS = 50.0
"""What a CPU core reaches in fp32, roughly."""
LONG_STEP = 60.0
"""Seconds of a step from which on a CPU is hardly what was meant."""
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
            print("\n".join(start_lines(run, pairs=pairs, ranks=size, scaled=scaled)), flush=True)
    if ranks is not None and ranks > 1:
        given = [f"--{name}={value}" for name, value in (("recipe", recipe), ("resume", resume)) if value is not None]
        return launch("jobs.train", [*given, "--announced", *overrides], ranks=ranks)
    end_with_launcher()  # before the imports below, which take seconds
    from pipeline.training.run import train

    code = train(run, resume=resume)
    if code == 0 and is_main and run.telemetry.progress != "quiet":
        click.echo(after_training(Path(run.output)))
    return code


def start_lines(run: RunConfig, *, pairs: int | None, ranks: int, scaled: Mapping[str, str]) -> list[str]:
    """What a run says before its first step, and a warning where the device cannot be meant.

    `pairs` are those in the data (None: it is not there yet), and `scaled` the rates that `reference_batch` has
    changed, as `load_recipe` gives them.

    Raises:
        UserError: There is no such architecture.
    """
    import torch

    from pipeline.engine.engine_protocol import ENGINES
    from pipeline.planning.run_plan import measured_towers, stage_flops

    towers, architecture, _ = measured_towers(run.model)
    facts = ENGINES[run.engine.name].facts(
        run.engine, optimizer=run.optimizer, global_batch=run.batch_size, world_size=ranks
    )
    on_cpu = run.engine.device == "cpu" or not torch.cuda.is_available()
    device = "CPU" if on_cpu else torch.cuda.get_device_name()
    trained = towers.trained_parameters
    some = f", {trained:,} of them trained" if trained < towers.parameters else ""
    was = f" = {scaled['optimizer.lr']}" if "optimizer.lr" in scaled else ""
    steps, output = run.total_steps, shlex.quote(run.output)
    board = f", or tensorboard --logdir {output}" if run.telemetry.tensorboard else ""
    lines = {
        "model": f"{architecture.name}, {towers.parameters / 1e6:,.1f}M parameters{some}; method {run.objective.name}",
        "data": f"{pairs:,} pairs" if pairs else "not there yet",
        "budget": (
            f"{counted(steps, 'step')} of batch_size={run.batch_size}"
            + (f" ({steps * run.batch_size / pairs:,.2f} times the data)" if pairs else "")
        ),
        "device": f"{device}, {counted(ranks, 'rank')}, {'bf16' if facts.bf16 else 'fp32'}",
        "learning rate": f"{run.optimizer.lr:g}{was}",
        "output": f"{run.output}; to look at it: neuclip report {output}{board}",
    }
    rows = [f"{label:<14} {text}" for label, text in lines.items()]
    if on_cpu:
        step = sum(flops for _, flops in stage_flops(run, accumulation=False)) / steps
        rows += _unlikely(step=step, ranks=ranks)
    return rows


def _unlikely(*, step: float, ranks: int) -> list[str]:
    """Warnings about a run on a CPU; `step` in FLOP."""
    cores, here = usable_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    warnings = []
    if (seconds := step * here / ranks / (1e9 * CORE_GFLOPS * cores)) > LONG_STEP:
        warnings.append(
            f"WARNING: torch uses no GPU here: a step is {step / 1e12:,.1f} TFLOP, which takes "
            f"{counted(cores, 'core')} about {seconds / 60:,.0f} min. `neuclip doctor` says why a GPU is not seen."
        )
    if here > cores:
        warnings.append(
            f"WARNING: {here} ranks share {counted(cores, 'core')}, without a GPU: they only wait for each other. "
            f"Use --ranks {cores} at most."
        )
    return warnings


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
