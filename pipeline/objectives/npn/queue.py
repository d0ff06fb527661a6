"""The newest features of both sides, and the NPN that consists of them, without learning (`objective.npn=queue`)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from pipeline.objectives.npn.network import BothSides, Npn, NpnConfig, Prediction, register_npn
from pipeline.objectives.npn.prototypes import Anchors, mean_slopes, normalizer_of_mean
from pipeline.objectives.pairwise import Workspace, row_blocks
from pipeline.objectives.registry import ObjectiveContext, Pair
from pipeline.objectives.softmax import AnchorBatch

_EXCLUDED = -1e30
"""The exponent of an anchor's own sample: its exponential is 0, also where all exponents of a row are excluded."""
NO_SAMPLE = -(2**62)
"""The id of a place in the queue that is empty or whose sample is not known; no anchor has it."""


class FeatureQueue:
    """The newest m features of both sides, [2, m, d]: texts for image anchors, images for text anchors.

    `length` is m, and may be 0; with `ids` it holds the sample ids, too.
    """

    def __init__(self, length: int, context: ObjectiveContext, *, ids: bool = False) -> None:
        self.features = torch.zeros((2, length, context.dim), dtype=context.dtype, device=context.device)
        self.ids = torch.full((length if ids else 0,), NO_SAMPLE, dtype=torch.int64, device=context.device)
        self.written = torch.zeros((), dtype=torch.int64)
        """On the host: features ever written."""

    @property
    def filled(self) -> int:
        """How many features there are."""
        return min(self.features.shape[1], int(self.written))

    def add(self, batch: AnchorBatch) -> None:
        """Overwrite the oldest features by the batch's."""
        m = self.features.shape[1]
        if not m:
            return
        first, count = int(self.written) % m, min(batch.size, m)
        head = min(count, m - first)
        for start, rows in ((first, slice(0, head)), (0, slice(head, count))):
            end = start + rows.stop - rows.start
            for side in (0, 1):
                self.features[side, start:end] = batch.features[1 - side][rows]
            if len(self.ids) and batch.ids is not None:
                self.ids[start:end] = batch.ids[rows]
        self.written += count

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves, by their names in a checkpoint."""
        ids = {"npn.queue_ids": self.ids} if len(self.ids) else {}
        return {"npn.queue": self.features, "npn.queued": self.written, **ids}


@register_npn("queue")
class QueueNpn(Npn):
    """alpha_i = log(eps + mean over j of exp((e_i . x_j - s_ii) / tau)), x_j the newest m features of the other side.

    With `restart_with` previous these are features of earlier batches, and those of an anchor's own sample are
    excluded from its mean: the stale positive is no negative. With `current` they include the batch's own. A first
    batch has only itself.

    Every rank holds the whole queue, predicts for its own anchors, and gathers the others' predictions.
    """

    is_mean = True

    def __init__(self, config: NpnConfig, context: ObjectiveContext) -> None:
        super().__init__(config, context, {})
        self.needs_ids = config.restart_with == "previous"
        self.queue = FeatureQueue(config.prototypes, context, ids=self.needs_ids)
        self.workspace, self._in_use = Workspace(), self.queue

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self._in_use = self.queue
        if self.config.restart_with == "current" or not self.queue.filled:
            self._in_use = copy.deepcopy(self.queue)
            self._in_use.add(batch)
        own = anchors[0].take(batch.rows), anchors[1].take(batch.rows)
        means = self.context.world.all_gather(self._means(own, self._in_use))
        alpha = means[:, 0], means[:, 1]
        return Prediction(alpha, alpha, prototypes=means[:, 2])

    def predict(self, anchors: BothSides) -> Pair:
        if not self.queue.filled:
            raise RuntimeError("there are no prototypes before the first committed step")
        means = self._means(anchors, self.queue)
        return means[:, 0], means[:, 1]

    def commit(self, update: AnchorBatch) -> None:
        self.queue.add(update)

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self._in_use.features[side, : self._in_use.filled]
        own, count = self._others(anchors, self._in_use)
        z = self._products(anchors.features[None] / anchors.tau, features[None], own)[0]
        weights, log_sum = torch.softmax(z, 1), z.logsumexp(1)
        _, share = normalizer_of_mean(log_sum, anchors, count)
        return mean_slopes(anchors, (weights @ features) * share[:, None], share, partners_bd)

    def replicated_state(self) -> dict[str, Tensor]:
        return self.queue.state()

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {}

    def _means(self, anchors: BothSides, queue: FeatureQueue) -> Tensor:
        """alpha of both sides and the number of features it is a mean over, [b, 3]."""
        means, features = [], queue.features[:, : queue.filled]
        scaled = torch.stack([anchors[0].features, anchors[1].features]) / anchors[0].tau
        for rows in row_blocks(len(anchors[0]), 2 * queue.filled, device=features.device):
            part = anchors[0].take(rows)
            own, count = self._others(part, queue)
            z = self._products(scaled[:, rows], features, own)
            top = z.amax(2)  # softmax is faster than logsumexp, and its largest value is exp(top) / sum
            log_sum = top - torch.softmax(z, 2, out=z).amax(2).log_()
            alpha, _ = normalizer_of_mean(log_sum, part, count)
            means.append(torch.cat([alpha, count[None]]).T)
        return torch.cat(means)

    def _others(self, anchors: Anchors, queue: FeatureQueue) -> tuple[Tensor | None, Tensor]:
        """Where a feature is of the anchor's own sample, [b, filled] or None, and the number of all others, [b]."""
        count = anchors.positive.new_full((len(anchors),), queue.filled)
        if not self.needs_ids or anchors.ids is None:
            return None, count
        own = anchors.ids[:, None] == queue.ids[: queue.filled]
        return own, count - own.sum(1, dtype=count.dtype)

    def _products(self, scaled: Tensor, features: Tensor, own: Tensor | None) -> Tensor:
        """e_i . x_j / tau, [sides, b, filled], in a buffer; low where x_j is of the anchor's own sample."""
        shape = (len(scaled), scaled.shape[1], features.shape[1])
        z = torch.bmm(scaled, features.transpose(1, 2), out=self.workspace.take("products", shape, like=features))
        return z if own is None else z.masked_fill_(own, _EXCLUDED)
