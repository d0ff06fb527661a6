"""Outcomes of a study's runs: metrics of each run, and means, spreads and paired differences over seeds.

Differences have their t, p-values of Student's distribution and Holm's correction.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.evaluation.datasets.datacomp import AGGREGATES

LEVEL = 0.05
"""Error rate over all comparisons of a page."""


@dataclass(frozen=True)
class Spread:
    """Values over seeds, or paired differences of them."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        """Of the sample; None for one value, 0 for equal ones."""
        if len(self.values) < 2:
            return None
        return statistics.stdev(self.values) if all(map(math.isfinite, self.values)) else math.nan


def _spread(values: Iterable[float]) -> Spread | None:
    return Spread(known) if (known := tuple(values)) else None


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Holm's adjusted p-values: a comparison is significant at a level if its adjusted p is at most that level.

    The error rate holds over all comparisons that are given, whatever their dependence. NaN counts as 1.
    """
    adjusted, largest = {}, 0.0
    known = {name: 1.0 if math.isnan(p) else p for name, p in p_values.items()}
    for rank, (name, p) in enumerate(sorted(known.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return adjusted


Result = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A metric of a run: its title with the unit, how it is computed from a result, and how it is shown."""

    title: str
    value: Callable[[Result], float | None]
    form: str = ".3f"
    scale: float = 1.0
    """Factor applied to the displayed value."""


@dataclass(frozen=True)
class Outcome:
    """One finished run of a study; `result` is the content of the file that `unit.py` writes."""

    setting: str
    arm: str
    seed: int
    key: str
    result: Result


SCORES = {
    "average": ("DataComp Average", ""),
    "retrieval": ("Retrieval", "retrieval"),
    "imagenet": ("ImageNet & Variants", "ImageNet & Variants"),
}
"""Column -> the benchmark's mean, and what is in the names of the tasks whose mean counts without it."""


def mean_score(scores: Mapping[str, float], column: str) -> float | None:
    """A column of `SCORES`: the benchmark's mean if all of its tasks were evaluated, else that over evaluated tasks."""
    official, part = SCORES[column]
    tasks = [value for name, value in scores.items() if part in name and name not in AGGREGATES]
    return scores.get(official, statistics.fmean(tasks) if tasks else None)


def _last_score(column: str) -> Callable[[Result], float | None]:
    """Of the last evaluation."""
    return lambda result: mean_score(result["curve"][-1]["scores"], column) if result["curve"] else None


def _normalizer(*keys: str) -> Callable[[Result], float | None]:
    """Mean over the intermediate checkpoints, as in NeuCLIP's section 5.2.

    The last one is excluded: the encoders have stopped changing by then, and if the number of steps is a multiple of
    the restart interval, the prototypes have just been replaced.
    """

    def value(result: Result) -> float | None:
        final = result["last"]["samples"]
        on_the_way = [m for m in result["normalizers"] if m["samples"] < final] or result["normalizers"]
        values = [functools.reduce(lambda tree, key: tree[key], keys, measured) for measured in on_the_way]
        return statistics.fmean(values) if values else None

    return value


def _entry(section: str, key: str) -> Callable[[Result], float | None]:
    return lambda result: result.get(section, {}).get(key)


COLUMNS: dict[str, Column] = {
    "average": Column("average, %", _last_score("average"), ".1f", 100),
    "retrieval": Column("retrieval R@1, %", _last_score("retrieval"), ".1f", 100),
    "imagenet": Column("ImageNet & variants, %", _last_score("imagenet"), ".1f", 100),
    "tau": Column("tau", _entry("last", "tau"), ".4f"),
    "mse_in_use": Column("error in use (MSE)", _normalizer("in_use", "mse")),
    "mse_cold": Column("error cold (MSE)", _normalizer("cold", "mse")),
    "bias_in_use": Column("bias in use", _normalizer("in_use", "bias"), "+.3f"),
    "variance": Column("variance of exact", _normalizer("variance"), ".2f"),
    "samples": Column("samples seen", _entry("last", "samples"), ",.0f"),
    "cpu_seconds": Column("CPU time, s", _entry("cost", "cpu_seconds"), ",.0f"),
    "training_tflop": Column("arithmetic, TFLOP", _entry("cost", "training_flops"), ",.1f", 1e-12),
    "samples_per_second": Column(
        "samples/s", lambda r: 1e3 * r["batch_size"] / r["step_ms"]["whole"] if r["step_ms"] else None, ",.0f"
    ),
    "step_ms": Column("step, ms", _entry("step_ms", "whole"), ".1f"),
    "forward_ms": Column("forward, ms", _entry("step_ms", "forward"), ".1f"),
    "objective_ms": Column("objective, ms", _entry("step_ms", "objective"), ".2f"),
    "npn_ms": Column("of it the network, ms", _entry("step_ms", "npn"), ".2f"),
    "npn_share": Column(
        "network's share of the step, %",
        lambda r: r["step_ms"]["npn"] / r["step_ms"]["whole"] if "npn" in r["step_ms"] else None,
        ".1f",
        100,
    ),
    "backward_ms": Column("backward, ms", _entry("step_ms", "backward"), ".1f"),
    "optimizer_ms": Column("optimizer, ms", _entry("step_ms", "optimizer"), ".1f"),
    "memory_mib": Column("peak memory, MiB", lambda r: r["peak_memory_mib"], ",.0f"),
    "traffic_kib": Column(
        "objective's collectives, KiB a rank and step",
        lambda r: None if (sent := r["traffic_bytes_per_step"]) is None else sum(sent.values()) / 1024,
        ",.1f",
    ),
}
# Comparisons of a run with the baseline of the same setting and seed.
PAIRED = {
    "difference": ("average", "average against {baseline}, points"),
    "saving": ("cpu_seconds", "times less CPU time than {baseline}"),
    "extra_time": ("objective_ms", "objective's extra time against {baseline}, share of its step"),
}


def by_seed(outcomes: Sequence[Outcome], setting: str, arm: str, column: str) -> dict[int, float]:
    """A column's values of the runs that have the metric."""
    values = {o.seed: COLUMNS[column].value(o.result) for o in _of(outcomes, setting, arm)}
    return {seed: value for seed, value in values.items() if value is not None}


def spread(outcomes: Sequence[Outcome], setting: str, arm: str, column: str) -> Spread | None:
    """A column's values over the seeds of one arm in one setting; None if no run has the metric."""
    return _spread(COLUMNS[column].scale * value for value in by_seed(outcomes, setting, arm, column).values())


def paired(outcomes: Sequence[Outcome], setting: str, arm: str, *, kind: str, baseline: str) -> Spread | None:
    """An arm against the baseline, per seed; `kind` is a key of `PAIRED` or of `COLUMNS`.

    `saving` is the baseline's value over the arm's. Other kinds are the arm's value minus the baseline's, `extra_time`
    as a percentage of the baseline's step time.
    """
    column = PAIRED[kind][0] if kind in PAIRED else kind
    arms, others = (by_seed(outcomes, setting, name, column) for name in (arm, baseline))
    seeds = [seed for seed in arms if seed in others]
    if kind == "saving":
        return _spread(others[seed] / arms[seed] for seed in seeds)
    if kind == "extra_time":
        whole = by_seed(outcomes, setting, baseline, "step_ms")
        return _spread(100 * (arms[seed] - others[seed]) / whole[seed] for seed in seeds if seed in whole)
    return _spread(COLUMNS[column].scale * (arms[seed] - others[seed]) for seed in seeds)


def curve(outcomes: Sequence[Outcome], setting: str, arm: str, column: str) -> list[tuple[float, list[float]]]:
    """(samples seen, one value per seed) for a score or a normalizer measurement during the runs."""
    points: dict[float, list[float]] = {}
    for outcome in _of(outcomes, setting, arm):
        if column in SCORES:
            scores = ((point["samples"], mean_score(point["scores"], column)) for point in outcome.result["curve"])
            pairs = [(samples, 100 * score) for samples, score in scores if score is not None]
        else:
            quantity, where = column.split("_", 1)
            pairs = [(m["samples"], m[where][quantity]) for m in outcome.result["normalizers"]]
        for samples, value in pairs:
            points.setdefault(samples, []).append(value)
    return sorted(points.items())


def _of(outcomes: Sequence[Outcome], setting: str, arm: str) -> list[Outcome]:
    return sorted((o for o in outcomes if o.setting == setting and o.arm == arm), key=lambda o: o.seed)
