"""The part that all softmax objectives share: gathers, statistics of the anchors, exact feature gradients.

One step on every rank: gather the features once; compute statistics of the own anchors; gather O(B) scalars; let the
method choose, from the same numbers on every rank, how much each anchor weighs; compute the exact gradient of the own
features. No collective moves d-dimensional gradients (FastCLIP, section 4).

Shape legend: B global batch, b local batch, d feature dimension, K ranks. A pair is (image side, text side).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from pipeline.objectives import pairwise
from pipeline.objectives.base import Objective, ObjectiveContext, ObjectiveOutput, Pair, plain_arithmetic
from pipeline.objectives.sample_table import PerSampleTable

SIDES = ("image", "text")


class Component:
    """A part of an objective with state of its own, such as its estimator of normalizers; by default without any."""

    table: PerSampleTable | None = None

    def replicated_state(self) -> dict[str, Tensor]:
        """The state that every rank holds, by name: the tensors themselves."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """See `Objective.own_state`."""
        return {}

    def gathered_state(self) -> dict[str, Tensor]:
        """See `Objective.gathered_state`."""
        return {}

    def divide_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Objective.divide_state`."""

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        """Current learning rates, by the name of their setting."""
        return {}

    def distributions(self) -> dict[str, Tensor]:
        """Values of the lasting state for histograms."""
        return {}

    def commit(self, update: Any) -> None:
        """Apply `AnchorWeights.update` of the pending batch."""


class Temperature(Component):
    """Supplies the temperature of every anchor."""

    @abstractmethod
    def of_anchors(self, size: int, fetched: Tensor | None) -> Pair:
        """tau of a batch's anchors, [B] each (expanded scalars for a global one); fetched: the batch's table rows."""

    @abstractmethod
    def logit_scale(self) -> float:
        """log(1/tau), as open_clip stores it."""

    def update(self, gradient: Any, *, lr_scale: float) -> None:
        """Learn from dL/dtau."""
        raise NotImplementedError(f"{type(self).__name__} is not learned")


@dataclass(frozen=True)
class AnchorBatch:
    """The global batch as every rank sees it, bit-identical on all of them."""

    features: Pair
    """[B, d] each."""
    positive: Tensor
    """s_ii, [B]."""
    tau: Pair
    """Temperature of each anchor, [B] each."""
    log_g: Pair
    """log of the in-batch normalizer, [B] each."""
    mean_h: Pair
    """[B] each; see `pairwise.anchor_statistics`."""
    fetched: Any
    """Rows of the per-sample table, [B, columns], for methods that have one."""
    rows: slice
    """This rank's rows."""
    step: int
    """Steps committed so far."""

    @property
    def size(self) -> int:
        return self.positive.shape[0]


@dataclass(frozen=True)
class AnchorWeights:
    """A method's answer to a batch: how much each anchor weighs, and what to update on commit.

    The gradient is dL/ds_ij = (c_i / B) exp(h_ij - log(B - 1) - a_i) for j != i, from both sides' anchors.
    """

    loss: Tensor
    """Scalar."""
    log_normalizer: Pair
    """a, [B] each."""
    log_scale: Pair
    """log c, [B] each or scalars."""
    pull: Pair | None = None
    """-dL/ds_ii of each side, [B] each; by default the sum of dL/ds_ij over j != i."""
    tau_gradient: Tensor | None = None
    """dL/dtau, for `Temperature.update`."""
    feature_gradient: Pair | None = None
    """Further terms of the gradient of this rank's features, [b, d] each."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    update: Any = None
    """For the estimator's `commit`."""


@dataclass(frozen=True)
class NormalizerEstimates:
    """A method's own log-normalizers of this rank's anchors, and their temperatures; [b] each."""

    cold: Pair
    """From the lasting state alone."""
    in_use: Pair
    """After what a step on the anchors' own batch learns before it computes gradients."""
    tau: Pair


