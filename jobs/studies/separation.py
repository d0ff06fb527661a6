"""`neuclip study separation`: its runs, which train two small towers or measure all methods on one trajectory.

The studies on the built-in corpus do not separate the methods: there the error of a batch's own normalizer estimate is
about chi^2 / B = 0.02 to 0.18, and retrieval is among 400 pairs. Here chi^2 / B is 0.5 or more, 4,096 pairs are held
out, and runs have up to 8,192 steps. All runs of one setting and seed start from the same weights and see the same
batches in the same order, so that differences between methods are paired.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.studies.schedule import in_processes
from jobs.studies.small_towers import (
    INPUTS,
    Course,
    CourseStep,
    draw_pairs,
    exact_log_normalizers,
    make_objective,
    make_towers,
    oracle_loss,
    orders,
    retrieval,
    squared_error,
)
from pipeline.files import write_json
from pipeline.objectives import Objective
from pipeline.objectives.softmax import SoftmaxObjective
from pipeline.versions import source_commit

NAME = "separation"
TITLE = "Methods on pairs that separate them"
REPRODUCES = "NeuCLIP Figure 2c and Table 2's ordering, at chi^2 / B of 0.5 and more"
TAU = 0.1
SHARED = "shared-trajectory"
"""The arm name of runs that measure all methods on one shared trajectory."""
TRAINING_PAIRS, HELD_OUT_PAIRS = 100_000, 200_000
"""Added to a run's seed, which also sets weights and batches: the seeds of its training and held-out pairs."""

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
    """Settings with the same dataset size and number of epochs."""

    pairs: int
    epochs: float
    batches: tuple[int, ...]
    seeds: int
    """Per arm."""
    shared_seeds: int = 0
    """Of the shared trajectory."""
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
    groups, runs = SIZES[size], list[PairedRun]()
    for seed in range(max(group.seeds for group in groups)):
        for group in groups:
            arms = group.arms if seed < group.seeds else ()
            if seed < group.shared_seeds:
                arms += (SHARED,)
            for batch in reversed(group.batches):
                runs += [PairedRun(group.pairs, group.epochs, batch, arm, seed, seed) for arm in arms]
    return runs


def path_of(run: PairedRun, place: Path) -> Path:
    """The file of a finished run."""
    return place / NAME / "runs" / f"{run.key}.json"


