"""The NPN as a component of the objective: its state, restarts, queue and inner updates.

Every rank computes the same update from the gathered features: no communication, and bit-identical networks. With
`npn_update = sharded` each rank computes a share of it, and the ranks sum the gradients: bit-identical networks as
well.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.npn import prototypes
from pipeline.objectives.npn.kernels import COMPILED, FUSED, Passes, Prototypes, UnitGradient
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.optimizers import AdaGrad, Adam
from pipeline.objectives.replicated_network import ReplicatedNetwork
from pipeline.objectives.softmax import AnchorBatch, Component
from pipeline.objectives.workspace import Workspace

BothSides = tuple[Anchors, Anchors]


@dataclass(frozen=True)
class Prediction:
    """Log-normalizers of the batch's anchors, [B] each."""

    alpha: Pair
    """To be used."""
    cold: Pair
    """From before the inner updates."""


class Npn(Component):
    """A network per side that predicts log-normalizers. The effect of `advance` is pending until `commit`.

    Args:
        config: A `NeuClipConfig`.
        context: The facts of the run.
        parameters: Initial parameters of both sides, [2, ...] each.
        slot_name: See `ReplicatedNetwork`.
    """

    def __init__(
        self,
        config: Any,
        context: ObjectiveContext,
        parameters: dict[str, Tensor],
        *,
        slot_name: str = "{parameter}.{slot}",
    ) -> None:
        self.config, self.context = config, context
        optimizer = AdaGrad(config.npn_lr) if config.npn_optimizer == "adagrad" else Adam(config.npn_lr)
        self.network = ReplicatedNetwork(parameters, optimizer, slot_name=slot_name)

    @abstractmethod
    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        """Restart if due, update on this batch, predict."""

    @abstractmethod
    def predict(self, anchors: BothSides) -> Pair:
        """Log-normalizers from the lasting networks alone, [B] each."""

    @abstractmethod
    def commit(self, update: AnchorBatch) -> None:
        """Make what `advance` did on this batch lasting."""

    @abstractmethod
    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d alpha / d (own feature [b, d], partner's feature [b, d], tau [b]) of the prediction in use."""

    def metrics(self) -> dict[str, Tensor]:
        return {}

    def replicated_state(self) -> dict[str, Tensor]:
        return self.network.state()

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"npn_lr": self.config.npn_lr}


