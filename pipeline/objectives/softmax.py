"""The frame of all softmax objectives: a method supplies its log-normalizers and its state, the rest is shared.

One step on every rank: gather the features once; statistics of the own anchors; gather O(B) scalars; the method
decides, on the same numbers on every rank, how much each anchor weighs; exact gradient of the own features. No
collective moves d-dimensional gradients (FastCLIP, section 4).

Shape legend: B global batch, b local batch, d feature dimension, K ranks. A pair is (image side, text side).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from pipeline.errors import UserError
from pipeline.objectives import pairwise
from pipeline.objectives.base import Objective, ObjectiveContext, ObjectiveOutput, load_tensors
from pipeline.objectives.drift import DriftGuard
from pipeline.precision import true_fp32

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AnchorBatch:
    """The global batch as every rank sees it, with the same bits.

    features: [B, d] each. positive: s_ii, [B]. tau: temperature of each anchor, [B] each. log_g: log of the in-batch
    normalizer, [B] each; mean_h: see `pairwise.anchor_statistics`. fetched: the method's per-sample state of the batch.
    rows: this rank's rows. step: steps applied so far.
    """

    features: Pair
    positive: Tensor
    tau: Pair
    log_g: Pair
    mean_h: Pair
    fetched: Any
    rows: slice
    step: int

    @property
    def size(self) -> int:
        return self.positive.shape[0]


@dataclass(frozen=True)
class Decision:
    """What a method makes of a batch.

    loss: scalar. log_normalizer: a, [B] each; log_scale: log c, [B] each or scalars, such that
    dL/ds_ij = (c_i / B) exp(h_ij - log(B - 1) - a_i) for j != i. pull: -dL/ds_ii of each side, [B] each; by default the
    sum of these over j != i. tau_gradient: dL/dtau of a global temperature.
    feature_gradient: further terms for this rank's features, [b, d] each. update: what `apply` needs on commit.
    """

    loss: Tensor
    log_normalizer: Pair
    log_scale: Pair
    pull: Pair | None = None
    tau_gradient: Tensor | None = None
    feature_gradient: Pair | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    update: Any = None


@dataclass(frozen=True)
class Beliefs:
    """log-normalizers of this rank's anchors as a method sees them, and their temperatures; [b] each.

    cold: from lasting state alone. in_use: with what the step on their own batch learns before its gradients.
    """

    cold: Pair
    in_use: Pair
    tau: Pair


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No shortcut in precision that the user's own loop may be in: neither TF32 nor autocast."""
    with true_fp32(), torch.autocast(device.type, enabled=False):
        yield


