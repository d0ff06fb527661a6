"""Ideas of the study `tuned`: variants of `neuclip_power` in plain PyTorch, one process, small towers.

    python -m jobs.studies.tuned_ideas FEATURES --cell icons-16384-b64-learned-16trials --ideas base,blocks-4

Every variant has the values that were tuned for `neuclip_power` and is compared with `base`, which is `neuclip_power`
written anew, on the tuning pairs and on seeds that have tuned nothing. A run is a line of `docs/studies/tuned/runs.csv`
with the phase `idea`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.studies import tuned
from jobs.studies.outcomes import Spread
from jobs.studies.small_towers import Course, exact_log_normalizers, make_towers, orders
from jobs.studies.tuned_run import TunedSetting, load, measure
from pipeline.distributed.world import World
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.temperature import LearnedTemperature, TemperatureConfig

LLOYD, PER_CLUSTER, CAP = 3, 64, 2.0
"""Steps of the clustering; mean pairs in a cluster; `objective.ratio_cap`."""
SEEDS = range(1002, 1007)
IDEAS: dict[str, dict[str, Any]] = {
    "base": {},
    "plus": {"power": 1.0},
    "oracle": {"power": 1.0, "oracle": True},
    "oracle-power": {"oracle": True},
    "blocks-2": {"blocks": 2},
    "blocks-4": {"blocks": 4},
    "blocks-8": {"blocks": 8},
    "control-part": {"control": 1.0},
    "control-part-half": {"control": 0.5},
    "control-all": {"control": 1.0, "whole": True},
    "control-all-half": {"control": 0.5, "whole": True},
    "importance-half": {"importance": 0.5},
    "importance-1": {"importance": 1.0},
    "queue-256": {"queue": 256},
    "hybrid": {"table": 0.5},
    "hybrid-256": {"table": 0.5, "queue": 256},
    "hybrid-256-slow": {"table": 0.1, "queue": 256},
    "eps-fixed-64": {"eps": 1 / 64},
    "eps-learned-64": {"eps": 1 / 64, "eps_lr": 0.02},
    "eps-learned-4096": {"eps": 1 / 4096, "eps_lr": 0.02},
}
"""blocks: pairs of one cluster in a block. control: weight of the control variate; whole: with all stored features
instead of 2,048. importance: exponent of the stored normalizers in the probability of a sample. table: rate of a
moving average of each sample's own estimates. eps_lr: rate of log eps, by the gradient of the next step's loss."""


def clusters_of(features_nd: Tensor, *, count: int, generator: torch.Generator) -> Tensor:
    """The cluster of each row of unit-norm features, [n]: spherical k-means from random rows."""
    centres = features_nd[torch.randperm(len(features_nd), generator=generator)[:count]]
    for _ in range(LLOYD):
        nearest = (features_nd @ centres.T).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, features_nd)
        alive = sums.norm(dim=1) > 0
        centres = torch.where(alive[:, None], F.normalize(sums, dim=1), centres)
    return (features_nd @ centres.T).argmax(1)


def blocks_of(clusters: Tensor, size: int, *, generator: torch.Generator) -> Tensor:
    """A random division of n samples into blocks of `size`, [n / size, size]: of one cluster each, then of what is
    left over."""
    shuffled = torch.randperm(len(clusters), generator=generator)
    shuffled = shuffled[clusters[shuffled].argsort(stable=True)]
    sizes = torch.bincount(clusters)
    place = torch.arange(len(shuffled)) - (sizes.cumsum(0) - sizes)[clusters[shuffled]]
    whole = place < (sizes // size * size)[clusters[shuffled]]
    rest = shuffled[~whole]
    rest = rest[torch.randperm(len(rest), generator=generator)]
    blocks = torch.cat([shuffled[whole], rest]).view(-1, size)
    return blocks[torch.randperm(len(blocks), generator=generator)]


def log_weights(clusters_B: Tensor, sizes: Tensor, *, n: int, size: int) -> Tensor:
    """log of ((B - 1) / (n - 1)) / P(j is in the batch | i is), [B, B]; the diagonal has no meaning.

    Of a cluster of k samples r = k mod size are left over; the L left-over samples of all clusters form blocks, too.
    """
    batch, k = len(clusters_B), sizes[clusters_B].double()
    r, left = k % size, float((sizes % size).sum())
    joined = (size - 1) / max(1.0, left - 1)
    same = clusters_B[:, None] == clusters_B[None]
    others = (k - 1).clamp(min=1)
    within = ((k - r) * (size - 1) + r * (r - 1) * joined) / (k * others)
    partner = torch.where(same, within[:, None], (r / k)[:, None] * (r / k)[None] * joined)
    present = partner + (1 - partner) * (batch / size - 1) / (n / size - 1)
    return math.log((batch - 1) / (n - 1)) - present.log()


class Idea:
    """A variant of `neuclip_power`, with the interface of an objective that `measure` needs."""

    def __init__(self, name: str, setting: TunedSetting, values: Mapping[str, float], *, seed: int) -> None:
        self.options = options = IDEAS[name]
        self.setting, self.rho = setting, values["rho"]
        self.power = options.get("power", values["power"])
        self.log_eps = math.log(options.get("eps", values["eps"]))
        config = TemperatureConfig(
            name=name, tau_min=0.005, tau_init=values["tau"], tau_lr=values["tau_lr"] if setting.learned else 0.0
        )
        n, d = setting.pairs, setting.dim
        context = ObjectiveContext(d, setting.batch, n, 1, setting.steps, World(), torch.device("cpu"))
        self.temperature = LearnedTemperature(config, context)
        self.generator = torch.Generator().manual_seed(seed)
        m = options.get("queue", min(2048, n // 8))
        self.queue, self.queue_ids = torch.zeros(2, m, d), torch.full((m,), -1)
        self.queued = 0
        self.cache, self.seen = torch.zeros(2, n, d), torch.zeros(n, dtype=torch.bool)
        self.positive, self.alpha, self.average = torch.zeros(n), torch.zeros(2, n), torch.zeros(2, n)
        self.clusters: Tensor | None = None
        self.probability: Tensor | None = None
        self.sizes = torch.zeros(0)
        self.by_eps: Any = None
        self.stored: Any = None
        self.all_pairs: Any = None

    def batches(self, seed: int) -> Iterator[Tensor]:
        """Sample ids of the batches; the first epoch is that of the other methods."""
        n, batch, options = self.setting.pairs, self.setting.batch, self.options
        every = orders(n, batch, seed=seed)
        for _ in range(n // batch):
            yield next(every)
        while "blocks" in options:
            both = F.normalize(self.cache[0] + self.cache[1], dim=1)
            self.clusters = clusters_of(both, count=n // PER_CLUSTER, generator=self.generator)
            self.sizes = torch.bincount(self.clusters)
            yield from blocks_of(self.clusters, options["blocks"], generator=self.generator).flatten().split(batch)
        while "importance" in options:
            peaked = (options["importance"] * self.alpha.mean(0)).softmax(0)
            self.probability = (0.5 / n + 0.5 * peaked).double()
            ends = (n * self.probability).cumsum(0)
            start = torch.rand((), generator=self.generator, dtype=torch.double)
            drawn = torch.searchsorted(ends, torch.arange(n) + start).clamp(max=n - 1)
            yield from drawn[torch.randperm(n, generator=self.generator)].split(batch)
        while True:
            if "control" in options:
                rows = torch.randperm(n, generator=self.generator)[: n if options.get("whole") else 2048]
                self.stored = (rows, self.cache.clone(), self.positive.clone(), self.alpha.clone())
            for _ in range(n // batch):
                yield next(every)

    def loss(self, image: Tensor, text: Tensor, *, ids: Tensor) -> Tensor:
        """The loss of a batch with a graph; the temperature's gradient is pending."""
        tau, size, features = self.temperature.value(), len(image), (image, text)
        own = ids[:, None] == ids[None]
        weights, anchors = torch.zeros(size, size), torch.ones(size)
        if self.clusters is not None:
            found = log_weights(self.clusters[ids], self.sizes, n=self.setting.pairs, size=self.options["blocks"])
            weights = found.to(image.dtype)
        if self.probability is not None:
            anchors = (1 / (self.setting.pairs * self.probability[ids])).to(image.dtype)
            weights = anchors.log().expand(size, size)
        similarity = image @ text.T
        positive = similarity.diagonal()
        total, inside, changed = similarity.new_zeros(()), similarity.new_zeros(()), similarity.new_zeros(())
        alphas = []
        for side, s in enumerate((similarity, similarity.T)):
            h = (s - positive[:, None]) / tau
            weighted = (h + weights).masked_fill(own, -math.inf)
            with torch.no_grad():
                log_g = weighted.logsumexp(1) - math.log(size - 1)
                alpha, by_eps = self._normalizers(features[side], positive, log_g, ids, side=side)
                target = torch.logaddexp(log_g, log_g.new_full((), self.log_eps))
                mean_h = (weighted.softmax(1) * h.masked_fill(own, 0.0)).sum(1)
                here = (target - alpha).exp() + alpha - (log_g - alpha).exp() * mean_h
                inside = inside + (anchors * here).mean()
            shares = anchors * (weighted - alpha[:, None]).exp().sum(1) / (size - 1)
            total = total + tau * shares.mean()
            changed = changed - tau * (shares * by_eps).mean()
            alphas.append(alpha)
        if "control" in self.options and self.stored is not None:
            total = total + self.options["control"] * self._control(features, positive, alphas, ids)
        self.by_eps = changed
        self._pending = (inside + 2 * (self.rho - 1), image.detach(), text.detach(), ids, positive.detach(), alphas)
        return total

    def commit(self, *, lr_scale: float) -> None:
        """Update temperature, queue and tables."""
        gradient, image, text, ids, positive, alphas = self._pending
        self.temperature.update(gradient, lr_scale=lr_scale)
        places = (self.queued + torch.arange(len(ids))) % self.queue.shape[1]
        for side, x in enumerate((image, text)):
            self.queue[side, places], self.cache[side, ids] = x, x
            self.alpha[side, ids] = alphas[side]
        self.queue_ids[places] = ids
        self.positive[ids], self.seen[ids] = positive, True
        self.queued += len(ids)

    def logit_parameters(self) -> tuple[float, float]:
        """As of an objective."""
        return self.temperature.logit_scale(), 0.0

    def _normalizers(
        self, anchors: Tensor, positive: Tensor, log_g: Tensor, ids: Tensor, *, side: int
    ) -> tuple[Tensor, Tensor]:
        """alpha of the anchors and its derivative by log eps, [B] each."""
        tau, m, others = self.temperature.value(), min(self.queued, self.queue.shape[1]), len(ids) - 1
        log_eps = log_g.new_full((), self.log_eps)
        total, count = log_g + math.log(others), torch.full_like(log_g, float(others))
        if m:
            h = (anchors @ self.queue[1 - side, :m].T - positive[:, None]) / tau
            own = self.queue_ids[:m] == ids[:, None]
            total = torch.logaddexp(total, h.masked_fill(own, -math.inf).logsumexp(1))
            count = count + m - own.sum(1)
        if "table" in self.options:
            rate, before = self.options["table"], self.average[side, ids]
            seen = self.seen[ids]
            further = torch.where(seen, others / rate, 0.0)
            total = torch.logaddexp(total, before + further.log())
            count = count + further
            mixed = torch.logaddexp(before + math.log(1 - rate), log_g + math.log(rate))
            self.average[side, ids] = torch.where(seen, mixed, log_g)
        common = torch.logaddexp(total - count.log(), log_eps)
        if "oracle" in self.options:
            common = torch.logaddexp(self._exact(ids)[side], log_eps)
        target = torch.logaddexp(log_g, log_eps)
        alpha = torch.maximum(torch.lerp(target, common, self.power), target - math.log(CAP))
        return alpha, torch.lerp((log_eps - target).exp(), (log_eps - common).exp(), self.power)

    def _exact(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return exact_log_normalizers(*self.all_pairs(), tau=float(self.temperature.value()), rows=ids)

    def _control(self, features: tuple[Tensor, ...], positive: Tensor, alphas: list[Tensor], ids: Tensor) -> Tensor:
        """The loss with the negatives and anchors that were stored at the epoch's start less that with the batch's.

        Both terms take the same stored values, so that the mean over random batches is the mean over all.
        """
        stored, cache, positives, stored_alphas = self.stored
        tau, total = self.temperature.value(), positive.new_zeros(())
        for sign, rows in ((1.0, stored), (-1.0, ids)):
            own = ids[:, None] == rows[None]
            number = (~own).sum(1)
            for side in (0, 1):
                s = features[side] @ cache[1 - side, rows].T / tau
                as_anchor = s - (positive / tau + alphas[side])[:, None]
                as_negative = s - (positives[rows] / tau + stored_alphas[1 - side, rows])[None]
                for exponent in (as_anchor, as_negative):
                    shares = exponent.clamp(max=20.0).masked_fill(own, -math.inf).exp().sum(1) / number
                    total = total + sign * tau * shares.mean()
        return total


def train(name: str, setting: TunedSetting, values: Mapping[str, float], *, seed: int, folder: Path) -> dict[str, Any]:
    """Train two towers with a variant, and evaluate them as `tuned_run.train` does."""
    data = load(setting, seed=seed, tuning=True, folder=folder)
    inputs = {side: x.shape[1] for side, x in zip(("image", "text"), data.training, strict=True)}
    towers = make_towers(inputs, hidden=setting.hidden, dim=setting.dim, seed=seed)
    optimizer = torch.optim.AdamW(
        towers.parameters(), lr=values["lr"], betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    idea = Idea(name, setting, values, seed=seed)
    course = Course(data.training, towers, optimizer, idea.batches(seed), steps=setting.steps)
    idea.all_pairs = torch.no_grad()(lambda: course.embed(*course.pairs))
    parameters, before = list(towers.parameters()), None
    began = time.process_time()
    for step in course.walk():
        loss = idea.loss(step.image, step.text, ids=step.ids)
        if "eps_lr" in idea.options:
            flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
            if before is not None:  # a step along -gradient: the next loss changes by -lr * its gradient . this
                idea.log_eps += idea.options["eps_lr"] * float(F.cosine_similarity(flat, before, dim=0))
                idea.log_eps = min(idea.log_eps, 0.0)
            changed = torch.autograd.grad(idea.by_eps, parameters, retain_graph=True)
            before = torch.cat([g.flatten() for g in changed])
        course.descend(loss, scale=step.scale)
        idea.commit(lr_scale=step.scale)
    seconds = time.process_time() - began
    found = measure(course, data.held_out, idea, setting, seed=seed)
    return {"cpu_seconds": seconds, "eps": math.exp(idea.log_eps), **found}


def perform(run: tuned.TunedRun, features: Path) -> dict[str, Any]:
    """A run's line of the CSV."""
    torch.set_num_threads(1)
    values = dict(zip(tuned.VALUES, run.values, strict=True))
    found = train(run.arm, tuned.setting_of(run.cell, run.samples), values, seed=run.seed, folder=features)
    found["tau_end"] = found.pop("tau")
    line = dict(zip(tuned.COLUMNS[:6], run.key, strict=True)) | values | found
    line["commit"] = tuned.source_commit()
    return {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in line.items()}


def shown(spread: Spread) -> str:
    """Mean, half the width of the interval, and t."""
    return f"{spread.mean:+.4f} ± {spread.half_width or 0:.4f} (t {spread.t or 0:.1f})"


@click.command()
@click.argument("features", type=click.Path(path_type=Path))
@click.option("--cell", required=True)
@click.option("--ideas", default=",".join(IDEAS))
@click.option("--processes", default=1)
def main(features: Path, cell: str, ideas: str, processes: int) -> None:
    """Run variants on five seeds and print their differences from `base`."""
    trial, values = tuned.best(cell, "neuclip_power")
    names = ideas.split(",")
    runs = [tuned.TunedRun("idea", cell, name, seed, trial, tuned.SAMPLES, values) for seed in SEEDS for name in names]
    tuned.perform = perform
    tuned.do(runs, features, processes=processes)
    lines = [line for line in tuned.finished() if (line["phase"], line["cell"]) == ("idea", cell)]
    found = {(line["arm"], line["seed"]): line for line in lines}
    for name in names:
        text = [name]
        for key in ("nce", "recall_at_1"):
            both = [(float(found[name, str(s)][key]), float(found["base", str(s)][key])) for s in SEEDS]
            text.append(f"{key} {statistics.fmean(a for a, _ in both):.4f}")
            if name != "base":
                text.append(shown(Spread(tuple(a - b for a, b in both))))
        click.echo("  ".join(text))


if __name__ == "__main__":
    main()
