"""`neuclip evalsets`: fetch the 38 evaluation sets and verify every digest and count."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline.errors import UserError

EXIT_PROBLEMS = 1


@click.command(name="evalsets")
@click.argument("folder", type=click.Path(file_okay=False))
@click.option("--only", multiple=True, metavar="KEY", help="Only this set, for example vtab/pets; may be repeated.")
@click.option("--check", is_flag=True, help="Only verify the sets already in FOLDER; needs no network.")
@click.option(
    "--lock", is_flag=True, help="Record counts and digests of all tasks in FOLDER, including your own, in suite.json."
)
def command(folder: str, only: tuple[str, ...], check: bool, lock: bool) -> int:
    """Fetch the evaluation sets into FOLDER from the hub, and verify them.

    Run it again to continue; complete sets are not fetched again. With --lock nothing is fetched: the contents of
    FOLDER are recorded, and every later evaluation is checked against this record. Exits with 1 if a set is missing or
    wrong.
    """
    from data_prep.evaluation_sets import fetch_evalsets, record_suite

    if lock:
        if only or check:
            raise UserError("--lock records what is in FOLDER and fetches nothing: give it without the other options.")
        problems = record_suite(Path(folder), on_note=click.echo)
        if problems:
            click.echo(f"{Path(folder, 'suite.json')}: {len(problems)} tasks could not be recorded.")
        return EXIT_PROBLEMS if problems else 0
    samples, problems = fetch_evalsets(folder, only, offline=check, on_note=click.echo)
    click.echo(f"{len(samples)} sets verified, {sum(samples.values()):,} samples; {len(problems)} not usable.")
    for key, problem in problems.items():
        click.echo(f"  {key}: {problem}")
    return EXIT_PROBLEMS if problems else 0


if __name__ == "__main__":
    from jobs.cli import run

    run(command, prog_name="python -m jobs.evalsets")
