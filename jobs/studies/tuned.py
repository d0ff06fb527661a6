"""The study `tuned`: tunes every arm with the same number of trials, then runs what is reported.

    python -m jobs.studies.tuned tune FEATURES --cell icons-16384-b64-learned
    python -m jobs.studies.tuned report FEATURES --cell icons-16384-b64-learned
    python -m jobs.studies.tuned equal FEATURES --cell icons-16384-b64-learned
    python -m jobs.studies.tuned eps FEATURES --cell icons-16384-b64-learned
    python -m jobs.studies.tuned page

A cell's name may end with another width of the towers' hidden layer and with more trials than the usual ones, as
icons-16384-b16-learned-w2048-16trials: the first trials are shared with the cell without more, and the reported seeds
are new. FEATURES is the folder of `tuned_pairs`. Every finished run is a line of `docs/studies/tuned/runs.csv`; a
command does those that are missing. The plan, with the rules that these commands follow, is
`docs/studies/tuned/plan.md`.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from jobs.studies.schedule import in_processes
from jobs.studies.tuned_page import EQUAL_TO, FIGURE, TRIALS, figure, has_eps, page, trials_in
from jobs.studies.tuned_run import TunedSetting, train
from pipeline.versions import source_commit

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "studies" / "tuned"
RUNS = FOLDER / "runs.csv"
SAMPLES = 65_536
ARMS = (
    "openclip", "siglip", "fastclip_v3", "amorlip", "batch_gcl", "neuclip", "neuclip_plus", "neuclip_power",
)  # fmt: skip
PAST = ("near_plus", "near_openclip")
"""Arms of the page whose code, batches of near pairs with importance weights, left after the commits in the CSV."""
FINALISTS, SEEDS = 2, 5
TUNING_SEEDS, SWEEP_SEED = (1000, 1001), 100
VALUES = ("lr", "tau", "tau_lr", "eps", "rho", "bias", "power")
MEASURES = ("nce", "recall_at_1", "mrr", "error_batch", "error_in_use", "tau_end", "cpu_seconds")
COLUMNS = ("phase", "cell", "arm", "seed", "trial", "samples", *VALUES, *MEASURES, "commit")
EPS = (1e-14, 1 / 4096, 1 / 512, 1 / 64, 1 / 16, 1 / 4, 1.0)
SWEEP = (1e-14, 1e-6, None, 1 / 4096, 1 / 512, 1 / 64, 1 / 16, 1 / 4, 1.0)
"""None: 1/n."""
POWERS = (0.0625, 0.125, 0.25, 0.5)
"""objective.ratio_power of `neuclip_power`; it is 1 for `neuclip_plus` and in effect 0 for `batch_gcl`."""


@dataclass(frozen=True)
class TunedRun:
    """A line of the CSV that is to be: everything that decides its result."""

    phase: str
    cell: str
    arm: str
    seed: int
    trial: str
    samples: int
    values: tuple[float, ...]

    @property
    def key(self) -> tuple[str, ...]:
        return (self.phase, self.cell, self.arm, str(self.seed), self.trial, str(self.samples))


def setting_of(cell: str, samples: int) -> TunedSetting:
    """The setting of a cell's name, such as icons-16384-b64-learned.

    Raises:
        click.BadParameter: It is no such name.
    """
    found = re.fullmatch(r"(icons|synthetic)-(\d+)-b(\d+)-(learned|fixed)(?:-w(\d+))?(-\d+trials)?", cell)
    if not found:
        raise click.BadParameter(f"{cell!r}: expected DATA-PAIRS-bBATCH-TEMPERATURE, as icons-16384-b64-learned")
    hidden = int(found[5] or TunedSetting.hidden)
    return TunedSetting(found[1], int(found[2]), int(found[3]), samples, found[4] == "learned", hidden)


def draw_values(trial: int, *, learned: bool) -> tuple[float, ...]:
    """The values of a trial, in the order of `VALUES`: the same for all arms; beyond TRIALS from narrower ranges."""
    draw, narrow = random.Random(trial), trial >= TRIALS
    lr, tau_lr = (
        math.exp(draw.uniform(math.log(a), math.log(b))) for a, b in ((5e-4, 4e-3 if narrow else 1.6e-2), (2e-4, 2e-2))
    )
    tau, fixed = math.exp(draw.uniform(math.log(0.03), math.log(0.2))), draw.choice((0.05, 0.07, 0.1, 0.14))
    eps = draw.choice(EPS[:3] if narrow else EPS)
    rho = math.exp(draw.uniform(math.log(0.5), math.log(4))) if narrow else draw.uniform(1, 7)
    return lr, tau if learned else fixed, tau_lr, eps, rho, draw.uniform(-10, 0), draw.choice(POWERS)


def perform(run: TunedRun, features: Path) -> dict[str, Any]:
    """A run's line of the CSV."""
    import torch

    torch.set_num_threads(1)
    values = dict(zip(VALUES, run.values, strict=True))
    setting = setting_of(run.cell, run.samples)
    tuning = run.seed >= SWEEP_SEED
    found: dict[str, Any] = train(run.arm, setting, values, seed=run.seed, tuning=tuning, folder=features)
    found["tau_end"] = found.pop("tau")
    line = dict(zip(COLUMNS[:6], run.key, strict=True)) | values | found | {"commit": source_commit()}
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in line.items()}


