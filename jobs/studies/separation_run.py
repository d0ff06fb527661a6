"""One run of the separation study: train and evaluate two small towers, or measure all methods on one trajectory.

All runs of one setting and seed start from the same weights and see the same batches in the same order, so that
differences between methods are paired.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jobs.studies.hierarchy import (
    Hierarchy,
    descend,
    draw_pairs,
    exact_log_normalizers,
    lr_scale,
    make_towers,
    orders,
)
from pipeline.objectives import build_objective
from pipeline.objectives.softmax import SoftmaxObjective

TRAINING_PAIRS, HELD_OUT_PAIRS = 100_000, 200_000
"""Added to a run's seed, which also sets weights and batches: the seeds of its training and held-out pairs."""
NCE_TEMPERATURES = tuple(0.02 * 1.2**i for i in range(18))


@dataclass(frozen=True)
class SeparationSetting:
    """Settings shared by the runs of one comparison.

    Attributes:
        pairs: n, training pairs.
        batch: B, pairs in a batch.
        epochs: Passes over the training pairs, the same for all batch sizes.
        tau: The temperature, fixed.
        held_out: Pairs that retrieval and NCE are measured on.
        anchors: Training pairs whose exact normalizers are compared at the end.
        checks: How often the error of the normalizers is measured during a run.
    """

    pairs: int
    batch: int
    epochs: float
    tau: float = 0.1
    dim: int = 32
    hidden: int = 128
    lr: float = 2e-3
    held_out: int = 4096
    anchors: int = 1024
    checks: int = 16
    hierarchy: Hierarchy = field(default_factory=Hierarchy)

    @property
    def steps(self) -> int:
        return max(1, int(self.epochs * (self.pairs // self.batch)))


class Course:
    """The parts of a run that do not depend on the method: pairs, towers, batches and learning rates."""

    def __init__(self, setting: SeparationSetting, *, seed: int) -> None:
        self.setting, self.seed = setting, seed
        self.image, self.text = draw_pairs(setting.hierarchy, setting.pairs, seed=TRAINING_PAIRS + seed)
        inputs = dict.fromkeys(("image", "text"), setting.hierarchy.inputs)
        self.towers = make_towers(inputs, hidden=setting.hidden, dim=setting.dim, seed=seed)
        self.optimizer = torch.optim.AdamW(
            self.towers.parameters(), lr=setting.lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01
        )
        self.batches = orders(setting.pairs, setting.batch, seed=seed)

    def embed(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Features of both sides, [b, d] each."""
        return self.towers["image"](image), self.towers["text"](text)

    @torch.no_grad()
    def exact(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """log g of the anchors `rows` over all training pairs under the current towers, [len(rows)] each."""
        image, text = self.embed(self.image, self.text)
        return exact_log_normalizers(image, text, tau=self.setting.tau, rows=rows)

    def step(self, loss: Tensor, *, lr_scale: float) -> None:
        """One AdamW step on `loss`."""
        descend(self.optimizer, loss, lr=self.setting.lr * lr_scale)


def make_objective(config: dict[str, Any], setting: SeparationSetting, *, seed: int) -> SoftmaxObjective:
    """The arm's objective for this setting."""
    objective = build_objective(
        {"drift_check_every": 0, **config},
        dim=setting.dim,
        batch_size=setting.batch,
        dataset_size=setting.pairs,
        total_steps=setting.steps,
        seed=seed,
    )
    assert isinstance(objective, SoftmaxObjective)
    return objective


def oracle_loss(image: Tensor, text: Tensor, *, tau: float, exact: tuple[Tensor, Tensor]) -> Tensor:
    """The oracle's loss: tau mean_i (g1_i / exp(a1_i) + g2_i / exp(a2_i)), a exact and held constant."""
    similarity, size = image @ text.T, len(image)
    positive, own = similarity.diagonal()[:, None], torch.eye(size, dtype=torch.bool)
    loss = similarity.new_zeros(())
    for logits, normalizer in zip((similarity, similarity.T), exact, strict=True):
        exponents = ((logits - positive) / tau - normalizer[:, None]).masked_fill(own, -math.inf)
        loss = loss + tau * exponents.exp().sum(1).mean() / (size - 1)
    return loss


def train(config: dict[str, Any] | None, setting: SeparationSetting, *, seed: int) -> dict[str, Any]:
    """Train with the objective of `config` (None: the oracle).

    Returns:
        `error_in_use` and `error_cold`, mean squared errors of log-normalizers averaged over the run's checks; the
        values of each check in `errors`; the final results of `measure`; `cpu_seconds` of training.
    """
    course, began = Course(setting, seed=seed), time.process_time()
    objective = None if config is None else make_objective(config, setting, seed=seed)
    checks = _check_steps(setting)
    errors: list[dict[str, float]] = []
    for step in range(setting.steps):
        ids, scale = next(course.batches), lr_scale(step, setting.steps)
        image, text = course.embed(course.image[ids], course.text[ids])
        exact = course.exact(ids) if objective is None or step in checks else None
        if objective is None:
            assert exact is not None
            loss = oracle_loss(image, text, tau=setting.tau, exact=exact)
        else:
            if exact is not None:
                errors.append({"step": step, **_errors(objective, image, text, ids, exact)})
            loss = objective.loss(image, text, sample_ids=ids)
        course.step(loss, lr_scale=scale)
        if objective is not None:
            objective.commit(lr_scale=scale)
    seconds = time.process_time() - began
    return {"cpu_seconds": seconds, "errors": errors, **_means(errors), **measure(course)}


def watch(configs: dict[str, dict[str, Any]], setting: SeparationSetting, *, seed: int) -> dict[str, dict[str, Any]]:
    """Errors of several methods, by arm, on one shared trajectory trained with the oracle's gradients.

    Each method sees every batch's features and updates its own state, but not the towers. This makes the errors
    comparable: the normalizers of a method that trains worse are easier to predict.
    """
    course = Course(setting, seed=seed)
    objectives = {arm: make_objective(config, setting, seed=seed) for arm, config in configs.items()}
    checks = _check_steps(setting)
    errors: dict[str, list[dict[str, float]]] = {arm: [] for arm in configs}
    seconds = dict.fromkeys(configs, 0.0)
    for step in range(setting.steps):
        ids, scale = next(course.batches), lr_scale(step, setting.steps)
        image, text = course.embed(course.image[ids], course.text[ids])
        exact = course.exact(ids)
        for arm, objective in objectives.items():
            if step in checks:
                errors[arm].append({"step": step, **_errors(objective, image, text, ids, exact)})
            began = time.process_time()
            objective.loss(image.detach(), text.detach(), sample_ids=ids)
            objective.commit(lr_scale=scale)
            seconds[arm] += time.process_time() - began
        course.step(oracle_loss(image, text, tau=setting.tau, exact=exact), lr_scale=scale)
    return {arm: {"errors": errors[arm], "cpu_seconds": seconds[arm], **_means(errors[arm])} for arm in configs}


@torch.no_grad()
def measure(course: Course) -> dict[str, float]:
    """Evaluate the trained towers on training and held-out pairs.

    Returns:
        `gcl`: the exact global contrastive loss tau mean (log g1 + log g2) of training anchors. `held_out_gcl`: the
        same for held-out pairs among themselves. `nce`: held-out cross-entropy in nats, mean of both directions, at the
        best of a grid of temperatures. `mrr`, `recall_at_1`: held-out retrieval, mean of both directions. `chi2`: mean
        over training anchors and sides of the chi-squared distance of exp(h) from uniform, so that chi2 / B is about
        the squared relative error of a batch's estimate of g.
    """
    s = course.setting
    image, text = course.embed(course.image, course.text)
    rows = torch.arange(0, s.pairs, max(1, s.pairs // s.anchors))[: s.anchors]
    log_g = exact_log_normalizers(image, text, tau=s.tau, rows=rows)
    squared = exact_log_normalizers(image, text, tau=s.tau / 2, rows=rows)  # exp(2 h) = exp((s_ij - s_ii) / (tau / 2))
    chi2 = torch.stack([(two - 2 * one).exp().mean() - 1 for two, one in zip(squared, log_g, strict=True)]).mean()
    held_image, held_text = course.embed(*draw_pairs(s.hierarchy, s.held_out, seed=HELD_OUT_PAIRS + course.seed))
    held_g = exact_log_normalizers(held_image, held_text, tau=s.tau, rows=torch.arange(s.held_out))
    return {
        "gcl": s.tau * float((log_g[0] + log_g[1]).mean()),
        "held_out_gcl": s.tau * float((held_g[0] + held_g[1]).mean()),
        "chi2": float(chi2),
        **retrieval(held_image @ held_text.T),
    }


def retrieval(similarity: Tensor) -> dict[str, float]:
    """NCE at its best temperature, MRR and R@1 of a square similarity matrix, averaged over both directions."""
    positive = similarity.diagonal()
    ranks = [(side > positive[:, None]).sum(1) + 1 for side in (similarity, similarity.T)]
    reciprocal, first = (torch.stack([f(r).mean() for r in ranks]).mean() for f in (_reciprocal, _is_first))
    nce = [_cross_entropy(similarity / tau) for tau in NCE_TEMPERATURES]
    return {"nce": min(nce), "mrr": 100 * float(reciprocal), "recall_at_1": 100 * float(first)}


def _reciprocal(ranks: Tensor) -> Tensor:
    return 1 / ranks.double()


def _is_first(ranks: Tensor) -> Tensor:
    return (ranks == 1).double()


def _cross_entropy(logits: Tensor) -> float:
    positive = logits.diagonal()
    return float((logits.logsumexp(1) + logits.logsumexp(0) - 2 * positive).mean() / 2)


def _check_steps(setting: SeparationSetting) -> set[int]:
    """Steps at which errors are measured: spread over the run, at varying phases of the restart interval."""
    spacing = setting.steps / setting.checks
    return {int((number + 0.37 + 0.26 * math.sin(number)) * spacing) for number in range(setting.checks)}


def _errors(
    objective: SoftmaxObjective, image: Tensor, text: Tensor, ids: Tensor, exact: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """Mean squared errors of the batch's log-normalizers (in use and cold), averaged over both sides."""
    if objective.steps == 0:
        return {}
    found = objective.log_normalizers(image.detach(), text.detach(), sample_ids=ids)
    return {"in_use": squared_error(found.in_use, exact), "cold": squared_error(found.cold, exact)}


def squared_error(found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> float:
    """The mean squared error of log-normalizers, averaged over both sides."""
    return float(torch.stack([(a - b).square().mean() for a, b in zip(found, exact, strict=True)]).mean())


def _means(errors: list[dict[str, float]]) -> dict[str, float | None]:
    """The run's mean errors; None for an arm without estimates."""
    result: dict[str, float | None] = {}
    for kind in ("in_use", "cold"):
        values = [error[kind] for error in errors if kind in error]
        result[f"error_{kind}"] = sum(values) / len(values) if values else None
    return result
