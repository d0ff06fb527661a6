"""`neuclip normalizers RUN`: exact log-normalizers of a run's checkpoints, and the error of its method's estimates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.analysis.normalizer_error import Measurement

RESULT_NAME = "normalizers.jsonl"


@click.command(name="normalizers", epilog="With several ranks: torchrun --nproc-per-node 8 -m jobs.normalizers RUN")
@click.argument("run", type=click.Path(exists=True, file_okay=False))
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--samples", type=click.IntRange(min=2), help="Number of anchors to compare, about [all; paper: 10,000].")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(run: str, overrides: tuple[str, ...], samples: int | None, device: str) -> None:
    """Compute exact log-normalizers over the whole dataset and the error of the method's estimates.

    See NeuCLIP, appendix B.6. RUN is a run's folder, to measure all of its checkpoints, or one checkpoint.
    SECTION.KEY=VALUE overrides the configuration stored in the checkpoint, for example data.sources if the shards were
    moved. Results are appended to normalizers.jsonl in the run's folder. "In use": estimates after the updates on the
    anchor's own batch, as a training step uses them; "cold": estimates from the stored state alone.
    """
    from pipeline.analysis.normalizer_error import checkpoints_of, measure, run_of
    from pipeline.config import parse_overrides
    from pipeline.distributed.start import start_world

    with start_world(device=device) as world:
        tell = click.echo if world.is_main else (lambda message: None)
        checkpoints = checkpoints_of(Path(run), on_damage=tell)
        folder = checkpoints[0].path.parent.parent
        world.work_on_main(lambda: _check_result(folder / RESULT_NAME))
        measurements = []
        for checkpoint in checkpoints:
            config = run_of(checkpoint, changes=parse_overrides(overrides))
            measurement, _ = measure(config, checkpoint, world=world, limit=samples)
            measurements.append(measurement)
            if world.is_main:
                with (folder / RESULT_NAME).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(measurement.record()) + "\n")
        if world.is_main:
            show(measurements, title=f"{config.objective.name}: error of log-normalizers")


def _check_result(path: Path) -> None:
    """Check before the work that its result can be written."""
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): copy the run, or mount it so.") from error


def show(measurements: list[Measurement], *, title: str) -> None:
    """Print a table and a note on which samples were not measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    names = ("samples seen", "tau", "exact: mean", "variance", "MSE in use", "MSE cold", "bias in use", "bias cold")
    for name in names:
        table.add_column(name, justify="right")
    for m in measurements:
        values = (m.tau, m.mean, m.variance, m.in_use.mse, m.cold.mse, m.in_use.bias, m.cold.bias)
        table.add_row(f"{m.samples:,}", *(f"{value:.4f}" for value in values))
    Console().print(table)
    last = measurements[-1]
    click.echo(
        f"Exact over {last.pairs:,} pairs ({last.left_over:,} of the dataset fill no batch of {last.batch_size:,} and "
        f"are left out); {last.rows:,} anchors compared in both directions. A constant at the mean would have the "
        "variance as its error: read both beside tau, since a model that has not learned is easy to predict."
    )
    if fresh := [f"{m.samples:,}" for m in measurements if m.fresh]:
        click.echo(
            f"After {', '.join(fresh)} samples the next step restarts the network: what is in use there is fresh. "
            "To measure between restarts, choose a checkpoint.every that is no multiple of objective.restart_every."
        )


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip normalizers")