def finished() -> list[dict[str, str]]:
    """The lines of the CSV."""
    if not RUNS.is_file():
        return []
    with RUNS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def do(runs: Sequence[TunedRun], features: Path, *, processes: int) -> None:
    """Do the runs that are not in the CSV; each is appended when it ends. The first error ends it."""
    done = {tuple(line[key] for key in COLUMNS[:6]) for line in finished()}
    left = [run for run in runs if run.key not in done]
    click.echo(f"{len(runs)} runs, {len(runs) - len(left)} of them done")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for _, line in in_processes(perform, {run: (run, features) for run in left}, parallel=processes):
        if isinstance(line, BaseException):
            raise line
        new = not RUNS.is_file()
        with RUNS.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(line)
        shown = (line[key] for key in ("arm", "seed", "trial", "nce", "recall_at_1", "error_batch", "tau_end"))
        click.echo(" ".join(str(value) for value in (*shown, line["cpu_seconds"])))


def best(cell: str, arm: str) -> tuple[str, tuple[float, ...]]:
    """The trial that tuning chose for an arm, and its values.

    Raises:
        click.ClickException: The arm has not been tuned.
    """
    chosen = finalists(cell, arm)
    lines = [line for line in tried(cell, arm) if _loss(line) < math.inf and line["trial"] in chosen]
    by_trial = {line["trial"]: [one for one in lines if one["trial"] == line["trial"]] for line in lines}
    whole = {trial: found for trial, found in by_trial.items() if len(found) == len(TUNING_SEEDS)}
    if not whole:
        raise click.ClickException(f"{arm} has not been tuned in {cell}: run `tune` first")
    trial = min(whole, key=lambda one: statistics.fmean(_loss(line) for line in whole[one]))
    return trial, tuple(float(whole[trial][0][key] or 1) for key in VALUES)


def tried(cell: str, arm: str) -> list[dict[str, str]]:
    """The finished runs of an arm's trials; those of a cell with more trials are kept under its name without them."""
    base, trials = trials_in(cell)
    return [line for line in of(base, arm, "tune") if int(line["trial"]) < trials]


