"""The normalizer-prediction network (NPN) with its state: restarts, queue, inner optimizer.

Every rank computes the same update from the gathered features: no communication, the same bits on the same hardware.
With `npn_update = sharded` the ranks share the work instead and sum its gradients: the same bits on every rank, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.objectives.base import ObjectiveContext
from pipeline.objectives.npn import prototypes
from pipeline.objectives.npn.inner_optimizer import AdaGrad, Adam, Buffered, InnerOptimizer
from pipeline.objectives.npn.kernels import COMPILED, FUSED, Passes, Prototypes, UnitGradient
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.softmax import AnchorBatch, Pair
from pipeline.objectives.workspace import Workspace

BothSides = tuple[Anchors, Anchors]


@dataclass(frozen=True)
class Prediction:
    """Log-normalizers of the batch's anchors, [B] each: those to use, and those before the inner updates (`cold`)."""

    alpha: Pair
    cold: Pair


class Npn(ABC):
    """A pair of networks that predict log-normalizers. What `advance` does is pending until `commit`."""

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        self.config, self.context, self.workspace = config, context, Workspace()
        self.optimizer: InnerOptimizer = (
            AdaGrad(config.npn_lr) if config.npn_optimizer == "adagrad" else Adam(config.npn_lr)
        )

    @abstractmethod
    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        """Restart if due, update on this batch, predict."""

    @abstractmethod
    def predict(self, anchors: BothSides) -> Pair:
        """Log-normalizers from the lasting networks alone, [B] each."""

    @abstractmethod
    def commit(self, batch: AnchorBatch) -> None:
        """Make what `advance` did on this batch lasting."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The lasting tensors themselves, by name."""

    @abstractmethod
    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d alpha / d (own feature [b, d], partner's feature [b, d], tau [b]) of the prediction in use."""

    def metrics(self) -> dict[str, Tensor]:
        return {}


class PrototypeNpn(Npn):
    """Two sets of m prototypes, W1 for image anchors and W2 for text anchors, stacked as [2, m, d].

    The first batch fills min(m, B) prototypes with its own features (W1 with texts, W2 with images). While fewer than m
    are live, each batch adds its features as further prototypes: repeating features to reach m at once would be m = B
    for ever, because equal prototypes get equal gradients. On a restart all prototypes are overwritten with the newest
    m features, the current batch among them; with m < B with a seeded random subset of the batch, the same indices for
    both sides and on every rank. The optimizer's memory is kept over restarts unless `reset_accumulator`.
    """

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        super().__init__(config, context)
        m, dim = config.prototypes, context.dim
        weight = torch.zeros((2, m, dim), dtype=context.dtype, device=context.device)
        self.state = Buffered({"weight": weight} | {slot: torch.zeros_like(weight) for slot in self.optimizer.slots})
        queue_length = m if m > context.batch_size or config.restart_with == "previous" else 0
        self.queue = weight.new_zeros((2, queue_length, dim))
        # Host tensors: prototypes in use; features ever written to the queue; inner updates the optimizer remembers.
        self.live, self.queued, self.updates = (torch.zeros((), dtype=torch.int64) for _ in range(3))
        self._next_live = self._next_updates = 0
        self._held_back: list[UnitGradient] = []

    @property
    def inner_steps(self) -> int:
        return 0 if self.config.npn == "queue" else int(self.config.inner_steps)

    @property
    def passes(self) -> Passes:
        """Compiled only once all prototypes are live: one program for one shape, the same after resuming."""
        return COMPILED if self.config.npn_compile and self._next_live == self.config.prototypes else FUSED

    @property
    def sharded(self) -> bool:
        return bool(self.config.npn_update == "sharded" and self.context.world.size > 1)

    def restarts_at(self, step: int) -> bool:
        every = 1 if self.config.npn == "queue" else self.config.restart_every
        return int(self.live) == 0 or (every > 0 and step % every == 0)

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self._next_updates, self._held_back = int(self.updates), []
        self._next_live = self._fill(batch)
        seen = (anchors[0].take(batch.rows), anchors[1].take(batch.rows)) if self.sharded else anchors
        cold, alpha = [], []
        for side in (0, 1):
            at, first = self._inner_updates(side, seen[side])
            full = seen[side].full_precision()
            if at.directions.dtype != at.weight.dtype:
                at = self._prepare(full, at.weight)
            used = prototypes.log_normalizer(full, at, workspace=self.workspace, passes=self.passes)
            alpha.append(used)
            cold.append(used if first is None else first)
        self._next_updates += self.inner_steps
        if self.sharded:
            alpha[0], alpha[1], cold[0], cold[1] = self.context.world.all_gather(torch.stack(alpha + cold, 1)).unbind(1)
        return Prediction((alpha[0], alpha[1]), (cold[0], cold[1]))

    def predict(self, anchors: BothSides) -> Pair:
        live = int(self.live)
        if not live:
            raise RuntimeError("there are no prototypes before the first committed step")
        weight = self.state.lasting["weight"][:, :live]
        full, space = [side.full_precision() for side in anchors], Workspace()
        first, second = (
            prototypes.log_normalizer(full[s], prototypes.prepare(full[s], weight[s], space), workspace=space)
            for s in (0, 1)
        )
        return first, second

    def weight(self, side: int) -> Tensor:
        """The live prototypes of one side after `advance`, [m, d]."""
        return self.state.working["weight"][side, : self._next_live]

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return prototypes.alpha_slopes(anchors, self.weight(side), partners_bd)

    def metrics(self) -> dict[str, Tensor]:
        return {"prototype_norm": torch.stack([self.weight(side).norm(dim=1).mean() for side in (0, 1)]).mean()}

    def commit(self, batch: AnchorBatch) -> None:
        for side, gradient in enumerate(self._held_back):
            self._updated(side, gradient, number=self._next_updates).write_to(gradient.at.weight)
        self._held_back = []
        self.state.commit()
        self.live.fill_(self._next_live)
        self.updates.fill_(self._next_updates)
        if self.queue.shape[1]:
            self._push(self.queue, batch)
            self.queued += min(batch.size, self.queue.shape[1])

    def tensors(self) -> dict[str, Tensor]:
        counters = {"queue": self.queue, "live": self.live, "queued": self.queued, "updates": self.updates}
        return {f"npn.{name}": tensor for name, tensor in (self.state.lasting | counters).items()}

    def _inner_updates(self, side: int, anchors: Anchors) -> tuple[Prototypes, Tensor | None]:
        """Make the updates of a step on these prototypes. Returns: them; alpha before the first, if there are any."""
        first, weight = None, self.weight(side)
        at = self._prepare(anchors, weight)
        for inner in range(self.inner_steps):
            gradient, alpha = self._gradient(anchors, at)
            first = alpha if first is None else first
            if self.config.npn_schedule == "simultaneous":
                self._held_back.append(gradient.clone())
            else:
                at = self._updated(side, gradient, number=self._next_updates + inner + 1)
        at.write_to(weight)
        return at, first

    def _prepare(self, anchors: Anchors, weight_md: Tensor) -> Prototypes:
        return prototypes.prepare(anchors, weight_md, self.workspace, self.passes)

    def _gradient(self, anchors: Anchors, at: Prototypes) -> tuple[UnitGradient, Tensor]:
        """The gradient of the mean over all ranks' anchors, and alpha of those given."""
        gradient, alpha = prototypes.unit_gradient(
            anchors, at, objective=self.config.npn_objective, workspace=self.workspace, passes=self.passes
        )
        if self.sharded:
            total = self.context.world.all_reduce(gradient.product.to(at.weight.dtype))
            gradient = UnitGradient(total.div_(self.context.world.size), at)
        return gradient, alpha

    def _updated(self, side: int, gradient: UnitGradient, *, number: int) -> Prototypes:
        slots = {slot: self.state.working[slot][side, : self._next_live] for slot in self.optimizer.slots}
        after = self.passes.descend(gradient, slots, optimizer=self.optimizer, number=number, space=self.workspace)
        if not self.config.renormalize:
            return after
        unit = after.weight.div_(after.weight.norm(dim=1, keepdim=True))
        return self.passes.prepare(unit, after.tau, dtype=after.directions.dtype, space=self.workspace)

    def _fill(self, batch: AnchorBatch) -> int:
        """Fill the working buffers for this step; returns the number of live prototypes."""
        self.state.begin()
        m, live, weight = self.config.prototypes, int(self.live), self.state.working["weight"]
        from_queue = self.config.restart_with == "previous" and int(self.queued) > 0
        if not self.restarts_at(batch.step):
            return self._grow(batch, live=live, from_queue=from_queue)
        if self.config.reset_accumulator and live:
            self._next_updates = 0
            for slot in self.optimizer.slots:
                self.state.working[slot].zero_()
        if from_queue:
            weight.copy_(self.queue)
            return min(m, int(self.queued))
        if m <= batch.size:
            chosen = self._subset(batch)
            for side in (0, 1):
                weight[side] = batch.features[1 - side][chosen]
            return m
        if not self.queue.shape[1]:  # a batch smaller than the run's: grow from it
            return self._grow(batch, live=0, from_queue=False)
        weight.copy_(self.queue)
        self._push(weight, batch)
        return min(m, int(self.queued) + batch.size)

    def _grow(self, batch: AnchorBatch, *, live: int, from_queue: bool) -> int:
        """Add features as further prototypes while fewer than m are live."""
        m, weight = self.config.prototypes, self.state.working["weight"]
        if from_queue:
            ready = max(live, min(m, int(self.queued)))
            weight[:, live:ready] = self.queue[:, live:ready]
            return ready
        added = min(m - live, batch.size)
        for side in (0, 1):
            weight[side, live : live + added] = batch.features[1 - side][:added]
        return live + added

    def _push(self, buffer: Tensor, batch: AnchorBatch) -> None:
        """Write the batch over the oldest entries of a ring [2, m, d] that stands where the queue stands."""
        m, start, count = buffer.shape[1], int(self.queued) % buffer.shape[1], min(batch.size, buffer.shape[1])
        head = min(count, m - start)
        for side in (0, 1):
            features = batch.features[1 - side]
            buffer[side, start : start + head] = features[:head]
            buffer[side, : count - head] = features[head:count]

    def _subset(self, batch: AnchorBatch) -> Tensor | slice:
        if self.config.prototypes == batch.size:
            return slice(None)
        generator = torch.Generator().manual_seed((self.context.seed * 0x9E3779B97F4A7C15 + batch.step) % 2**63)
        chosen = torch.randperm(batch.size, generator=generator)[: self.config.prototypes]
        if self.context.device.type == "cuda":
            chosen = chosen.pin_memory()  # a copy that nobody waits for
        return chosen.to(self.context.device, non_blocking=True)


def anchors_of(batch: AnchorBatch, config: Any, *, tau: Tensor) -> BothSides:
    """The batch's two sides as an NPN sees them."""
    log_eps = math.log(config.eps)
    low = config.npn_precision == "bf16" or (config.npn_precision == "auto" and batch.positive.is_cuda)
    first, second = (
        Anchors(
            features=batch.features[side],
            positive=batch.positive,
            log_target=torch.logaddexp(batch.log_g[side], batch.log_g[side].new_full((), log_eps)),
            tau=tau,
            log_eps=log_eps,
            low=batch.features[side].bfloat16() if low else None,
        )
        for side in (0, 1)
    )
    return first, second
