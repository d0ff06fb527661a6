"""The normalizer-prediction network (NPN) of prototypes with its state: restarts, queue and AdaGrad.

Every rank computes the same update from the gathered features: no communication, the same bits on the same hardware.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.objectives import prototypes
from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.frame import Batch, Pair
from pipeline.objectives.npn_config import NpnConfig

_ADAGRAD_EPS = 1e-10


@dataclass(frozen=True)
class Prediction:
    """Log-normalizers of the batch's anchors, [B] each: after the inner updates, and before them (`cold`)."""

    alpha: Pair
    cold: Pair


class PrototypeNpn:
    """Two sets of m prototypes, W1 for image anchors and W2 for text anchors, stacked as [2, m, d].

    The first batch fills min(m, B) prototypes with its own features (W1 with texts, W2 with images). While fewer than m
    are live, each batch adds its features as further prototypes: repeating features to reach m at once would be m = B
    for ever, because equal prototypes get equal gradients. On a restart all prototypes are overwritten with the newest
    m features, the current batch among them; with m < B with a seeded random subset of the batch, the same indices for
    both sides and on every rank. AdaGrad's accumulator is kept over restarts unless `reset_accumulator`.

    `advance` works on a second set of buffers; `commit` swaps them in, `discard` forgets them.
    """

    def __init__(self, config: NpnConfig, context: ObjectiveContext) -> None:
        self.config, self.context = config, context
        shape = (2, config.prototypes, context.dim)
        self.weight = torch.zeros(shape, dtype=context.dtype, device=context.device)
        self.accumulator, self._next_weight, self._next_accumulator = (torch.zeros_like(self.weight) for _ in range(3))
        queue_length = config.prototypes if config.prototypes > context.batch_size else 0
        self.queue = self.weight.new_zeros((2, queue_length, context.dim))
        # Host tensors: prototypes in use; features ever written to the queue.
        self.live, self.queued = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        self._next_live = 0

    def advance(self, batch: Batch, anchors: tuple[prototypes.Anchors, prototypes.Anchors]) -> Prediction:
        """Restart or grow if due, run the inner updates on this batch, predict; all pending until `commit`."""
        self._next_live = self._fill(batch)
        cold, alpha = [], []
        for side in (0, 1):
            weight = self._next_weight[side, : self._next_live]
            accumulator = self._next_accumulator[side, : self._next_live]
            first: Tensor | None = None
            for _ in range(self.config.inner_steps):
                gradient, before = prototypes.loss_gradient(anchors[side], weight)
                first = before if first is None else first
                _adagrad(weight, accumulator, gradient, lr=self.config.npn_lr)
            alpha.append(prototypes.log_normalizer(anchors[side], weight))
            cold.append(alpha[-1] if first is None else first)
        return Prediction((alpha[0], alpha[1]), (cold[0], cold[1]))

    def pending_weight(self, side: int) -> Tensor:
        """The live prototypes of one side after `advance`, [m, d]."""
        return self._next_weight[side, : self._next_live]

    def commit(self, batch: Batch) -> None:
        self.weight, self._next_weight = self._next_weight, self.weight
        self.accumulator, self._next_accumulator = self._next_accumulator, self.accumulator
        self.live.fill_(self._next_live)
        if self.queue.shape[1]:
            self._push(self.queue, batch)
            self.queued += min(batch.size, self.queue.shape[1])

    def tensors(self) -> dict[str, Tensor]:
        """The lasting tensors themselves, by name."""
        return {
            "npn.weight": self.weight,
            "npn.accumulator": self.accumulator,
            "npn.queue": self.queue,
            "npn.live": self.live,
            "npn.queued": self.queued,
        }

    def _fill(self, batch: Batch) -> int:
        """Fill the working buffers for this step; returns the number of live prototypes."""
        m, live = self.config.prototypes, int(self.live)
        every = self.config.restart_every
        restart = live == 0 or (every > 0 and batch.step % every == 0)
        self._next_accumulator.copy_(self.accumulator)
        if not restart:
            self._next_weight.copy_(self.weight)
            added = min(m - live, batch.size)
            for side in (0, 1):
                self._next_weight[side, live : live + added] = batch.features[1 - side][:added]
            return live + added
        if self.config.reset_accumulator:
            self._next_accumulator.zero_()
        if m <= batch.size:
            chosen = self._subset(batch)
            for side in (0, 1):
                self._next_weight[side] = batch.features[1 - side][chosen]
            return m
        self._next_weight.copy_(self.queue)
        self._push(self._next_weight, batch)
        return min(m, int(self.queued) + batch.size)

    def _push(self, buffer: Tensor, batch: Batch) -> None:
        """Write the batch over the oldest entries of a ring [2, m, d] that stands where the queue stands."""
        m, start, count = buffer.shape[1], int(self.queued) % buffer.shape[1], min(batch.size, buffer.shape[1])
        head = min(count, m - start)
        for side in (0, 1):
            features = batch.features[1 - side]
            buffer[side, start : start + head] = features[:head]
            buffer[side, : count - head] = features[head:count]

    def _subset(self, batch: Batch) -> Tensor | slice:
        if self.config.prototypes == batch.size:
            return slice(None)
        generator = torch.Generator().manual_seed((self.context.seed * 0x9E3779B97F4A7C15 + batch.step) % 2**63)
        return torch.randperm(batch.size, generator=generator)[: self.config.prototypes].to(self.context.device)


def _adagrad(weight: Tensor, accumulator: Tensor, gradient: Tensor, *, lr: float) -> None:
    accumulator.addcmul_(gradient, gradient)
    weight.addcdiv_(gradient, accumulator.sqrt().add_(_ADAGRAD_EPS), value=-lr)


def anchors_of(batch: Batch, *, eps: float) -> tuple[prototypes.Anchors, prototypes.Anchors]:
    """The batch's two sides as an NPN sees them."""
    log_eps = math.log(eps)
    first, second = (
        prototypes.Anchors(
            features=batch.features[side],
            positive=batch.positive,
            log_target=torch.logaddexp(batch.log_g[side], batch.log_g[side].new_tensor(log_eps)),
            tau=batch.tau[side],
            log_eps=log_eps,
        )
        for side in (0, 1)
    )
    return first, second
