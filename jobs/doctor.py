"""`neuclip doctor`: check this node before starting a run on it, or say what happened to a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jobs.known_settings import TRAINING, FiniteRange, RecipePath, load_run

if TYPE_CHECKING:
    from pipeline.planning.node_checks import DoctorFinding

EXIT_BROKEN = 1
ANY_SIZE = 10_000_000
"""Samples of a recipe's data if it is not there yet: what a second of training takes does not depend on it."""
MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "red")}


@click.command(name="doctor", epilog="Exit codes: 0 a run can start or continue, 1 something is broken.")
@click.argument("run", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--quick", is_flag=True, help="With RUN: compare the sizes of a checkpoint's files, but not their hashes."
)
@click.option(
    "--output", type=click.Path(path_type=Path), default="runs", show_default=True, help="Folder of the runs."
)
@click.option("--needs-gib", type=FiniteRange(min=0), default=5.0, show_default=True, help="Free space needed in it.")
@click.option("--recipe", type=RecipePath(TRAINING), help="Compare loading with what this recipe's steps take.")
@click.option(
    "--mfu",
    type=FiniteRange(min=0, max=1, min_open=True),
    default=0.3,
    show_default=True,
    help="Share of a GPU's peak that these steps reach, as for `neuclip plan`.",
)
@click.option("--data", "manifests", multiple=True, help="Folder of shards to try reading; may be given several times.")
@click.option("--allow-commands", is_flag=True, help="Run the commands that --data's manifest names as shards.")
@click.option("--allow-outside", is_flag=True, help="Read shards that --data's manifest names outside of its folder.")
@click.option(
    "--constraints",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Tested versions [constraints.txt, if it exists].",
)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Processes of the gloo test.")
def command(run: Path | None, quick: bool, **options: Any) -> int:
    """Check this node, or say what happened to a RUN.

    Without RUN: check versions, GPUs, collectives, disk, shared memory and compiler, with --data also how fast it is
    read and decoded, and report what to fix.

    With the folder of a RUN: say how it ended, which checkpoints are intact, and the command to continue. Nothing is
    changed.
    """
    if run is not None:
        from pipeline.planning.diagnosis import diagnose

        return EXIT_BROKEN if show(diagnose(run, verify=not quick)) else 0
    count = show(examine(**options))
    click.echo("\nA run can start here." if not count else f"\n{count} broken: fix this before starting a run.")
    return EXIT_BROKEN if count else 0


def examine(
    *,
    output: Path,
    needs_gib: float,
    recipe: str | None,
    mfu: float,
    manifests: tuple[str, ...],
    constraints: Path | None,
    ranks: int,
    **allowed: bool,
) -> Iterator[DoctorFinding]:
    """Run all checks, the cheap ones first, and yield each finding as soon as it is known."""
    from pipeline.planning import node_checks
    from pipeline.planning.measured_checks import check_collectives, check_loading

    # An error in the recipe comes before the checks, which take minutes.
    run = None if recipe is None else load_run(recipe, (), dataset_size=ANY_SIZE)
    tested = Path("constraints.txt")
    yield from node_checks.check_packages(constraints or (tested if tested.is_file() else None))
    yield node_checks.check_compiler()
    yield from node_checks.check_memory()
    yield from node_checks.check_disk(output, needed_gib=needs_gib)
    with ThreadPoolExecutor(1) as pool:  # other processes, which import torch, too
        gloo = pool.submit(check_collectives, "cpu", ranks=ranks)
        import torch

        yield gloo.result()
    gpus, needed = max(1, torch.cuda.device_count()), None
    if run is not None:
        from pipeline.planning.run_costs import Assumptions
        from pipeline.planning.run_plan import plan_run

        needed = plan_run(run, gpus=1, assume=Assumptions(dataset_size=ANY_SIZE, mfu=mfu)).pairs_per_second
    for manifest in manifests:
        yield node_checks.check_data(manifest, needed=None if needed is None else gpus * needed, **allowed)
    for manifest in manifests[:1]:
        yield check_loading(manifest, ranks=gpus, needed=needed, **allowed)
    if torch.cuda.is_available():  # before this process allocates GPU memory itself
        yield check_collectives("cuda", ranks=torch.cuda.device_count())
    yield from node_checks.check_gpus()


def show(findings: Iterable[DoctorFinding]) -> int:
    """Print each finding as soon as it is known. Returns the number of those that are broken."""
    broken = 0
    for finding in findings:
        mark, colour = MARKS[finding.status]
        click.echo(f"{click.style(f'{mark:<7}', fg=colour)} {finding.subject:<14} {finding.found}")
        if finding.remedy:
            click.echo(f"{'':<22} -> {finding.remedy}")
        broken += finding.status == "broken"
    return broken


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.doctor")
