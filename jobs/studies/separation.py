"""`neuclip study separation`: its runs, and running those that are not finished.

The studies on the built-in corpus do not separate the methods: there the error of a batch's own normalizer estimate is
about chi^2 / B = 0.02 to 0.18, and retrieval is among 400 pairs. Here chi^2 / B is 0.5 or more, 4,096 pairs are held
out, runs have up to 8,192 steps, and all methods of a seed share initial weights and batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.studies.schedule import in_processes
from pipeline.files import write_json
from pipeline.versions import source_commit

NAME = "separation"
TITLE = "Methods on pairs that separate them"
REPRODUCES = "NeuCLIP Figure 2c and Table 2's ordering, at chi^2 / B of 0.5 and more"
TAU = 0.1
SHARED = "shared-trajectory"
"""The arm name of runs that measure all methods on one shared trajectory."""

_FIXED = {"tau_init": TAU, "tau_min": 0.001, "tau_lr": 0.0}
_NPN = {**_FIXED, "rho": 2.0, "prototypes": 256, "restart_every": 100}
ARMS: dict[str, dict[str, Any] | None] = {
    "openclip": {"name": "openclip", **_FIXED},
    "batch_gcl": {"name": "sogclr", "tau": TAU, "gamma": 1.0},
    "fastclip_v1": {"name": "fastclip_v1", "tau": TAU},
    "amorlip": {"name": "amorlip", **_FIXED, "rho": 2.0},
    "queue": {"name": "neuclip", **_NPN, "npn": "queue"},
    "queue_previous": {"name": "neuclip", **_NPN, "npn": "queue", "restart_with": "previous"},
    "neuclip": {"name": "neuclip", **_NPN},
    "neuclip_u1": {"name": "neuclip", **_NPN, "inner_steps": 1},
    "neuclip_cap2": {"name": "neuclip", **_NPN, "ratio_cap": 2.0},
    "neuclip_plus": {"name": "neuclip_plus", **_NPN, "prototypes": 1024},
    "neuclip_plus_cap5": {"name": "neuclip_plus", **_NPN, "prototypes": 1024, "ratio_cap": 5.0},
    "literal": {"name": "neuclip_literal", **_NPN},
    "oracle": None,
}
"""Objective settings of each arm; None: exact normalizers. The temperature is fixed in all arms.

`batch_gcl` is the batch's own estimate without the positive pair in the denominator: `sogclr` with gamma = 1.
`queue` contains the batch's own features, `queue_previous` only those of earlier batches. The arms `_cap2` and `_cap5`
change the bound of q (`ratio_cap`), which is 5 in `neuclip` and 2 in `neuclip_plus`. FastCLIP-v3 has no arm: with a
fixed temperature its gradients are v1's (tests/unit/test_separation.py checks that).
"""
BASELINE = "openclip"
BASELINES = (BASELINE, "neuclip")
"""The arms that tables compare with, paired by seed."""


@dataclass(frozen=True)
class Group:
    """Settings with the same dataset size and number of epochs.

    Attributes:
        pairs: Training pairs.
        epochs: Passes over the training pairs.
        batches: Batch sizes.
        seeds: Seeds per arm.
        shared_seeds: Seeds of the shared trajectory.
        arms: Names of the arms.
    """

    pairs: int
    epochs: float
    batches: tuple[int, ...]
    seeds: int
    shared_seeds: int = 0
    arms: tuple[str, ...] = tuple(ARMS)


FURTHER = ("literal", "queue", "queue_previous", "neuclip_cap2", "neuclip_plus_cap5")
"""Arms that explain the others; they have fewer seeds."""
MAIN = tuple(arm for arm in ARMS if arm not in FURTHER)
LARGER = tuple(arm for arm in MAIN if arm not in ("oracle", "amorlip"))
"""The arms at larger n: without those that cost the most."""
SIZES: dict[str, tuple[Group, ...]] = {
    "desk": (
        Group(pairs=4096, epochs=16, batches=(8, 16, 32, 64), seeds=8, shared_seeds=2, arms=MAIN),
        Group(pairs=4096, epochs=16, batches=(8, 16, 32, 64), seeds=4, arms=FURTHER),
        Group(pairs=16384, epochs=4, batches=(16, 64), seeds=4, arms=LARGER),
        Group(pairs=65536, epochs=1, batches=(16, 64), seeds=4, arms=LARGER),
    ),
    "smoke": (Group(pairs=512, epochs=1, batches=(8, 32), seeds=2, shared_seeds=1),),
}


@dataclass(frozen=True)
class PairedRun:
    """One run: an arm (or the shared trajectory) at one dataset size, batch size and seed."""

    pairs: int
    epochs: float
    batch: int
    arm: str
    seed: int
    data_seed: int
    """Sets the training and held-out pairs; the runs published before this field existed share one draw of them."""

    @property
    def key(self) -> str:
        return f"n{self.pairs}-b{self.batch}-{self.arm}-seed{self.seed}-pairs{self.data_seed}"


def runs_of(size: str) -> list[PairedRun]:
    """All runs of a size, seeds outermost, so that an unfinished study is balanced."""
    groups = SIZES[size]
    most = max(group.seeds for group in groups)
    return [run for seed in range(most) for group in groups for run in _runs_of_seed(group, seed)]


def _runs_of_seed(group: Group, seed: int) -> Iterator[PairedRun]:
    for batch in reversed(group.batches):
        for arm in group.arms if seed < group.seeds else ():
            yield PairedRun(group.pairs, group.epochs, batch, arm, seed, seed)
        if seed < group.shared_seeds:
            yield PairedRun(group.pairs, group.epochs, batch, SHARED, seed, seed)


def path_of(run: PairedRun, place: Path) -> Path:
    """The file of a finished run."""
    return place / NAME / "runs" / f"{run.key}.json"


def perform(run: PairedRun, place: Path) -> float:
    """Execute a run and write its result file. Returns the CPU seconds it took."""
    import torch

    from jobs.studies.separation_run import SeparationSetting, train, watch

    torch.set_num_threads(1)
    setting = SeparationSetting(pairs=run.pairs, batch=run.batch, epochs=run.epochs, tau=TAU)
    if run.arm == SHARED:
        watched = watch({arm: c for arm, c in ARMS.items() if c is not None}, setting, seed=run.seed)
        result: dict[str, Any] = {"arms": watched, "cpu_seconds": sum(w["cpu_seconds"] for w in watched.values())}
    else:
        result = train(ARMS[run.arm], setting, seed=run.seed)
    write_json(path_of(run, place), {"run": vars(run), "commit": source_commit(), **result})
    return float(result["cpu_seconds"])


def run_all(
    runs: Sequence[PairedRun], *, place: Path, parallel: int | None, report: Callable[[str], None]
) -> list[str]:
    """Execute the runs that are not finished, in parallel. Returns the keys of failed runs with the reasons."""
    left = [run for run in runs if not path_of(run, place).is_file()]
    report(f"{len(runs)} runs, {len(runs) - len(left)} of them done.")
    failed = []
    done = in_processes(perform, {run: (run, place) for run in left}, parallel=parallel)
    for number, (run, found) in enumerate(done, start=1):
        if isinstance(found, BaseException):
            failed.append(f"{run.key}: {found}")
        outcome = f"FAILED: {found}" if isinstance(found, BaseException) else f"{found:.0f} CPU s"
        report(f"{number}/{len(left)} {run.key}: {outcome}")
    return failed


def read_results(size: str, place: Path) -> list[dict[str, Any]]:
    """The results of the finished runs of a size."""
    paths = (path_of(run, place) for run in runs_of(size))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.is_file()]
