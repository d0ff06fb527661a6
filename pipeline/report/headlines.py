"""The headline figures of a report and the table of scores, used by both the page and the markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import flatten
from pipeline.report.figures import short
from pipeline.report.page import duration, percent
from pipeline.report.run_data import RECALLS, Run, is_finite


@dataclass(frozen=True)
class Tile:
    """One figure: its name, its value, and a reference to compare it with."""

    label: str
    value: str
    detail: str = ""


def tiles(run: Run) -> list[Tile]:
    """The headline figures whose inputs are available."""
    every = [*_scores(run), *_validation(run), *_training(run), *_data(run)]
    if run.stages:
        every.append(Tile("Wall time", duration(sum(run.stages.values())), f"{len(run.stages)} stages"))
    return every


def _scores(run: Run) -> list[Tile]:
    tiles: list[Tile] = []
    latest = run.latest
    if latest is None:
        return tiles
    for name, mean_of in latest.aggregates.items():
        if mean_of.get("complete"):
            note = "" if mean_of.get("official") else ", not the official data"
            tiles.append(Tile(name, f"{100 * mean_of['score']:.1f}%", f"{_mean_of(mean_of['tasks'])}{note}"))
    zero_shot = latest.of("classification")
    if zero_shot and not tiles:
        mean = math.fsum(s.score for s in zero_shot) / len(zero_shot)
        chances = [s.chance for s in zero_shot if s.chance is not None]
        against = f", chance {percent(math.fsum(chances) / len(chances))}" if len(chances) == len(zero_shot) else ""
        tiles.append(Tile("Zero-shot accuracy", f"{100 * mean:.1f}%", f"{_mean_of(len(zero_shot))}{against}"))
    retrieval = latest.of("retrieval")
    for score in retrieval[:1]:
        of = f"{score.label}: " if len(retrieval) > 1 else ""
        for label, side in ((f"{of}image → text R@1", "text"), (f"{of}text → image R@1", "image")):
            value = score.metrics.get(f"{side}_retrieval_recall@1")
            if value is not None:
                among = f"among {score.samples:,} pairs, chance {percent(1 / score.samples)}"
                tiles.append(Tile(label[:1].upper() + label[1:], f"{100 * value:.1f}%", among))
    return tiles


def _mean_of(tasks: int) -> str:
    return f"mean of {tasks} tasks" if tasks > 1 else "one task"


def _validation(run: Run) -> list[Tile]:
    """The lowest loss on held-out pairs, and the retrieval of that step."""
    finite = [row for row in run.validations if is_finite(row.get("loss"))]
    if not finite:
        return []
    best, last = min(finite, key=lambda row: row["loss"]), finite[-1]
    where = f"at step {best['step']:,}, the lowest of {len(finite)}"
    end = "" if best is last else f"; {last['loss']:.3f} at step {last['step']:,}"
    tiles = [Tile("Validation loss", f"{best['loss']:.3f}", where + end)]
    recalls = [float(best[key]) for key in RECALLS if is_finite(best.get(key))]
    if len(recalls) == len(RECALLS):
        pairs = f"{best['pairs']:,.0f} held-out pairs" if is_finite(best.get("pairs")) else "held-out pairs"
        both = " and ".join(f"{100 * value:.1f}%" for value in recalls)
        tiles.append(Tile("Validation R@1", f"{50 * sum(recalls):.1f}%", f"mean of {both} among {pairs}"))
    return tiles


def _training(run: Run) -> list[Tile]:
    tiles: list[Tile] = []
    if not run.rows:
        return tiles
    last = run.rows[-1]
    epochs = f"{last['epoch']:.1f} epochs, " if isinstance(last.get("epoch"), int | float) else ""
    tiles.append(Tile("Samples seen", short(last["samples"]), f"{epochs}{last['step']:,} steps"))
    _, speed = run.curve("samples_per_second")
    if len(speed):
        _, wait = run.curve("data_wait")
        detail = f"{100 * float(wait.mean()):.1f}% waiting for data" if len(wait) else "median"
        tiles.append(Tile("Throughput", f"{short(float(np.median(speed)))} /s", detail))
    return tiles


def _data(run: Run) -> list[Tile]:
    if not run.manifests:
        return []
    n, tried = sum(m.n for m in run.manifests), sum(m.attempted for m in run.manifests)
    return [Tile("Pairs ingested", f"{n:,}", f"{100 * n / tried:.1f}% of {tried:,} {run.counted}")]


def score_rows(run: Run) -> list[dict[str, str]]:
    """The table of all scores of the latest checkpoint, in suite order."""
    return [
        {
            "task": score.label,
            "metric": score.main_metric,
            "score": f"{100 * score.score:.1f}%",
            "chance": "–" if score.chance is None else percent(score.chance),
            "samples": f"{score.samples:,}",
        }
        for score in (run.latest.scores if run.latest else ())
    ]


def flat(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A tree of plain values as (dotted key, text), in the order of the tree."""
    return [(key, "–" if value is None else str(value)) for key, value in flatten(tree).items()]
