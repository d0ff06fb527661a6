"""`neuclip study NAME`: run the runs of a study (resumable, in parallel) and render its tables and figures."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.config import suggest
from pipeline.cores import usable_cores
from pipeline.departed import COMMANDS
from pipeline.errors import EXIT_INTERRUPTED, UserError
from pipeline.files import file_lock, write_json

if TYPE_CHECKING:
    from jobs.studies.declare import Study, Unit


@click.command(name="study")
@click.argument("name", required=False)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--size", type=click.Choice(["desk", "smoke", "paper"]), default="desk", show_default=True)
@click.option("--output", help="Folder of runs and results [runs/studies/SIZE]; identical runs are shared by studies.")
@click.option("--parallel", type=click.IntRange(min=1), help="Runs in parallel [one per GPU, else one per core].")
@click.option("--list", "list_units", is_flag=True, help="List the runs and their status, and exit.")
@click.option("--unit", type=click.IntRange(min=0), help="Run only this entry of the list: a task of a job array.")
@click.option("--render", "only_render", is_flag=True, help="Render the finished runs; run nothing.")
def command(
    name: str | None,
    overrides: tuple[str, ...],
    size: str,
    output: str | None,
    parallel: int | None,
    list_units: bool,
    unit: int | None,
    only_render: bool,
) -> int:
    """Reproduce a table or figure of the papers: small on the built-in corpus, or in full on the real data.

    Without NAME, lists the studies. Run again, a study continues: finished runs are not repeated, and studies share
    identical runs. SECTION.KEY=VALUE changes every run, for example evaluation.suite=/data/suite for the paper's size.
    Exit code 1: some runs failed; the others are rendered.
    """
    names = study_names()
    if name and name not in names:  # before imports that take seconds
        raise UserError(COMMANDS.get(f"study {name}") or f"There is no study {name!r}. {suggest(name, names)}")
    from jobs.studies.declare import load_study, units_of

    if name is None:
        for each in names:
            click.echo(f"{each:<12} {load_study(each).title}  [{load_study(each).reproduces}]")
        return 0
    place = Path(output or f"runs/studies/{size}")
    study, units = load_study(name), units_of(name, size=size, overrides=overrides)
    if list_units:
        for number, one in enumerate(units):  # for --unit
            state, samples = "done" if one.is_done(place) else "-", f"{one.run.samples:>13,} samples"
            click.echo(f"{number:>4}  {state:<5} {one.label:<56} {samples}  {one.folder(place)}")
        return 0
    if unit is not None and unit >= len(units):
        raise click.BadParameter(f"{unit}: {name} has {len(units)} runs at this size, 0 to {len(units) - 1}.")
    chosen = units if unit is None else [units[unit]]
    failed = {} if only_render else run_units(study, chosen, size=size, place=place, parallel=parallel)
    if unit is None:
        from jobs.studies.publish import publish

        shown = " ".join([f"neuclip study {name}", *([f"--size {size}"] if size != "desk" else []), *overrides])
        files = publish(name, size=size, units=units, place=place, command=shown)
        done = sum(one.is_done(place) for one in units)
        click.echo(f"{done} of {len(units)} runs in {place / name}: {', '.join(file.name for file in files)}")
    for label, code in failed.items():
        click.echo(f"FAILED: {label} (exit code {code})", err=True)
    return 1 if failed else 0


def study_names() -> tuple[str, ...]:
    """The studies that have a declaration."""
    files = (Path(__file__).parent / "studies").glob("*.yaml")
    return tuple(sorted(path.stem for path in files if path.stem != "sizes"))


def run_units(study: Study, units: list[Unit], *, size: str, place: Path, parallel: int | None) -> dict[str, int]:
    """Run the units that are not finished. Returns the exit codes of failed runs by label.

    Raises:
        UserError: Local shards of a run, which studies do not make themselves, are missing.
    """
    from jobs.studies.declare import SPEC_NAME, load_size

    left = [each for each in {unit.key: unit for unit in units}.values() if not each.is_done(place)]
    click.echo(f"{len(units)} runs, {len(units) - len(left)} of them done or shared.")
    if not left:
        return {}
    named = {source.manifest for unit in left if unit.corpus is None for source in unit.run.data.sources}
    if missing := sorted(path for path in named if "://" not in path and not Path(path).exists()):
        raise UserError(
            f"The runs need {', '.join(missing)}, which this machine does not have: make the shards first (a comment "
            "in the study's or the recipe's YAML file has the command), or name others with data.sources=FOLDER."
        )
    data = prepare_corpora({each.corpus for each in left if each.corpus}, size=size, place=place)
    for each in left:
        overrides = [*each.overrides, f"output={each.folder(place)}"]
        if each.corpus:
            overrides.append(f"data.sources={data[each.corpus] / 'shards'}")
            if study.measure != "none":  # timing runs are not evaluated
                overrides.append(f"evaluation.suite={data[each.corpus] / 'suite'}")
        spec = {"label": each.label, "recipe": str(each.recipe), "overrides": overrides, "measure": study.measure}
        write_json(each.folder(place) / SPEC_NAME, {**spec, "anchors": load_size(size)["anchors"]})
    return run_all(left, place, parallel=1 if study.alone else parallel)


def prepare_corpora(names: set[str], *, size: str, place: Path) -> dict[str, Path]:
    """Create the built-in corpora `names` with the stages of the demo; processes that need the same one wait.

    Returns:
        For each corpus, the folder of its `shards` and its `suite`.
    """
    from data_prep.scenes.scene import ScenesConfig
    from jobs.demo import ingest, make_suite
    from jobs.studies.declare import load_size

    folders = {name: place / "data" / name for name in sorted(names)}
    for name, folder in folders.items():
        corpus = load_size(size)["corpora"][name]
        scenes = ScenesConfig(**corpus, retrieval_pairs=corpus["held_out"], faults=())
        with file_lock(folder / "lock"):  # the tasks of a job array start at the same time
            ingest(scenes, folder)
            make_suite(scenes, folder / "suite")
    return folders


def run_all(units: Sequence[Unit], output: Path, *, parallel: int | None) -> dict[str, int]:
    """Run units, each with its specification in its folder below `output`, and on GPUs of its own if there are any.

    A failed unit does not stop the others. SIGINT, SIGTERM or SIGUSR1 terminates the running ones, which can be
    continued later.

    Returns:
        The exit codes of failed units by label.

    Raises:
        KeyboardInterrupt: One of these signals was received.
        UserError: A unit needs more GPUs than there are.
    """
    import torch

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(available)))
    gpus = [name.strip() for name in visible.split(",")][:available]
    largest = max(units, key=lambda unit: unit.ranks)
    if gpus and largest.ranks > len(gpus):
        raise UserError(f"{largest.label} needs {largest.ranks} GPUs, but {len(gpus)} are visible here.")
    free, places = queue.SimpleQueue[list[str]](), len(gpus) // largest.ranks
    for place in range(places):
        free.put(gpus[place * largest.ranks :])
    count = min(parallel or places or usable_cores(), places or len(units), len(units))
    processes, stopped = list[subprocess.Popen](), threading.Event()

    def one(number: int, unit: Unit) -> int:
        if stopped.is_set():
            return EXIT_INTERRUPTED
        folder, environment, began = unit.folder(output), dict(os.environ), time.monotonic()
        mine = free.get() if gpus else []
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine[: unit.ranks])
        elif count > 1:  # a single run may use the whole machine
            environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        try:
            with (folder / "log.txt").open("ab") as log:
                torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(unit.ranks), "-m"]
                words = ["-m", *(torchrun if unit.ranks > 1 else []), "jobs.studies.unit", str(folder)]
                process = subprocess.Popen(
                    [sys.executable, *words], env=environment, stdout=log, stderr=subprocess.STDOUT
                )
            processes.append(process)
            code = process.wait()
        finally:
            free.put(mine)
        what = "done" if code == 0 else f"FAILED with exit code {code}, see {folder / 'log.txt'}"
        click.echo(f"{number}/{len(units)} {unit.label}: {what} ({time.monotonic() - began:.0f} s)")
        return code

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    with ThreadPoolExecutor(count) as pool:
        try:
            codes = {unit.label: pool.submit(one, number, unit) for number, unit in enumerate(units, 1)}
            return {label: code for label, future in codes.items() if (code := future.result())}
        except KeyboardInterrupt:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()  # the run writes a checkpoint; leaving the pool waits for it
            raise


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="neuclip study")