def finalists(cell: str, arm: str) -> list[str]:
    """The trials that are best with the first tuning seed, a quarter of all."""
    first = sorted((line for line in tried(cell, arm) if line["seed"] == str(TUNING_SEEDS[0])), key=_loss)
    return [line["trial"] for line in first[: FINALISTS * trials_in(cell)[1] // TRIALS]]


def of(cell: str, arm: str, phase: str) -> list[dict[str, str]]:
    """The finished runs of an arm in a cell and phase."""
    return [line for line in finished() if (line["cell"], line["arm"], line["phase"]) == (cell, arm, phase)]


def _loss(line: dict[str, str]) -> float:
    value = float(line["nce"] or math.inf)
    return value if math.isfinite(value) else math.inf


def trials_of(cell: str, arms: Iterable[str], *, seeds: Iterable[int], chosen: dict[str, list[str]]) -> list[TunedRun]:
    """Tuning runs of the chosen trials of each arm."""
    learned = setting_of(cell, SAMPLES).learned
    return [
        TunedRun("tune", trials_in(cell)[0], arm, seed, trial, SAMPLES, draw_values(int(trial), learned=learned))
        for seed in seeds
        for arm in arms
        for trial in chosen[arm]
    ]


@click.group()
def main() -> None:
    """The study `tuned`."""


def _options(command: Any) -> Any:
    for option in (
        click.option("--processes", default=1, show_default=True, help="Runs at a time."),
        click.option("--arms", default=",".join(ARMS), show_default=True, help="Arms, separated by commas."),
        click.option("--cell", required=True, help="DATA-PAIRS-bBATCH-TEMPERATURE, as icons-16384-b64-learned."),
        click.argument("features", type=click.Path(path_type=Path)),
    ):
        command = option(command)
    return command


@main.command()
@_options
def tune(features: Path, cell: str, arms: str, processes: int) -> None:
    """Trials of every arm, then further seeds of the best ones."""
    names = arms.split(",")
    every = {arm: [str(trial) for trial in range(trials_in(cell)[1])] for arm in names}
    do(trials_of(cell, names, seeds=TUNING_SEEDS[:1], chosen=every), features, processes=processes)
    best_of = {arm: finalists(cell, arm) for arm in names}
    do(trials_of(cell, names, seeds=TUNING_SEEDS[1:], chosen=best_of), features, processes=processes)


@main.command()
@_options
def report(features: Path, cell: str, arms: str, processes: int) -> None:
    """The reported seeds of every arm with its tuned values."""
    chosen = {arm: best(cell, arm) for arm in arms.split(",")}
    runs = [
        TunedRun("report", cell, arm, seed, trial, SAMPLES, values)
        for seed in reported_seeds(cell)
        for arm, (trial, values) in chosen.items()
    ]
    do(runs, features, processes=processes)


@main.command()
@_options
def equal(features: Path, cell: str, arms: str, processes: int) -> None:
    """`openclip` and `siglip` with as many more samples as each arm takes more CPU time, on the reported seeds."""
    runs = []
    for base, arm in itertools.product(EQUAL_TO, arms.split(",")):
        trial, values = best(cell, base)
        samples = int(SAMPLES * _seconds(cell, arm) / _seconds(cell, base))
        if samples > SAMPLES:
            name = f"{trial} for {arm}"
            done = [line for line in of(cell, base, "equal") if line["trial"] == name]
            samples = int(done[0]["samples"]) if done else samples  # times may have been added since
            runs += [TunedRun("equal", cell, base, seed, name, samples, values) for seed in reported_seeds(cell)]
    do(runs, features, processes=processes)


def reported_seeds(cell: str) -> range:
    """The seeds of a cell's tables; those of more trials, and those of another width, have been in no other table."""
    other_width = setting_of(cell, SAMPLES).hidden != TunedSetting.hidden
    first = SEEDS * (trials_in(cell)[1] // TRIALS - 1 + other_width)
    return range(first, first + SEEDS)


def _seconds(cell: str, arm: str) -> float:
    """Median CPU seconds of an arm's reported runs."""
    return statistics.median(float(line["cpu_seconds"]) for line in of(cell, arm, "report"))


@main.command(name="page")
def write_page() -> None:
    """Write `results.md` and its figure from the finished runs."""
    (FOLDER / "results.md").write_text(page(finished(), arms=ARMS + PAST), encoding="utf-8")
    (FOLDER / FIGURE).write_text(figure(finished()), encoding="utf-8")


@main.command()
@_options
def eps(features: Path, cell: str, arms: str, processes: int) -> None:
    """The sweep of eps with the tuned values of each arm, and `openclip` on the same seeds."""
    setting, runs = setting_of(cell, SAMPLES), []
    for seed in range(SWEEP_SEED, SWEEP_SEED + SEEDS):
        for arm in arms.split(","):
            trial, values = best(cell, arm)
            for wanted in SWEEP if has_eps(arm) else (values[3],):
                value = 1 / setting.pairs if wanted is None else wanted
                changed = (*values[:3], value, *values[4:])
                runs.append(TunedRun("eps", cell, arm, seed, f"{trial} eps {value:.3g}", SAMPLES, changed))
    do(runs, features, processes=processes)


if __name__ == "__main__":
    main()
