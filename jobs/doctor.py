"""`neuclip doctor`: check this node before starting a run on it, or say what happened to a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pipeline.planning.node_checks import DoctorFinding

EXIT_BROKEN = 1
MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "broken": ("BROKEN", "red")}


@click.command(name="doctor", epilog="Exit codes: 0 a run can start or continue, 1 something is broken.")
@click.argument("run", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--output", type=click.Path(path_type=Path), default="runs", show_default=True, help="Folder of the runs."
)
@click.option("--data", "manifests", multiple=True, help="Folder of shards to try reading; may be given several times.")
@click.option("--allow-outside", is_flag=True, help="Read shards that --data's manifest names outside of its folder.")
def command(run: Path | None, output: Path, manifests: tuple[str, ...], **allowed: bool) -> int:
    """Check this node, or say what happened to a RUN.

    Without RUN: check versions, GPUs, a collective, disk, shared memory and compiler, with --data also how fast it is
    read, and report what to fix.

    With the folder of a RUN: say how it ended, which checkpoints are intact, and the command to continue. Nothing is
    changed.
    """
    if run is not None:
        from pipeline.planning.diagnosis import diagnose

        return EXIT_BROKEN if show(diagnose(run)) else 0
    count = show(examine(output, manifests, **allowed))
    click.echo("\nA run can start here." if not count else f"\n{count} broken: fix this before starting a run.")
    return EXIT_BROKEN if count else 0


def examine(output: Path, manifests: tuple[str, ...], **allowed: bool) -> Iterator[DoctorFinding]:
    """Run all checks, the cheap ones first, and yield each finding as soon as it is known."""
    from pipeline.planning import node_checks

    yield from node_checks.check_versions()
    yield node_checks.check_compiler()
    yield from node_checks.check_shared_memory()
    yield node_checks.check_disk(output)
    for manifest in manifests:
        yield node_checks.check_data(manifest, **allowed)
    yield node_checks.check_collectives()  # before this process allocates GPU memory itself
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
