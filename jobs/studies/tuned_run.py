"""One run of the study `tuned`: two small towers and any method of this project."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.studies.small_towers import (
    Course,
    draw_pairs,
    exact_log_normalizers,
    make_objective,
    make_towers,
    orders,
    retrieval,
    squared_error,
)
from pipeline.objectives.softmax import SoftmaxObjective

QUEUE = 2048
"""Features of earlier batches that `neuclip_plus` has, at most an eighth of the pairs."""


GALLERY = 250
"""Held-out pairs that retrieval and NCE are measured on at once; a measure is the mean over the galleries."""
CHECKED = 512
"""Training anchors whose normalizers are compared with the exact ones at the end."""


@dataclass(frozen=True)
class TunedSetting:
    """What the runs of a cell share.

    Attributes:
        data: "icons" or "synthetic".
        pairs: n, training pairs.
        batch: B.
        samples: Pairs seen in training.
        learned: Whether the temperature is learned.
        hidden: Width of the towers' hidden layer.
        dim: d, dimension of the features.
    """

    data: str
    pairs: int
    batch: int
    samples: int
    learned: bool
    hidden: int = 256
    dim: int = 64

    @property
    def steps(self) -> int:
        return self.samples // self.batch


@dataclass(frozen=True)
class TunedPairs:
    """Inputs of both towers: image and text, [n, D] and [held out, D]."""

    training: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


@functools.cache
def icons(folder: Path) -> dict[str, Tensor]:
    """The stored features of `tuned_pairs`."""
    found: dict[str, Tensor] = torch.load(folder / "features.pt", mmap=True)
    return {key: found[key].float() if key != "group" else found[key] for key in ("image", "text", "group")}


def load(setting: TunedSetting, *, seed: int, tuning: bool, folder: Path) -> TunedPairs:
    """The pairs of a run; with `tuning`, the held-out pairs are those that are not reported."""
    if setting.data == "synthetic":
        drawn = 2 * seed + (1 if tuning else 0)
        return TunedPairs(draw_pairs(setting.pairs, seed=drawn), draw_pairs(2500, seed=10_000_000 + drawn))
    stored = icons(folder)
    pool, held_rows = ((stored["group"] == group).nonzero().flatten() for group in (0, 1))
    held_rows = held_rows[0 if tuning else 1 :: 2]
    rows = pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))[: setting.pairs]]
    assert len(rows) == setting.pairs, f"{len(pool)} icons to train on, {setting.pairs} wanted"
    sides = (stored["image"], stored["text"])
    return TunedPairs((sides[0][rows], sides[1][rows]), (sides[0][held_rows], sides[1][held_rows]))


def settings_of(arm: str, setting: TunedSetting, values: Mapping[str, float]) -> dict[str, Any]:
    """The objective of an arm with the tuned values (see `tuned.draw_values`)."""
    tau = {"tau_min": 0.005, "tau_init": values["tau"], "tau_lr": values["tau_lr"] if setting.learned else 0.0}
    robust = {**tau, "rho": values["rho"], "eps": values["eps"]}
    npn = {**robust, "restart_every": 100}
    plus = {"name": "neuclip_plus", **npn, "prototypes": min(QUEUE, setting.pairs // 8)}
    return {
        "openclip": {"name": "openclip", **tau},
        "siglip": {"name": "siglip", **tau, "bias_init": values["bias"]},
        "fastclip_v3": {"name": "fastclip_v3", **robust, "tau_lr_fall": 1.0},
        "batch_gcl": {"name": "fastclip_v3", **robust, "tau_lr_fall": 1.0, "gamma_schedule": "constant", "gamma": 1.0},
        "amorlip": {"name": "amorlip", **tau, "rho": 2 * values["rho"]},
        "neuclip": {"name": "neuclip", **npn, "prototypes": 512},
        "neuclip_plus": plus,
        "neuclip_power": {**plus, "ratio_power": values.get("power", 1.0)},
    }[arm]


def train(
    arm: str, setting: TunedSetting, values: Mapping[str, float], *, seed: int, tuning: bool, folder: Path
) -> dict[str, float | None]:
    """Train two towers and evaluate them on the held-out pairs.

    Returns:
        `nce`, `mrr`, `recall_at_1` (see `small_towers.retrieval`); `error_batch` and `error_in_use`, mean squared
        errors of the batch's own and the method's log-normalizers at the end; `tau` at the end; `cpu_seconds`.
    """
    data = load(setting, seed=seed, tuning=tuning, folder=folder)
    inputs = {side: x.shape[1] for side, x in zip(("image", "text"), data.training, strict=True)}
    towers = make_towers(inputs, hidden=setting.hidden, dim=setting.dim, seed=seed)
    optimizer = torch.optim.AdamW(
        towers.parameters(), lr=values["lr"], betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    objective = make_objective(settings_of(arm, setting, values), setting, seed=seed)
    batches = orders(setting.pairs, setting.batch, seed=seed)
    course = Course(data.training, towers, optimizer, batches, steps=setting.steps)
    began = time.process_time()
    for step in course.walk():
        course.descend(objective.loss(step.image, step.text, sample_ids=step.ids), scale=step.scale)
        objective.commit(lr_scale=step.scale)
    seconds = time.process_time() - began
    return {"cpu_seconds": seconds, **measure(course, data.held_out, objective, setting, seed=seed)}


@torch.no_grad()
def measure(
    course: Course, held_out: tuple[Tensor, Tensor], objective: Any, setting: TunedSetting, *, seed: int
) -> dict[str, Any]:
    """The measures of `train` at the end of a run."""
    image, text = course.embed(*course.pairs)
    held = course.embed(*held_out)
    tau = math.exp(-objective.logit_parameters()[0])
    rows = torch.randperm(setting.pairs, generator=torch.Generator().manual_seed(seed + 77))[:CHECKED]
    exact = exact_log_normalizers(image, text, tau=tau, rows=rows)
    errors: dict[str, list[float]] = {"error_batch": [], "error_in_use": []}
    for number, ids in enumerate(rows.split(setting.batch)):
        part = slice(number * setting.batch, number * setting.batch + len(ids))
        of_rows = (exact[0][part], exact[1][part])
        own = exact_log_normalizers(image[ids], text[ids], tau=tau, rows=torch.arange(len(ids)))
        errors["error_batch"].append(squared_error(own, of_rows))
        if isinstance(objective, SoftmaxObjective):
            found = objective.log_normalizers(image[ids], text[ids], sample_ids=ids)
            errors["error_in_use"].append(squared_error(found.in_use, of_rows))
    means = {key: sum(found) / len(found) if found else None for key, found in errors.items()}
    galleries = [retrieval(a @ b.T) for a, b in zip(held[0].split(GALLERY), held[1].split(GALLERY), strict=True)]
    scores = {key: sum(one[key] for one in galleries) / len(galleries) for key in galleries[0]}
    return {**scores, **means, "tau": tau}
