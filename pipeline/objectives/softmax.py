"""The part that all softmax objectives share: gathers, statistics of the anchors, exact feature gradients.

One step on every rank: gather the features once; compute statistics of the own anchors; gather O(B) scalars; let the
method choose, from the same numbers on every rank, how much each anchor weighs; compute the exact gradient of the own
features. No collective moves d-dimensional gradients (FastCLIP, section 4).

Shape legend: B global batch, b local batch, d feature dimension, K ranks. [2, B] are numbers of all anchors, image
anchors first; a pair is (image side, text side).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.distributed.devices import true_fp32
from pipeline.objectives import pairwise
from pipeline.objectives.base import Objective
from pipeline.objectives.distill import Teacher, relational_loss
from pipeline.objectives.registry import ObjectiveConfig, ObjectiveContext, ObjectiveOutput, Pair, StatefulPart
from pipeline.objectives.temperature import Temperature

SIDES = ("image", "text")


@dataclass(frozen=True)
class AnchorBatch:
    """The global batch as every rank sees it, bit-identical on all of them."""

    features: Pair
    """[B, d] each."""
    positive: Tensor
    """s_ii, [B]."""
    tau: Tensor
    """Temperature of each anchor, [2, B]."""
    log_g: Tensor
    """log of the in-batch normalizer, [2, B]."""
    mean_h: Tensor
    """[2, B]; see `pairwise.anchor_statistics`."""
    fetched: Any
    """Rows of the per-sample table, [B, columns], for methods that have one."""
    size: int
    """B."""
    rows: slice
    """This rank's rows."""
    step: int
    """Steps committed so far."""
    ids: Tensor | None = None
    """Sample ids, [B], for methods that need them; negative ones are unknown and distinct."""
    keys: Tensor | None = None
    """Of equal pairs, [B, k], with `mask_equal`."""

    def tau_slopes(self, log_normalizer: Tensor) -> Tensor:
        """`(dg_i/dtau) / exp(a_i)` of each anchor for its log-normalizer a, [2, B]: -(1/tau) exp(log g - a) mean_h."""
        return -torch.exp(self.log_g - log_normalizer) * self.mean_h / self.tau


@dataclass(frozen=True)
class AnchorWeights:
    """A method's answer to a batch: how much each anchor weighs, and what to update on commit.

    The gradient is dL/ds_ij = (c_i / B) exp(h_ij - log(B - 1) - a_i) for j != i, from both sides' anchors.
    """

    loss: Tensor
    """Scalar."""
    log_normalizer: Tensor
    """a, [2, B]."""
    log_scale: Tensor | float = 0.0
    """log c, the same for all anchors."""
    pull: Tensor | None = None
    """-dL/ds_ii, [2, B]; by default the sum of dL/ds_ij over j != i."""
    tau_gradient: Tensor | None = None
    """dL/dtau, for `Temperature.update`."""
    feature_gradient: Pair | None = None
    """Further terms of the gradient of this rank's features, [b, d] each."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    update: Any = None
    """For the method's `update_state`."""


