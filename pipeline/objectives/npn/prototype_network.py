"""The NPN of prototypes: its state, restarts, queue and inner updates.

Every rank has the gathered features. With `npn_update = replicated` each computes the whole update: no communication,
bit-identical networks. With `prototypes` each rank owns and updates its share of the prototypes, and the ranks add up
the anchors' sums, B scalars per update.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives.base import ObjectiveContext, Pair
from pipeline.objectives.npn import prototypes
from pipeline.objectives.npn.kernels import COMPILED, FUSED, Passes, Prototypes, UnitGradient
from pipeline.objectives.npn.network import BothSides, Npn, NpnConfig, Prediction, register_npn
from pipeline.objectives.npn.prototypes import LEAST_TAU, Anchors, Division, Samples
from pipeline.objectives.pairwise import Workspace, sent
from pipeline.objectives.softmax import AnchorBatch

NO_SAMPLE = -(2**62)
"""The id of a prototype whose sample is not known; no anchor has it."""


@register_npn("prototypes")
class PrototypeNpn(Npn):
    """Two sets of m prototypes, W1 for image anchors and W2 for text anchors, stacked as [2, m, d].

    The first batch fills min(m, B) prototypes with its own features (W1 with texts, W2 with images). While fewer than m
    are live, each batch adds its features as further prototypes: copies of features would be useless, because equal
    prototypes get equal gradients. A restart overwrites all prototypes with the newest m features, the current batch's
    included; with m < B with a seeded random subset of the batch, the same indices for both sides and on every rank.

    Prototypes that are features of earlier batches and do not learn (`QueueNpn`, `restart_with` previous) keep their
    sample ids, and those of an anchor's own sample are excluded from its mean: the stale positive is no negative.
    """

    is_mean = True
    learns: ClassVar[bool] = True
    """Whether updates move the prototypes."""

    def __init__(self, config: NpnConfig, context: ObjectiveContext) -> None:
        m, dim, world = config.prototypes, context.dim, context.world
        update = update_mode(config, world)
        self.divided = update == "prototypes"
        self._ranks = world if self.divided else World()
        rows = -(-m // self._ranks.size)
        weight = torch.zeros((2, rows, dim), dtype=context.dtype, device=context.device)
        super().__init__(config, context, {"weight": weight}, slot_name="{slot}")
        queue_length = m if m > context.batch_size or config.restart_with == "previous" else 0
        self.queue = weight.new_zeros((2, queue_length, dim))
        self.needs_ids = not self.learns and config.restart_with == "previous"
        self.queue_ids, self.prototype_ids = (
            torch.full((length if self.needs_ids else 0,), NO_SAMPLE, dtype=torch.int64, device=context.device)
            for length in (queue_length, m)
        )
        self._next_ids = self.prototype_ids
        # On the host: prototypes in use; features ever written to the queue.
        self.live, self.queued = (torch.zeros((), dtype=torch.int64) for _ in range(2))
        self.workspace = Workspace()
        self.inner_steps = config.inner_steps if self.learns else 0
        self._next_live = 0
        self._division: Division | None = None
        self._passes: Passes = FUSED
        self._held_back: list[UnitGradient] = []
        if self.learns and world.is_main:
            _warn_of_stalling(config, dim)

    def restarts(self, step: int) -> bool:
        return self.config.restart_every > 0 and step % self.config.restart_every == 0

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self.network.begin()
        self._held_back = []
        self._next_ids = self.prototype_ids.clone()
        self._next_live = self._fill(batch)
        self._division = self._share(self._next_live) if self.divided else None
        # Compiled only once all prototypes are live, so that one program serves one shape, also after resuming.
        compiled = self.config.npn_compile and self._next_live == self.config.prototypes
        self._passes = COMPILED if compiled else FUSED
        samples = self._samples(self._next_ids, live=self._next_live)
        cold, alpha = [], []
        for side in (0, 1):
            at, first = self._inner_updates(side, anchors[side])
            full = anchors[side].full_precision()
            if at.directions.dtype != at.weight.dtype:
                at = prototypes.prepare(full, at.weight, self.workspace, self._passes)
            used = prototypes.log_normalizer(
                full,
                at,
                workspace=self.workspace,
                passes=self._passes,
                division=self._division,
                samples=samples,
            )
            alpha.append(used)
            cold.append(used if first is None else first)
        self.network.next_updates += self.inner_steps
        count: int | Tensor = self._next_live
        if samples is not None and batch.ids is not None:
            count = samples.others(batch.ids)
        return Prediction((alpha[0], alpha[1]), (cold[0], cold[1]), prototypes=count)

    def predict(self, anchors: BothSides) -> Pair:
        live = int(self.live)
        if not live:
            raise RuntimeError("there are no prototypes before the first committed step")
        space, found = Workspace(), []
        ids = self.prototype_ids[:live]
        samples = Samples(ids, ids) if self.needs_ids else None
        for side in (0, 1):
            full, weight = anchors[side].full_precision(), self._whole(self.network.lasting["weight"][side], live)
            at = prototypes.prepare(full, weight, space)
            found.append(prototypes.log_normalizer(full, at, workspace=space, samples=samples))
        return found[0], found[1]

    def weight(self, side: int) -> Tensor:
        """This rank's live prototypes of one side after `advance`; all of them, [m, d], unless they are divided."""
        return self.network.working["weight"][side, : self._share(self._next_live).rows]

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self._whole(self.network.working["weight"][side], self._next_live)
        ids = self._next_ids[: self._next_live]
        samples = Samples(ids, ids) if self.needs_ids else None
        return prototypes.alpha_slopes(anchors, weight, partners_bd, samples=samples)

    def metrics(self) -> dict[str, Tensor]:
        norms = [self.weight(side).norm(dim=1) for side in (0, 1)]
        if self.divided:
            mean = self._ranks.all_reduce(torch.stack([norm.sum() for norm in norms]).sum()) / (2 * self._next_live)
        else:
            mean = torch.stack([norm.mean() for norm in norms]).mean()
        return {"prototype_norm": mean}

    def distributions(self) -> dict[str, Tensor]:
        weight = self.network.lasting["weight"][:, : self._share(int(self.live)).rows]
        return {f"prototype_norm_for_{side}": weight[i].norm(dim=1) for i, side in enumerate(("image", "text"))}

    def commit(self, update: AnchorBatch) -> None:
        for side, gradient in enumerate(self._held_back):
            self._updated(side, gradient, number=self.network.next_updates).write_to(gradient.at.weight)
        self._held_back = []
        self.network.commit()
        self.prototype_ids.copy_(self._next_ids)
        self.live.fill_(self._next_live)
        if self.queue.shape[1]:
            for start, rows in self._ring(update):
                for side in (0, 1):
                    features = update.features[1 - side][rows]
                    self.queue[side, start : start + len(features)] = features
                if update.ids is not None:
                    self.queue_ids[start : start + rows.stop - rows.start] = update.ids[rows]
            self.queued += min(update.size, self.queue.shape[1])

    def replicated_state(self) -> dict[str, Tensor]:
        queue = {"queue": self.queue, "live": self.live, "queued": self.queued}
        if self.needs_ids:
            queue |= {"queue_ids": self.queue_ids, "prototype_ids": self.prototype_ids}
        network = {name: tensor for name, tensor in self.network.state().items() if name not in self.own_state()}
        return network | {f"npn.{name}": tensor for name, tensor in queue.items()}

    def added_state(self) -> dict[str, int]:
        return dict.fromkeys(("npn.queue_ids", "npn.prototype_ids"), NO_SAMPLE) if self.needs_ids else {}

    def own_state(self) -> dict[str, Tensor]:
        """This rank's share of the tensors that are divided among the ranks."""
        return {f"npn.{name}": tensor for name, tensor in self.network.lasting.items()} if self.divided else {}

    def gathered_state(self) -> dict[str, Tensor]:
        m = self.config.prototypes
        return {
            name: torch.stack([self._whole(side, m) for side in tensor]) for name, tensor in self.own_state().items()
        }

    def divide_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.own_state().items():
            for side in (0, 1):
                rows, mine = self._share(self.config.prototypes).own(0, state[name][side])
                tensor[side, rows] = mine

    def _share(self, live: int) -> Division:
        return Division(self._ranks, live)

    def _samples(self, ids: Tensor, *, live: int) -> Samples | None:
        """The samples of the live prototypes, if these are excluded; ids: of all prototypes, [m]."""
        if not self.needs_ids:
            return None
        return Samples(self._share(live).own(0, ids[:live])[1], ids[:live])

    def _whole(self, own: Tensor, count: int) -> Tensor:
        """The first `count` prototypes of all ranks, [count, d], from this rank's share; collective if divided."""
        return self._share(count).whole(own[: -(-count // self._ranks.size)], count=count)

    def _inner_updates(self, side: int, anchors: Anchors) -> tuple[Prototypes, Tensor | None]:
        """The prototypes after a step's updates, and alpha before the first update, if there is any."""
        first, weight = None, self.weight(side)
        at = prototypes.prepare(anchors, weight, self.workspace, self._passes)
        for inner in range(self.inner_steps):
            gradient, alpha = prototypes.unit_gradient(
                anchors,
                at,
                objective=self.config.npn_objective,
                workspace=self.workspace,
                passes=self._passes,
                division=self._division,
            )
            first = alpha if first is None else first
            if self.config.npn_schedule == "simultaneous":
                self._held_back.append(gradient.clone())
            else:
                at = self._updated(side, gradient, number=self.network.next_updates + inner + 1)
        at.write_to(weight)
        return at, first

    def _updated(self, side: int, gradient: UnitGradient, *, number: int) -> Prototypes:
        """The prototypes after the optimizer's update `number`."""
        slots = {name: slot[: len(gradient.at.weight)] for name, slot in self.network.slots(side, "weight").items()}
        optimizer, space = self.network.optimizer, self.workspace
        after = self._passes.descend(gradient, slots, optimizer=optimizer, number=number, space=space)
        if not self.config.renormalize:
            return after
        unit = after.weight.div_(after.weight.norm(dim=1, keepdim=True))
        return self._passes.prepare(unit, after.tau, dtype=after.directions.dtype, space=space)

    def _fill(self, batch: AnchorBatch) -> int:
        """Write features to the working prototypes where a restart or growth is due; returns how many are live."""
        m, live = self.config.prototypes, int(self.live)
        from_queue = self.config.restart_with == "previous" and int(self.queued) > 0
        if live and not self.restarts(batch.step) and self.learns:
            return self._grow(batch, live=live, from_queue=from_queue)
        if self.config.reset_accumulator and live:
            self.network.clear_slots()
        if from_queue:
            self._write(0, (self.queue[0], self.queue[1]), self.queue_ids)
            return min(m, int(self.queued))
        partners = (batch.features[1], batch.features[0])
        if m <= batch.size:
            chosen = self._subset(batch)
            self._write(0, (partners[0][chosen], partners[1][chosen]), None if batch.ids is None else batch.ids[chosen])
            return m
        if not self.queue.shape[1]:  # a batch smaller than the run's: grow from it
            return self._grow(batch, live=0, from_queue=False)
        self._write(0, (self.queue[0], self.queue[1]), self.queue_ids)
        for start, rows in self._ring(batch):
            ids = None if batch.ids is None else batch.ids[rows]
            self._write(start, (partners[0][rows], partners[1][rows]), ids)
        return min(m, int(self.queued) + batch.size)

    def _write(self, start: int, features: Pair, ids: Tensor | None) -> None:
        """Overwrite the working prototypes `start`, `start + 1`, ... of both sides; each rank takes its own share."""
        if self.needs_ids and ids is not None:
            self._next_ids[start : start + len(ids)] = ids
        for side in (0, 1):
            rows, mine = self._share(self.config.prototypes).own(start, features[side])
            self.network.working["weight"][side, rows] = mine

    def _grow(self, batch: AnchorBatch, *, live: int, from_queue: bool) -> int:
        """Add features as further prototypes while fewer than m are live."""
        m = self.config.prototypes
        if from_queue:
            ready = max(live, min(m, int(self.queued)))
            newest = slice(live, ready)
            self._write(live, (self.queue[0, newest], self.queue[1, newest]), self.queue_ids[newest])
            return ready
        added = min(m - live, batch.size)
        ids = None if batch.ids is None else batch.ids[:added]
        self._write(live, (batch.features[1][:added], batch.features[0][:added]), ids)
        return live + added

    def _ring(self, batch: AnchorBatch) -> list[tuple[int, slice]]:
        """Where the batch overwrites the oldest entries of the queue: first entry and the batch's rows, in two runs."""
        m = self.queue.shape[1]
        start, count = int(self.queued) % m, min(batch.size, m)
        head = min(count, m - start)
        return [(start, slice(0, head)), (0, slice(head, count))]

    def _subset(self, batch: AnchorBatch) -> Tensor | slice:
        """Indices of m samples of the batch, drawn with the seed of this step."""
        if self.config.prototypes == batch.size:
            return slice(None)
        generator = torch.Generator().manual_seed((self.context.seed * 0x9E3779B97F4A7C15 + batch.step) % 2**63)
        chosen = torch.randperm(batch.size, generator=generator)[: self.config.prototypes]
        return sent(chosen, self.context.device)


@register_npn("queue")
class QueueNpn(PrototypeNpn):
    """Prototypes that are the newest features in every step, without learning."""

    learns = False

    def restarts(self, step: int) -> bool:
        return False


def _warn_of_stalling(config: NpnConfig, dim: int) -> None:
    """AdaGrad's first step turns a prototype by about lr sqrt(d): 0.02 to 0.08 did best at d = 64, 8 could stall."""
    turn = config.npn_lr * math.sqrt(dim)
    if config.npn_optimizer == "adagrad" and config.inner_steps > 0 and turn > 0.5:
        warnings.warn(
            f"objective.npn_lr = {config.npn_lr} turns each prototype by about {turn:.1f} times its own length in a "
            "first AdaGrad step: training can stall. The default of 0.01 does not.",
            stacklevel=5,
        )


def update_mode(config: NpnConfig, world: World) -> str:
    """How the ranks compute an update: `prototypes` or `replicated`.

    Raises:
        UserError: `npn_update` is `prototypes`, and the prototypes cannot be divided among these ranks.
    """
    if world.size == 1:
        return "replicated"
    possible = config.prototypes >= world.size and config.tau_min >= LEAST_TAU
    if config.npn_update == "auto":
        return "prototypes" if possible else "replicated"
    if config.npn_update == "prototypes" and not possible:
        raise UserError(
            f"objective.npn_update = prototypes needs at least one prototype per rank (objective.prototypes = "
            f"{config.prototypes}, {world.size} ranks) and objective.tau_min >= {LEAST_TAU} (given {config.tau_min}): "
            "use objective.npn_update=replicated."
        )
    return str(config.npn_update)