class SoftmaxObjective(Objective):
    """An objective whose gradient is a weighted softmax; a method implements `anchor_weights`.

    Args:
        config: The method's section.
        context: The facts of the run.
        temperature: Supplies tau, and learns it unless it is constant.
        estimator: Keeps the method's estimates of the normalizers, if it has any beyond the batch's own.
        eps: The small constant that the method adds to every normalizer g; 0 = none.
    """

    def __init__(
        self,
        config: Any,
        context: ObjectiveContext,
        *,
        temperature: Temperature,
        estimator: Component | None = None,
        eps: float = 0.0,
    ) -> None:
        estimator = estimator or Component()
        super().__init__(config, context, table=estimator.table)
        self.temperature, self._estimator, self.eps = temperature, estimator, eps

    @abstractmethod
    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        """Loss, log-normalizers and pending update of this batch; must not change lasting state."""

    def cold_normalizers(self, batch: AnchorBatch) -> Pair:
        """log-normalizers of the anchors from lasting state alone, [B] each; here the batch's own value."""
        return batch.log_g

    def normalizers_in_use(self, batch: AnchorBatch) -> Pair:
        """log-normalizers by which a step on this batch would weigh its gradients, [B] each."""
        return self.anchor_weights(batch).log_normalizer

    def restarts(self) -> bool:
        """Whether the next step begins with a fresh network."""
        return False

    @torch.no_grad()
    def log_normalizers(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> NormalizerEstimates:
        """The method's estimates of log(eps + g) of these pairs, without any lasting effect; collective.

        For the estimation error of NeuCLIP, appendix B.6. Methods without state answer with the value within the batch.

        Args:
            image: [b, d], this rank's part of a batch, which should have the training's size.
            text: The same of the texts.
            sample_ids: [b] int64.

        Raises:
            RuntimeError: Between `compute` and `commit`, whose pending changes would be replaced.
        """
        if self._pending is not None:
            raise RuntimeError("log_normalizers() between compute() and commit(): call it before or after the step")
        dtype = self.context.dtype
        with plain_arithmetic(self.context.device):
            batch = self._gather((image.to(dtype), text.to(dtype)), sample_ids)
            pairs = (self.cold_normalizers(batch), self.normalizers_in_use(batch), batch.tau)
        cold, in_use, tau = ((first[batch.rows], second[batch.rows]) for first, second in pairs)
        return NormalizerEstimates(cold, in_use, tau)

    def loss_and_gradients(
        self, image: Tensor, text: Tensor, *, sample_ids: Tensor
    ) -> tuple[ObjectiveOutput, AnchorWeights]:
        with record_function("objective.gather"):
            batch = self._gather((image, text), sample_ids)
        with record_function("objective.anchor_weights"):
            weights = self.anchor_weights(batch)
        with record_function("objective.gradient"):
            grad_image, grad_text = _feature_gradients(batch, weights)
        kinds = (("log_normalizer", weights.log_normalizer), ("log_batch_normalizer", batch.log_g))
        seen = {f"{kind}_of_{side}": pair[i] for kind, pair in kinds for i, side in enumerate(SIDES)}
        seen["similarity_of_pair"] = batch.positive
        metrics = {"loss": weights.loss, **weights.metrics}
        return ObjectiveOutput(weights.loss, grad_image, grad_text, metrics, seen), weights

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        if pending.tau_gradient is not None:
            self.temperature.update(pending.tau_gradient, lr_scale=lr_scale)
        self._estimator.commit(pending.update)

    def logit_parameters(self) -> tuple[float, float]:
        return self.temperature.logit_scale(), 0.0

    def replicated_state(self) -> dict[str, Tensor]:
        return {**self.temperature.replicated_state(), **self._estimator.replicated_state()}

    def own_state(self) -> dict[str, Tensor]:
        return self._estimator.own_state()

    def gathered_state(self) -> dict[str, Tensor]:
        return self._estimator.gathered_state()

    def divide_state(self, state: Mapping[str, Tensor]) -> None:
        self._estimator.divide_state(state)

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        parts = (self.temperature, self._estimator)
        return {name: rate for part in parts for name, rate in part.learning_rates(lr_scale=lr_scale).items()}

    def distributions(self) -> dict[str, Tensor]:
        return self._estimator.distributions()

    def _gather(self, own: Pair, sample_ids: Tensor) -> AnchorBatch:
        fetched = None if self.table is None else self.table.lookup(sample_ids).to(self.context.dtype)
        features = self.gather_features(*own)
        rows, size = self.world.rows(own[0].shape[0]), features[0].shape[0]
        tau = self.temperature.of_anchors(size, fetched)
        positive_b = (own[0] * own[1]).sum(1)
        scalars = [positive_b]
        for side in (0, 1):
            scalars += pairwise.anchor_statistics(
                own[side], features[1 - side], positive_b=positive_b, tau_b=tau[side][rows], first=rows.start
            )
        positive, log_g1, mean_h1, log_g2, mean_h2 = self.world.all_gather(torch.stack(scalars, 1)).unbind(1)
        return AnchorBatch(features, positive, tau, (log_g1, log_g2), (mean_h1, mean_h2), fetched, rows, self.steps)


def mean_gap(estimates: Pair, targets: Pair) -> Tensor:
    """Mean absolute difference of log-normalizers over both sides, a scalar."""
    return torch.stack([(a - b).abs().mean() for a, b in zip(estimates, targets, strict=True)]).mean()


def _feature_gradients(batch: AnchorBatch, weights: AnchorWeights) -> Pair:
    sides = [_anchor_side(batch, weights, side) for side in (0, 1)]
    gradients = []
    for side in (0, 1):
        gradient = pairwise.softmax_gradient(
            batch.features[side][batch.rows],
            batch.features[1 - side],
            own=sides[side].take(batch.rows),
            others=sides[1 - side],
            first=batch.rows.start,
        )
        if weights.feature_gradient is not None:
            gradient += weights.feature_gradient[side]
        gradients.append(gradient)
    return gradients[0], gradients[1]


def _anchor_side(batch: AnchorBatch, weights: AnchorWeights, side: int) -> pairwise.AnchorSide:
    log_share = weights.log_scale[side] - weights.log_normalizer[side] - math.log(batch.size)
    pull = torch.exp(log_share + batch.log_g[side]) if weights.pull is None else weights.pull[side]
    log_weight = log_share - math.log(batch.size - 1)
    return pairwise.AnchorSide(batch.positive, batch.tau[side], log_weight, pull)
