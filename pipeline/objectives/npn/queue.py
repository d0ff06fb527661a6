"""The newest features of earlier batches: what restarts fill prototypes with, and an NPN without learning."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.npn.network import BothSides, Npn, NpnConfig, Prediction, register_npn
from pipeline.objectives.npn.prototypes import Anchors, mean_slopes, normalizer_of_mean
from pipeline.objectives.pairwise import Workspace, row_blocks
from pipeline.objectives.softmax import AnchorBatch

NO_SAMPLE = -(2**62)
"""The id of a place in the queue that is empty or whose sample is not known; no anchor has it."""
_EXCLUDED = -1e30
"""The exponent of an anchor's own sample: its exponential is 0, also where all exponents of a row are excluded."""


class FeatureQueue:
    """The newest m features of both sides, [2, m, d]: texts for image anchors, images for text anchors.

    Args:
        length: m; may be 0.
        context: The facts of the run.
        ids: Whether it holds the sample ids, too.
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

    def places(self, batch: AnchorBatch) -> list[tuple[int, slice]]:
        """Where the batch overwrites the oldest features: first place and the batch's rows, in two runs."""
        m = self.features.shape[1]
        start, count = int(self.written) % m, min(batch.size, m)
        head = min(count, m - start)
        return [(start, slice(0, head)), (0, slice(head, count))]

    def add(self, batch: AnchorBatch) -> None:
        """Overwrite the oldest features by the batch's."""
        if not self.features.shape[1]:
            return
        for start, rows in self.places(batch):
            end = start + rows.stop - rows.start
            for side in (0, 1):
                self.features[side, start:end] = batch.features[1 - side][rows]
            if len(self.ids) and batch.ids is not None:
                self.ids[start:end] = batch.ids[rows]
        self.written += min(batch.size, self.features.shape[1])

    def copy(self) -> FeatureQueue:
        """A queue of the same contents."""
        other = object.__new__(FeatureQueue)
        other.features, other.ids, other.written = self.features.clone(), self.ids.clone(), self.written.clone()
        return other

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
        self.workspace = Workspace()
        self._in_use = self.queue

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self._in_use = self.queue
        if self.config.restart_with == "current" or not self.queue.filled:
            self._in_use = self.queue.copy()
            self._in_use.add(batch)
        own = anchors[0].take(batch.rows), anchors[1].take(batch.rows)
        found = self.context.world.all_gather(self._means(own, self._in_use))
        alpha = found[:, 0], found[:, 1]
        return Prediction(alpha, alpha, prototypes=found[:, 2])

    def predict(self, anchors: BothSides) -> Pair:
        if not self.queue.filled:
            raise RuntimeError("there are no prototypes before the first committed step")
        found = self._means(anchors, self.queue)
        return found[:, 0], found[:, 1]

    def commit(self, update: AnchorBatch) -> None:
        self.queue.add(update)

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, excluded = self._in_use.features[side, : self._in_use.filled], self._own(anchors, self._in_use)
        z = self._products(anchors, features, excluded)
        weights, log_sum = torch.softmax(z, 1), z.logsumexp(1)
        _, share = normalizer_of_mean(log_sum, anchors, self._count(z, excluded))
        return mean_slopes(anchors, (weights @ features) * share[:, None], share, partners_bd)

    def replicated_state(self) -> dict[str, Tensor]:
        return self.queue.state()

    def added_state(self) -> dict[str, int]:
        return {"npn.queue_ids": NO_SAMPLE} if self.needs_ids else {}

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {}

    def _means(self, anchors: BothSides, queue: FeatureQueue) -> Tensor:
        """alpha of both sides and the number of features it is a mean over, [b, 3]."""
        found = []
        for rows in row_blocks(len(anchors[0]), queue.filled, device=queue.features.device):
            parts = anchors[0].take(rows), anchors[1].take(rows)
            excluded, alpha = self._own(parts[0], queue), []
            for side, part in enumerate(parts):
                z = self._products(part, queue.features[side, : queue.filled], excluded)
                count = self._count(z, excluded)
                top = z.amax(1)  # softmax is faster than logsumexp, and its largest value is exp(top) / sum
                log_sum = top - torch.softmax(z, 1, out=z).amax(1).log_()
                alpha.append(normalizer_of_mean(log_sum, part, count)[0])
            found.append(torch.stack([*alpha, count], 1))
        return torch.cat(found)

    def _own(self, anchors: Anchors, queue: FeatureQueue) -> Tensor | None:
        """Which features are of an anchor's own sample, [b, filled]; None: none is excluded."""
        if not self.needs_ids or anchors.ids is None:
            return None
        return anchors.ids[:, None] == queue.ids[None, : queue.filled]

    def _products(self, anchors: Anchors, features: Tensor, excluded: Tensor | None) -> Tensor:
        """e_i . x_j / tau, [b, filled], in a buffer; low where excluded."""
        out = self.workspace.take("products", (len(anchors), len(features)), like=features)
        z = torch.mm(anchors.features / anchors.tau, features.T, out=out)
        return z if excluded is None else z.masked_fill_(excluded, _EXCLUDED)

    @staticmethod
    def _count(z: Tensor, excluded: Tensor | None) -> Tensor:
        """How many features are not excluded, [b], in the precision of z."""
        count = z.new_full((len(z),), z.shape[1])
        return count if excluded is None else count - excluded.sum(1, dtype=z.dtype)