class FramedObjective(Objective):
    """The life of a step: `compute` leaves something pending, `commit` applies it, `discard` forgets it."""

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        if context.batch_size < 2:
            raise UserError(f"batch_size = {context.batch_size}: a contrastive loss needs a global batch of 2 or more.")
        self.config, self.context, self.world = config, context, context.world
        self.drift = DriftGuard(context.world, every=config.drift_check_every, device=context.device)
        self._steps = torch.zeros((), dtype=torch.int64)  # on the host: counting must not wait for the device
        self._pending: Any = None

    @abstractmethod
    def evaluate(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> tuple[ObjectiveOutput, Any]:
        """Output of this batch and what `apply` needs on commit; must not change lasting state."""

    @abstractmethod
    def apply(self, pending: Any, *, lr_scale: float) -> None:
        """Make the pending update lasting."""

    def own_state(self) -> dict[str, Tensor]:
        """The method's replicated lasting tensors, by name: the very tensors, so that loading writes into them."""
        return {}

    def gather_features(self, image: Tensor, text: Tensor) -> Pair:
        """[b, d] features of every rank -> the global batch's, [B, d] each. Raises: UserError for a B out of range."""
        images, texts = self.world.all_gather(image), self.world.all_gather(text)
        if not 2 <= len(images) <= self.context.batch_size:
            raise UserError(
                f"The global batch holds {len(images)} pairs: a contrastive loss needs 2 or more, and batch_size = "
                f"{self.context.batch_size}, over all ranks, is what this objective was built for."
            )
        return images, texts

    @torch.no_grad()
    def compute(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> ObjectiveOutput:
        if self._pending is not None:
            raise RuntimeError(
                "A second batch before the step on the first was taken: call commit() after the optimizer's step, or "
                "discard() when there was none. The global batch goes into one compute() or loss(); gradients of "
                "several cannot be accumulated."
            )
        dtype = self.context.dtype
        with plain_arithmetic(self.context.device):
            output, self._pending = self.evaluate(image.to(dtype), text.to(dtype), sample_ids=sample_ids)
        return output

    @torch.no_grad()
    def commit(self, *, lr_scale: float = 1.0) -> None:
        if self._pending is None:
            raise RuntimeError("commit() without compute(): nothing is pending")
        pending, self._pending = self._pending, None
        with plain_arithmetic(self.context.device):
            self.apply(pending, lr_scale=lr_scale)
        self._steps += 1
        if self.drift.due(self.steps):
            self.drift.check(self.own_state(), step=self.steps)

    def discard(self) -> None:
        self._pending = None

    @property
    def steps(self) -> int:
        return int(self._steps)

    def counters(self) -> dict[str, float]:
        return {"drift_events": float(self.drift.events)} if self.world.size > 1 else {}

    @property
    def world_size(self) -> int:
        return self.world.size

    def state_dict(self) -> dict[str, Tensor]:
        lasting = {"steps": self._steps, **self.own_state()}
        return {key: value.detach().clone() for key, value in lasting.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._pending = None
        load_tensors({"steps": self._steps, **self.own_state()}, state)


class SoftmaxObjective(FramedObjective):
    """Gathers and shared pairwise maths; a method implements `temperatures`, `decide` and `apply`."""

    @abstractmethod
    def temperatures(self, size: int, fetched: Any) -> Pair:
        """tau of each of the batch's anchors, [B] each (expanded scalars for a global one)."""

    @abstractmethod
    def decide(self, batch: AnchorBatch) -> Decision:
        """Loss, log-normalizers and pending update of this batch; must not change lasting state."""

    def predict(self, batch: AnchorBatch) -> Pair:
        """log-normalizers of the batch's anchors from lasting state alone, [B] each; here: the batch's own value."""
        return batch.log_g

    def in_use(self, batch: AnchorBatch) -> Pair:
        """log-normalizers that a step on this batch would weigh its gradients with, [B] each."""
        return self.decide(batch).log_normalizer

    def restarts(self) -> bool:
        """Whether the next step begins with a fresh network."""
        return False

    @torch.no_grad()
    def log_normalizers(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> Beliefs:
        """What the method believes log(eps + g) of these pairs to be, without a lasting trace of having been asked.

        For the estimation error of NeuCLIP, appendix B.6. Collective. `image`, `text`: [b, d] should be this rank's
        part of a batch of the training's size: methods without state answer with the value within the batch. Not
        between `compute` and `commit`, whose pending changes it would replace. Raises: RuntimeError then.
        """
        if self._pending is not None:
            raise RuntimeError("log_normalizers() between compute() and commit(): ask before or after the step")
        dtype = self.context.dtype
        with plain_arithmetic(self.context.device):
            batch = self._gather((image.to(dtype), text.to(dtype)), fetched=self.fetch(sample_ids))
            pairs = (self.predict(batch), self.in_use(batch), batch.tau)
        cold, in_use, tau = ((first[batch.rows], second[batch.rows]) for first, second in pairs)
        return Beliefs(cold, in_use, tau)

    def fetch(self, sample_ids: Tensor) -> Any:
        """Per-sample state of the batch, the same on every rank; the method finds it in `batch.fetched`."""
        return None

    def evaluate(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> tuple[ObjectiveOutput, Decision]:
        with record_function("objective.gather"):
            batch = self._gather((image, text), fetched=self.fetch(sample_ids))
        with record_function("objective.decide"):
            decision = self.decide(batch)
        with record_function("objective.gradient"):
            grad_image, grad_text = self._feature_gradients(batch, decision)
        metrics = {"loss": decision.loss, **decision.metrics}
        names = ("of_image", "of_text")
        kinds = (("log_normalizer", decision.log_normalizer), ("log_batch_normalizer", batch.log_g))
        seen = {f"{kind}_{name}": pair[i] for kind, pair in kinds for i, name in enumerate(names)}
        seen["similarity_of_pair"] = batch.positive
        return ObjectiveOutput(decision.loss, grad_image, grad_text, metrics, seen), decision

    def _gather(self, own: Pair, *, fetched: Any) -> AnchorBatch:
        features = self.gather_features(*own)
        rows, size = self.world.rows(own[0].shape[0]), features[0].shape[0]
        tau = self.temperatures(size, fetched)
        positive_b = (own[0] * own[1]).sum(1)
        scalars = [positive_b]
        for side in (0, 1):
            scalars += pairwise.anchor_statistics(
                own[side], features[1 - side], positive_b=positive_b, tau_b=tau[side][rows], first=rows.start
            )
        positive, log_g1, mean_h1, log_g2, mean_h2 = self.world.all_gather(torch.stack(scalars, 1)).unbind(1)
        return AnchorBatch(features, positive, tau, (log_g1, log_g2), (mean_h1, mean_h2), fetched, rows, self.steps)

    def _feature_gradients(self, batch: AnchorBatch, decision: Decision) -> Pair:
        sides = [_anchor_side(batch, decision, side) for side in (0, 1)]
        gradients = []
        for side in (0, 1):
            gradient = pairwise.softmax_gradient(
                batch.features[side][batch.rows],
                batch.features[1 - side],
                own=sides[side].take(batch.rows),
                others=sides[1 - side],
                first=batch.rows.start,
            )
            if decision.feature_gradient is not None:
                gradient += decision.feature_gradient[side]
            gradients.append(gradient)
        return gradients[0], gradients[1]


def _anchor_side(batch: AnchorBatch, decision: Decision, side: int) -> pairwise.AnchorSide:
    log_share = decision.log_scale[side] - decision.log_normalizer[side] - math.log(batch.size)
    pull = torch.exp(log_share + batch.log_g[side]) if decision.pull is None else decision.pull[side]
    log_weight = log_share - math.log(batch.size - 1)
    return pairwise.AnchorSide(batch.positive, batch.tau[side], log_weight, pull)