class PrototypeNpn(Npn):
    """Two sets of m prototypes, W1 for image anchors and W2 for text anchors, stacked as [2, m, d].

    The first batch fills min(m, B) prototypes with its own features (W1 with texts, W2 with images). While fewer than m
    are live, each batch adds its features as further prototypes: copies of features would be useless, because equal
    prototypes get equal gradients. A restart overwrites all prototypes with the newest m features, the current batch's
    included; with m < B with a seeded random subset of the batch, the same indices for both sides and on every rank.
    """

    def __init__(self, config: Any, context: ObjectiveContext) -> None:
        m, dim = config.prototypes, context.dim
        weight = torch.zeros((2, m, dim), dtype=context.dtype, device=context.device)
        super().__init__(config, context, {"weight": weight}, slot_name="{slot}")
        queue_length = m if m > context.batch_size or config.restart_with == "previous" else 0
        self.queue = weight.new_zeros((2, queue_length, dim))
        # On the host: prototypes in use; features ever written to the queue.
        self.live, self.queued = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        self.workspace = Workspace()
        self.inner_steps = 0 if config.npn == "queue" else config.inner_steps
        self.sharded = config.npn_update == "sharded" and context.world.size > 1
        self._next_live = 0
        self._held_back: list[UnitGradient] = []

    def restarts_at(self, step: int) -> bool:
        """Whether a step overwrites all prototypes."""
        every = 1 if self.config.npn == "queue" else self.config.restart_every
        return int(self.live) == 0 or (every > 0 and step % every == 0)

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self.network.begin()
        self._held_back = []
        self._next_live = self._fill(batch)
        seen = (anchors[0].take(batch.rows), anchors[1].take(batch.rows)) if self.sharded else anchors
        cold, alpha = [], []
        for side in (0, 1):
            at, first = self._inner_updates(side, seen[side])
            full = seen[side].full_precision()
            if at.directions.dtype != at.weight.dtype:
                at = self._prepare(full, at.weight)
            used = prototypes.log_normalizer(full, at, workspace=self.workspace, passes=self._passes)
            alpha.append(used)
            cold.append(used if first is None else first)
        self.network.next_updates += self.inner_steps
        if self.sharded:
            alpha[0], alpha[1], cold[0], cold[1] = self.context.world.all_gather(torch.stack(alpha + cold, 1)).unbind(1)
        return Prediction((alpha[0], alpha[1]), (cold[0], cold[1]))

    def predict(self, anchors: BothSides) -> Pair:
        live = int(self.live)
        if not live:
            raise RuntimeError("there are no prototypes before the first committed step")
        space, found = Workspace(), []
        for side in (0, 1):
            full, weight = anchors[side].full_precision(), self.network.lasting["weight"][side, :live]
            at = prototypes.prepare(full, weight, space)
            found.append(prototypes.log_normalizer(full, at, workspace=space))
        return found[0], found[1]

    def weight(self, side: int) -> Tensor:
        """The live prototypes of one side after `advance`, [m, d]."""
        return self.network.working["weight"][side, : self._next_live]

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return prototypes.alpha_slopes(anchors, self.weight(side), partners_bd)

    def metrics(self) -> dict[str, Tensor]:
        return {"prototype_norm": torch.stack([self.weight(side).norm(dim=1).mean() for side in (0, 1)]).mean()}

    def distributions(self) -> dict[str, Tensor]:
        weight = self.network.lasting["weight"][:, : int(self.live)]
        return {f"prototype_norm_for_{side}": weight[i].norm(dim=1) for i, side in enumerate(("image", "text"))}

    def commit(self, update: AnchorBatch) -> None:
        for side, gradient in enumerate(self._held_back):
            self._updated(side, gradient, number=self.network.next_updates).write_to(gradient.at.weight)
        self._held_back = []
        self.network.commit()
        self.live.fill_(self._next_live)
        if self.queue.shape[1]:
            self._push(self.queue, update)
            self.queued += min(update.size, self.queue.shape[1])

    def replicated_state(self) -> dict[str, Tensor]:
        queue = {"queue": self.queue, "live": self.live, "queued": self.queued}
        return self.network.state() | {f"npn.{name}": tensor for name, tensor in queue.items()}

    @property
    def _passes(self) -> Passes:
        """Compiled only once all prototypes are live, so that one program serves one shape, also after resuming."""
        return COMPILED if self.config.npn_compile and self._next_live == self.config.prototypes else FUSED

    def _inner_updates(self, side: int, anchors: Anchors) -> tuple[Prototypes, Tensor | None]:
        """The prototypes after a step's updates, and alpha before the first update, if there is any."""
        first, weight = None, self.weight(side)
        at = self._prepare(anchors, weight)
        for inner in range(self.inner_steps):
            gradient, alpha = self._gradient(anchors, at)
            first = alpha if first is None else first
            if self.config.npn_schedule == "simultaneous":
                self._held_back.append(gradient.clone())
            else:
                at = self._updated(side, gradient, number=self.network.next_updates + inner + 1)
        at.write_to(weight)
        return at, first

    def _prepare(self, anchors: Anchors, weight_md: Tensor) -> Prototypes:
        return prototypes.prepare(anchors, weight_md, self.workspace, self._passes)

    def _gradient(self, anchors: Anchors, at: Prototypes) -> tuple[UnitGradient, Tensor]:
        """The gradient of the mean over all ranks' anchors, and alpha of those given."""
        gradient, alpha = prototypes.unit_gradient(
            anchors, at, objective=self.config.npn_objective, workspace=self.workspace, passes=self._passes
        )
        if self.sharded:
            total = self.context.world.all_reduce(gradient.product.to(at.weight.dtype))
            gradient = UnitGradient(total.div_(self.context.world.size), at)
        return gradient, alpha

    def _updated(self, side: int, gradient: UnitGradient, *, number: int) -> Prototypes:
        """The prototypes after the optimizer's update `number`."""
        slots = {name: slot[: self._next_live] for name, slot in self.network.slots(side, "weight").items()}
        optimizer, space = self.network.optimizer, self.workspace
        after = self._passes.descend(gradient, slots, optimizer=optimizer, number=number, space=space)
        if not self.config.renormalize:
            return after
        unit = after.weight.div_(after.weight.norm(dim=1, keepdim=True))
        return self._passes.prepare(unit, after.tau, dtype=after.directions.dtype, space=space)

    def _fill(self, batch: AnchorBatch) -> int:
        """Write features to the working prototypes where a restart or growth is due; returns how many are live."""
        m, live, weight = self.config.prototypes, int(self.live), self.network.working["weight"]
        from_queue = self.config.restart_with == "previous" and int(self.queued) > 0
        if not self.restarts_at(batch.step):
            return self._grow(batch, live=live, from_queue=from_queue)
        if self.config.reset_accumulator and live:
            self.network.clear_slots()
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
        m, weight = self.config.prototypes, self.network.working["weight"]
        if from_queue:
            ready = max(live, min(m, int(self.queued)))
            weight[:, live:ready] = self.queue[:, live:ready]
            return ready
        added = min(m - live, batch.size)
        for side in (0, 1):
            weight[side, live : live + added] = batch.features[1 - side][:added]
        return live + added

    def _push(self, buffer: Tensor, batch: AnchorBatch) -> None:
        """Write the batch over the oldest entries of a ring, [2, m, d], at the queue's position."""
        m, start, count = buffer.shape[1], int(self.queued) % buffer.shape[1], min(batch.size, buffer.shape[1])
        head = min(count, m - start)
        for side in (0, 1):
            features = batch.features[1 - side]
            buffer[side, start : start + head] = features[:head]
            buffer[side, : count - head] = features[head:count]

    def _subset(self, batch: AnchorBatch) -> Tensor | slice:
        """Indices of m samples of the batch, drawn with the seed of this step."""
        if self.config.prototypes == batch.size:
            return slice(None)
        generator = torch.Generator().manual_seed((self.context.seed * 0x9E3779B97F4A7C15 + batch.step) % 2**63)
        chosen = torch.randperm(batch.size, generator=generator)[: self.config.prototypes]
        if self.context.device.type == "cuda":
            chosen = chosen.pin_memory()  # an asynchronous copy needs it
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