@dataclass(frozen=True)
class SeparationSetting:
    """What the runs of one comparison share.

    Attributes:
        pairs: n, training pairs.
        batch: B, pairs in a batch.
        epochs: Passes over the training pairs, the same for all batch sizes.
        held_out: Pairs that retrieval and NCE are measured on.
        anchors: Training pairs whose exact normalizers are compared at the end.
        checks: How often the error of the normalizers is measured during a run.
    """

    pairs: int
    batch: int
    epochs: float
    tau: float = TAU
    dim: int = 32
    hidden: int = 128
    lr: float = 2e-3
    held_out: int = 4096
    anchors: int = 1024
    checks: int = 16

    @property
    def steps(self) -> int:
        return max(1, int(self.epochs * (self.pairs // self.batch)))

    @property
    def check_steps(self) -> set[int]:
        """Steps at which errors are measured: spread over the run, at varying phases of the restart interval."""
        spacing = self.steps / self.checks
        return {int((number + 0.37 + 0.26 * math.sin(number)) * spacing) for number in range(self.checks)}


def course_of(setting: SeparationSetting, *, seed: int) -> Course:
    """The parts of a run that do not depend on the method."""
    inputs = dict.fromkeys(("image", "text"), INPUTS)
    towers = make_towers(inputs, hidden=setting.hidden, dim=setting.dim, seed=seed)
    optimizer = torch.optim.AdamW(towers.parameters(), lr=setting.lr, betas=(0.9, 0.98), weight_decay=0.01)
    pairs = draw_pairs(setting.pairs, seed=TRAINING_PAIRS + seed)
    batches = orders(setting.pairs, setting.batch, seed=seed)
    return Course(pairs, towers, optimizer, batches, steps=setting.steps)


def train(config: dict[str, Any] | None, setting: SeparationSetting, *, seed: int) -> dict[str, Any]:
    """Train with the objective of `config` (None: the oracle).

    Returns:
        `error_in_use` and `error_cold`, mean squared errors of log-normalizers averaged over the run's checks; the
        values of each check in `errors`; the final results of `measure`; `cpu_seconds` of training.
    """
    course, began = course_of(setting, seed=seed), time.process_time()
    objective = None if config is None else make_objective(config, setting, seed=seed)
    errors: list[dict[str, float]] = []
    checks = setting.check_steps
    for step in course.walk():
        if objective is None:
            loss = oracle_loss(step.image, step.text, tau=setting.tau, exact=course.exact(step.ids, tau=setting.tau))
        else:
            if step.number in checks:
                errors.append(_errors(objective, step, course.exact(step.ids, tau=setting.tau)))
            loss = objective.loss(step.image, step.text, sample_ids=step.ids)
        course.descend(loss, scale=step.scale)
        if objective is not None:
            objective.commit(lr_scale=step.scale)
    seconds = time.process_time() - began
    return {"cpu_seconds": seconds, "errors": errors, **_means(errors), **measure(course, setting, seed=seed)}


def watch(configs: dict[str, dict[str, Any]], setting: SeparationSetting, *, seed: int) -> dict[str, dict[str, Any]]:
    """Errors of several methods, by arm, on one shared trajectory trained with the oracle's gradients.

    Each method sees every batch's features and updates its own state, but not the towers. This makes the errors
    comparable: the normalizers of a method that trains worse are easier to predict.
    """
    course = course_of(setting, seed=seed)
    objectives = {arm: make_objective(config, setting, seed=seed) for arm, config in configs.items()}
    errors: dict[str, list[dict[str, float]]] = {arm: [] for arm in configs}
    seconds, checks = dict.fromkeys(configs, 0.0), setting.check_steps
    for step in course.walk():
        exact = course.exact(step.ids, tau=setting.tau)
        for arm, objective in objectives.items():
            if step.number in checks:
                errors[arm].append(_errors(objective, step, exact))
            began = time.process_time()
            objective.loss(step.image.detach(), step.text.detach(), sample_ids=step.ids)
            objective.commit(lr_scale=step.scale)
            seconds[arm] += time.process_time() - began
        course.descend(oracle_loss(step.image, step.text, tau=setting.tau, exact=exact), scale=step.scale)
    return {arm: {"errors": errors[arm], "cpu_seconds": seconds[arm], **_means(errors[arm])} for arm in configs}


@torch.no_grad()
def measure(course: Course, setting: SeparationSetting, *, seed: int) -> dict[str, float]:
    """Evaluate the trained towers on training and held-out pairs.

    Returns:
        `gcl`: the exact global contrastive loss tau mean (log g1 + log g2) of training anchors. `held_out_gcl`: the
        same for held-out pairs among themselves. `nce`: held-out cross-entropy in nats, mean of both directions, at the
        best of a grid of temperatures. `mrr`, `recall_at_1`: held-out retrieval, mean of both directions. `chi2`: mean
        over training anchors and sides of the chi-squared distance of exp(h) from uniform, so that chi2 / B is about
        the squared relative error of a batch's estimate of g.
    """
    s = setting
    image, text = course.embed(*course.pairs)
    rows = torch.arange(0, s.pairs, max(1, s.pairs // s.anchors))[: s.anchors]
    log_g = exact_log_normalizers(image, text, tau=s.tau, rows=rows)
    squared = exact_log_normalizers(image, text, tau=s.tau / 2, rows=rows)  # exp(2 h) = exp((s_ij - s_ii) / (tau / 2))
    chi2 = torch.stack([(two - 2 * one).exp().mean() - 1 for two, one in zip(squared, log_g, strict=True)]).mean()
    held_image, held_text = course.embed(*draw_pairs(s.held_out, seed=HELD_OUT_PAIRS + seed))
    held_g = exact_log_normalizers(held_image, held_text, tau=s.tau, rows=torch.arange(s.held_out))
    return {
        "gcl": s.tau * float((log_g[0] + log_g[1]).mean()),
        "held_out_gcl": s.tau * float((held_g[0] + held_g[1]).mean()),
        "chi2": float(chi2),
        **retrieval(held_image @ held_text.T),
    }


def _errors(objective: Objective, step: CourseStep, exact: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The step and the mean squared errors of its batch's log-normalizers (in use and cold), over both sides."""
    assert isinstance(objective, SoftmaxObjective)
    if objective.steps == 0:
        return {"step": step.number}
    found = objective.log_normalizers(step.image.detach(), step.text.detach(), sample_ids=step.ids)
    kinds = {"in_use": found.in_use, "cold": found.cold}
    return {"step": step.number, **{kind: squared_error(one, exact) for kind, one in kinds.items()}}


def _means(errors: list[dict[str, float]]) -> dict[str, float | None]:
    """The run's mean errors; None for an arm without estimates."""
    result: dict[str, float | None] = {}
    for kind in ("in_use", "cold"):
        values = [error[kind] for error in errors if kind in error]
        result[f"error_{kind}"] = sum(values) / len(values) if values else None
    return result


def perform(run: PairedRun, place: Path) -> float:
    """Execute a run and write its result file. Returns the CPU seconds it took."""
    torch.set_num_threads(1)
    setting = SeparationSetting(pairs=run.pairs, batch=run.batch, epochs=run.epochs)
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
