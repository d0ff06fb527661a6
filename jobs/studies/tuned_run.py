"""One run of the study `tuned`: two small towers, any method of this project or a prototype of a new one.

The prototype is batches of near pairs with importance weights, with the normalizers of `neuclip_plus`. Once an epoch
the features of the previous epoch (image plus text) are clustered. Every cluster is cut at random into blocks of two
pairs, and a batch is B / 2 random blocks. The negatives j of an anchor i are weighted by the inverse of their
probability of being in i's batch, so that the weighted mean over the batch has the mean over the dataset as its
expectation. `openclip` cannot use the weights, because its loss is defined by the batch.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.studies.small_towers import (
    Course,
    Hierarchy,
    draw_pairs,
    exact_log_normalizers,
    make_objective,
    make_towers,
    orders,
    retrieval,
    squared_error,
)
from pipeline.distributed.world import World
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.softmax import SoftmaxObjective
from pipeline.objectives.temperature import LearnedTemperature, TemperatureConfig

LLOYD, PER_CLUSTER = 3, 64
"""Steps of the clustering; mean number of pairs in a cluster."""
QUEUE = 2048
"""Features of earlier batches (`neuclip_plus` has as many), at most an eighth of the pairs."""


def clusters_of(features_nd: Tensor, *, count: int, generator: torch.Generator) -> Tensor:
    """The cluster of each row of unit-norm features, [n]: spherical k-means from random rows."""
    centres = features_nd[torch.randperm(len(features_nd), generator=generator)[:count]]
    for _ in range(LLOYD):
        nearest = (features_nd @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, features_nd)
        alive = sums.norm(dim=1) > 0
        centres = torch.where(alive[:, None], F.normalize(sums, dim=1), centres)
    return (features_nd @ centres.T).argmax(1)


def blocks_of_two(clusters: Tensor, *, generator: torch.Generator) -> Tensor:
    """A random division into blocks of two: sample ids, [n / 2, 2], in random order. n must be even.

    Every cluster is shuffled and cut into pairs; the left-over samples of clusters of odd size form blocks among
    themselves.
    """
    shuffled = torch.randperm(len(clusters), generator=generator)
    shuffled = shuffled[clusters[shuffled].argsort(stable=True)]
    sizes = torch.bincount(clusters)
    ends = sizes.cumsum(0)
    left = (ends - 1)[sizes % 2 == 1]
    is_left = torch.zeros(len(clusters), dtype=torch.bool)
    is_left[left] = True
    rest = shuffled[is_left]
    rest = rest[torch.randperm(len(rest), generator=generator)]
    blocks = torch.cat([shuffled[~is_left], rest]).view(-1, 2)
    return blocks[torch.randperm(len(blocks), generator=generator)]


def log_weights(clusters_B: Tensor, sizes: Tensor, *, n: int) -> Tensor:
    """log of ((B - 1) / (n - 1)) / P(j is in the batch | i is), [B, B]; the diagonal has no meaning.

    j is i's partner with probability 1/(k - 1) in a cluster of even size k and 1/k in one of odd size; samples of two
    clusters of odd sizes k and l are both left over and partners with probability 1/(k l (L - 1)), L the number of such
    clusters. Otherwise j's block is one of the B/2 - 1 others of the n/2 - 1.
    """
    batch = len(clusters_B)
    size = sizes[clusters_B].double()
    odd = size % 2 == 1
    same = clusters_B[:, None] == clusters_B[None]
    within = 1.0 / torch.where(odd, size, (size - 1).clamp(min=1))
    left = max(1, int((sizes % 2 == 1).sum()) - 1)
    among = torch.where(odd[:, None] & odd[None], 1.0 / (size[:, None] * size[None] * left), 0.0)
    partner = torch.where(same, within[:, None], among)
    present = partner + (1 - partner) * (batch / 2 - 1) / (n / 2 - 1)
    return math.log((batch - 1) / (n - 1)) - present.log()


class NearPlus:
    """The arms `near_plus`, `near_unweighted` and `near_openclip`, with the interface of an objective.

    Args:
        arm: Which of them.
        setting: A `tuned_run.TunedSetting`.
        values: Tuned values.
        seed: Of the order.
    """

    def __init__(self, arm: str, setting: Any, values: Mapping[str, float], *, seed: int) -> None:
        self.arm, self.setting, self.eps, self.rho, self.cap = arm, setting, values["eps"], values["rho"], 2.0
        config = TemperatureConfig(
            name=arm, tau_min=0.005, tau_init=values["tau"], tau_lr=values["tau_lr"] if setting.learned else 0.0
        )
        context = ObjectiveContext(
            setting.dim, setting.batch, setting.pairs, 1, setting.steps, World(), torch.device("cpu")
        )
        self.temperature = LearnedTemperature(config, context)
        self.generator = torch.Generator().manual_seed(seed)
        size = min(QUEUE, setting.pairs // 8)
        self.queue = torch.zeros(2, size, setting.dim)
        self.queue_ids = torch.full((size,), -1)
        self.queued = 0
        self.cache = torch.zeros(2, setting.pairs, setting.dim)
        self.clusters: Tensor | None = None
        self.sizes = torch.zeros(0)
        self._pending: Any = None

    def batches(self) -> Iterator[Tensor]:
        """Sample ids of the batches: the first epoch in random order, then of blocks of two near pairs."""
        n, batch, generator = self.setting.pairs, self.setting.batch, self.generator
        yield from torch.randperm(n, generator=generator)[: n // batch * batch].split(batch)
        while True:
            both = F.normalize(self.cache[0] + self.cache[1], dim=1)
            self.clusters = clusters_of(both, count=n // PER_CLUSTER, generator=generator)
            self.sizes = torch.bincount(self.clusters)
            yield from blocks_of_two(self.clusters, generator=generator).flatten()[: n // batch * batch].split(batch)

    def loss(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> Tensor:
        """The loss of a batch with a graph; the temperature's gradient is pending."""
        tau, size, features = self.temperature.value(), len(image), (image, text)
        similarity = image @ text.T
        own = torch.eye(size, dtype=torch.bool)
        weights = torch.zeros(size, size)
        if self.clusters is not None and self.arm == "near_plus":
            weights = log_weights(self.clusters[sample_ids], self.sizes, n=self.setting.pairs).to(image.dtype)
        positive, total, inside = similarity.diagonal(), similarity.new_zeros(()), similarity.new_zeros(())
        for side, s in enumerate((similarity, similarity.T)):
            h = (s - positive[:, None]) / tau
            if self.arm == "near_openclip":
                losses = h.logsumexp(1)
                total = total + losses.mean() / 2
                mean_h = (h.softmax(1) * h).sum(1).detach()
                inside = inside - 0.5 * mean_h.mean() / tau
                continue
            weighted = (h + weights).masked_fill(own, -math.inf)
            with torch.no_grad():
                log_g = weighted.logsumexp(1) - math.log(size - 1)
                alpha = self._pooled(features[side], positive, log_g, sample_ids, side=side)
                ratio = (torch.logaddexp(log_g, log_g.new_full((), math.log(self.eps))) - alpha).exp()
                mean_h = (weighted.softmax(1) * h.masked_fill(own, 0.0)).sum(1)
                inside = inside + (ratio + alpha - (log_g - alpha).exp() * mean_h).mean()
            total = total + tau * (weighted - alpha[:, None]).exp().sum(1).mean() / (size - 1)
        gradient = inside.detach() + (0.0 if self.arm == "near_openclip" else 2 * (self.rho - 1))
        self._pending = (gradient, image.detach(), text.detach(), sample_ids)
        return total

    def commit(self, *, lr_scale: float) -> None:
        """Update temperature, queue and cache."""
        gradient, image, text, ids = self._pending
        self.temperature.update(gradient, lr_scale=lr_scale)
        places = (self.queued + torch.arange(len(ids))) % self.queue.shape[1]
        for side, x in enumerate((image, text)):
            self.queue[side, places], self.cache[side, ids] = x, x
        self.queue_ids[places] = ids
        self.queued += len(ids)

    def logit_parameters(self) -> tuple[float, float]:
        """As of an objective."""
        return self.temperature.logit_scale(), 0.0

    def _pooled(self, anchors: Tensor, positive: Tensor, log_g: Tensor, ids: Tensor, *, side: int) -> Tensor:
        """log(eps + the common mean over queue and batch), at least the batch's own value / cap, [B]."""
        tau, count, others = self.temperature.value(), min(self.queued, self.queue.shape[1]), len(ids) - 1
        log_eps = log_g.new_full((), math.log(self.eps))
        pooled = log_g
        if count:
            h = (anchors @ self.queue[1 - side, :count].T - positive[:, None]) / tau
            own = self.queue_ids[:count] == ids[:, None]
            h = h.masked_fill(own, -math.inf)
            number = (count - own.sum(1) + others).log()
            pooled = torch.logaddexp(h.logsumexp(1), log_g + math.log(others)) - number
        alpha = torch.logaddexp(pooled, log_eps)
        return torch.maximum(alpha, torch.logaddexp(log_g, log_eps) - math.log(self.cap))


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
        held = draw_pairs(Hierarchy(), 2500, seed=10_000_000 + drawn)
        return TunedPairs(draw_pairs(Hierarchy(), setting.pairs, seed=drawn), held)
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
        `nce`, `mrr`, `recall_at_1` (see `towers.retrieval`); `error_batch` and `error_in_use`, mean squared
        errors of the batch's own and the method's log-normalizers at the end; `tau` at the end; `cpu_seconds`.
    """
    data = load(setting, seed=seed, tuning=tuning, folder=folder)
    inputs = {side: x.shape[1] for side, x in zip(("image", "text"), data.training, strict=True)}
    towers = make_towers(inputs, hidden=setting.hidden, dim=setting.dim, seed=seed)
    optimizer = torch.optim.AdamW(
        towers.parameters(), lr=values["lr"], betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    near = NearPlus(arm, setting, values, seed=seed) if arm.startswith("near_") else None
    objective = near or make_objective(settings_of(arm, setting, values), setting, seed=seed)
    batches = near.batches() if near else orders(setting.pairs, setting.batch, seed=seed)
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
