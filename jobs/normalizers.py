"""`neuclip normalizers RUN`: exact log-normalizers of a run's checkpoints, and the error of its method's estimates."""

from __future__ import annotations

import json
from pathlib import Path

import click


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
    from rich.console import Console
    from rich.table import Column, Table

    from pipeline.analysis.normalizer_error import checkpoints_of, measure, run_of
    from pipeline.config import parse_overrides
    from pipeline.distributed.start import start_world
    from pipeline.files import check_writable

    with start_world(device=device) as world:
        tell = click.echo if world.is_main else (lambda message: None)
        checkpoints = checkpoints_of(Path(run), on_damage=tell)
        result = checkpoints[0].path.parent.parent / "normalizers.jsonl"
        world.work_on_main(lambda: check_writable(result))
        names = ("samples seen", "tau", "exact: mean", "variance", "MSE in use", "MSE cold", "bias in use", "bias cold")
        table = Table(*(Column(name, justify="right") for name in names))
        for checkpoint in checkpoints:
            config = run_of(checkpoint, changes=parse_overrides(overrides))
            m = measure(config, checkpoint, world=world, limit=samples)
            errors = [m[kind][name] for name in ("mse", "bias") for kind in ("in_use", "cold")]
            values = (m["tau"], m["mean"], m["variance"], *errors)
            table.add_row(f"{m['samples']:,}", *(f"{value:.4f}" for value in values))
            if world.is_main:
                with result.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(m) + "\n")
        if world.is_main:
            table.title = f"{config.objective.name}: error of log-normalizers"
            Console().print(table)
        tell(
            f"Exact over {m['pairs']:,} pairs ({m['left_over']:,} of the dataset fill no batch of {m['batch_size']:,} "
            f"and are left out); {m['rows']:,} anchors compared in both directions. A constant at the mean would have "
            "the variance as its error: read both beside tau, since a model that has not learned is easy to predict."
        )


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip normalizers")