class SoftmaxObjective(Objective):
    """An objective whose gradient is a weighted softmax; a method implements `anchor_weights`.

    Args:
        temperature: Supplies tau, and learns it unless it is constant.
        parts: What else has state.
        eps: The small constant that the method adds to every normalizer g; 0 = none.
    """

    distills = masks = True
    needs_ids = False
    """Whether the method uses `AnchorBatch.ids`."""

    def __init__(
        self,
        config: ObjectiveConfig,
        context: ObjectiveContext,
        *,
        temperature: Temperature,
        parts: tuple[StatefulPart, ...] = (),
        eps: float = 0.0,
    ) -> None:
        super().__init__(config, context, parts=(temperature, *parts))
        self.temperature, self.eps = temperature, eps

    @abstractmethod
    def anchor_weights(self, batch: AnchorBatch) -> AnchorWeights:
        """Loss, log-normalizers and pending update of this batch; must not change lasting state."""

    def cold_normalizers(self, batch: AnchorBatch) -> Tensor:
        """log-normalizers of the anchors from lasting state alone, [2, B]; here the batch's own."""
        return batch.log_g

    def normalizers_in_use(self, batch: AnchorBatch) -> Tensor:
        """log-normalizers by which a step on this batch would weigh its gradients, [2, B]."""
        return self.anchor_weights(batch).log_normalizer

    def with_eps(self, log_values: Tensor) -> Tensor:
        """log(eps + x) of log x."""
        return torch.logaddexp(log_values, log_values.new_full((), math.log(self.eps)))

    @torch.no_grad()
    def log_normalizers(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The method's estimates of log(eps + g) of these pairs, without any lasting effect; collective.

        For the estimation error of NeuCLIP, appendix B.6. Methods without state answer with the value within the batch.
        Features [b, d] and ids [b] are this rank's part of a batch, which should have the training's size.

        Returns:
            From lasting state alone; after what a step on this batch learns before it computes gradients; and the
            anchors' temperatures, [2, b] each.

        Raises:
            RuntimeError: Between `compute` and `commit`, whose pending changes would be replaced.
        """
        if self.is_pending:
            raise RuntimeError("log_normalizers() between compute() and commit(): call it before or after the step")
        dtype = self.context.dtype
        with true_fp32(self.context.device):
            batch = self._gather((image.to(dtype), text.to(dtype)), sample_ids)
            cold, in_use = self.cold_normalizers(batch), self.normalizers_in_use(batch)
        return cold[:, batch.rows], in_use[:, batch.rows], batch.tau[:, batch.rows]

    def loss_and_gradients(
        self,
        image: Tensor,
        text: Tensor,
        *,
        sample_ids: Tensor,
        teacher: Teacher | None = None,
        keys: Tensor | None = None,
    ) -> tuple[ObjectiveOutput, AnchorWeights]:
        batch = self._gather((image, text), sample_ids, keys)
        weights = self.anchor_weights(batch)
        if teacher is not None:
            weights = self._distilled(weights, batch, (image, text), teacher)
        grad_image, grad_text = _feature_gradients(batch, weights)
        kinds = (("log_normalizer", weights.log_normalizer), ("log_batch_normalizer", batch.log_g))
        seen = {f"{kind}_of_{side}": pair[i] for kind, pair in kinds for i, side in enumerate(SIDES)}
        seen["similarity_of_pair"] = batch.positive
        metrics = {"loss": weights.loss, **weights.metrics}
        return ObjectiveOutput(weights.loss, grad_image, grad_text, metrics, seen), weights

    def _distilled(self, weights: AnchorWeights, batch: AnchorBatch, own: Pair, teacher: Teacher) -> AnchorWeights:
        """The weights with the teacher's loss added to loss and gradients."""
        scale, to_tau = self.config.distill, weights.tau_gradient
        loss, gradients, slopes = relational_loss(own, batch.features, batch.tau, teacher=teacher, world=self.world)
        further = weights.feature_gradient or (torch.zeros_like(own[0]), torch.zeros_like(own[1]))
        if to_tau is not None:
            slopes = scale * slopes
            to_tau = to_tau + (slopes if to_tau.dim() else slopes.sum(1).mean())  # of every anchor, or of one for all
        return replace(
            weights,
            loss=weights.loss + scale * loss,
            feature_gradient=(further[0] + scale * gradients[0], further[1] + scale * gradients[1]),
            tau_gradient=to_tau,
            metrics={**weights.metrics, "contrastive_loss": weights.loss, "distillation_loss": loss},
        )

    def update_state(self, pending: AnchorWeights, *, lr_scale: float) -> None:
        if pending.tau_gradient is not None:
            self.temperature.update(pending.tau_gradient, lr_scale=lr_scale)

    def logit_parameters(self) -> tuple[float, float | None]:
        return self.temperature.logit_scale(), None

    def _gather(self, own: Pair, sample_ids: Tensor, keys: Tensor | None = None) -> AnchorBatch:
        keys = None if keys is None else self.world.all_gather(keys)
        fetched = None if self.table is None else self.table.lookup(sample_ids).to(self.context.dtype)
        features = self.gather_features(*own)
        rows, size = self.world.rows(own[0].shape[0]), features[0].shape[0]
        tau = self.temperature.of_anchors(size, fetched)
        positive_b = (own[0] * own[1]).sum(1)
        scalars = [positive_b]
        for side in (0, 1):
            scalars += pairwise.anchor_statistics(
                own[side],
                features[1 - side],
                positive_b=positive_b,
                tau_b=tau[side][rows],
                first=rows.start,
                keys_Bk=keys,
            )
        gathered = self.world.all_gather(torch.stack(scalars, 1)).T.contiguous()
        positive, log_g, mean_h = gathered[0], gathered[1::2], gathered[2::2]
        ids = None
        if self.needs_ids:
            ids = self.world.all_gather(sample_ids.to(positive_b.device, non_blocking=True))
        return AnchorBatch(features, positive, tau, log_g, mean_h, fetched, size, rows, self.steps, ids, keys)


def _feature_gradients(batch: AnchorBatch, weights: AnchorWeights) -> Pair:
    log_share = weights.log_scale - weights.log_normalizer - math.log(batch.size)
    pull = (torch.exp(log_share + batch.log_g) if weights.pull is None else weights.pull).sum(0)
    slope, shift = 1.0 / batch.tau, log_share - math.log(batch.size - 1) - batch.positive / batch.tau
    gradients = []
    for side in (0, 1):
        gradient = pairwise.softmax_gradient(
            batch.features[side][batch.rows],
            batch.features[1 - side],
            slope=(slope[side], slope[1 - side]),
            shift=(shift[side], shift[1 - side]),
            pull=pull,
            first=batch.rows.start,
            keys_Bk=batch.keys,
        )
        if weights.feature_gradient is not None:
            gradient += weights.feature_gradient[side]
        gradients.append(gradient)
    return gradients[0], gradients[1]
