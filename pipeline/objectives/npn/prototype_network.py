"""The NPN of prototypes: its state, restarts and inner updates.

Every rank has the gathered features. With `npn_update = replicated` each computes the whole update: no communication,
bit-identical networks. With `prototypes` each rank owns and updates its share of the prototypes, and the ranks add up
the anchors' sums, B scalars per update.
"""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.distributed.devices import to_device
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives.npn import prototypes
from pipeline.objectives.npn.kernels import (
    LEAST_TAU,
    CompiledPasses,
    Division,
    Passes,
    Prototypes,
    why_not_compiled,
)
from pipeline.objectives.npn.network import BothSides, Npn, NpnConfig, Prediction, register_npn
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.npn.queue import FeatureQueue
from pipeline.objectives.pairwise import Workspace
from pipeline.objectives.registry import ObjectiveContext, Pair
from pipeline.objectives.softmax import AnchorBatch

log = logging.getLogger(__name__)
WORTH_COMPILING = 2000
"""Steps. Compiling took 6 s on an H200, and saved 3 ms a step there (ViT-B/32, 1,024 pairs and prototypes)."""


@register_npn("prototypes")
class PrototypeNpn(Npn):
    """Two sets of m prototypes, W1 for image anchors and W2 for text anchors, stacked as [2, m, d].

    The first batch fills min(m, B) prototypes with its own features (W1 with texts, W2 with images). While fewer than m
    are live, each batch adds its features as further prototypes: copies of features would be useless, because equal
    prototypes get equal gradients. A restart overwrites all prototypes with the newest m features, the current batch's
    included; with m < B with a seeded random subset of the batch, the same indices for both sides and on every rank.
    """

    is_mean = True

    def __init__(self, config: NpnConfig, context: ObjectiveContext) -> None:
        m, dim, world = config.prototypes, context.dim, context.world
        self.divided = is_divided(config, world)
        self._ranks = world if self.divided else World()
        self.compiled = is_compiled(config, context)
        rows = -(-m // self._ranks.size)
        weight = torch.zeros((2, rows, dim), dtype=context.dtype, device=context.device)
        super().__init__(config, context, {"weight": weight})
        self.queue = FeatureQueue(m if m > context.batch_size or config.restart_with == "previous" else 0, context)
        self.live, self._next_live = torch.zeros((), dtype=torch.int64), 0  # on the host: prototypes in use
        self.workspace = Workspace()
        self._passes = Passes(self.workspace)
        self._held_back: list[tuple[Tensor, Prototypes]] = []
        # AdaGrad's first step turns a prototype by about lr sqrt(d): 0.02 to 0.08 did best at d = 64, 8 could stall.
        turn = config.npn_lr * math.sqrt(dim)
        if world.is_main and config.npn_optimizer == "adagrad" and config.inner_steps > 0 and turn > 0.5:
            warnings.warn(
                f"objective.npn_lr = {config.npn_lr} turns each prototype by about {turn:.1f} times its own length in "
                "a first AdaGrad step: training can stall. The default of 0.01 does not.",
                stacklevel=4,
            )

    def advance(self, batch: AnchorBatch, anchors: BothSides) -> Prediction:
        self.network.begin()
        self._held_back = []
        self._next_live = self._fill(batch)
        division = Division(self._ranks, self._next_live) if self.divided else None
        # Compiled only once all prototypes are live, so that one program serves one shape, also after resuming.
        compiled = self.compiled and self._next_live == self.config.prototypes
        self._passes = (CompiledPasses if compiled else Passes)(self.workspace, division)
        cold, alpha = [], []
        for side in (0, 1):
            at, first = self._inner_updates(side, anchors[side])
            full = replace(anchors[side], low=None)
            if at.directions.dtype != at.weight.dtype:
                at = self._passes.prepare(at.weight, full.tau)
            used = prototypes.log_normalizer(full, at, passes=self._passes)
            alpha.append(used)
            cold.append(used if first is None else first)
        self.network.next_updates += self.config.inner_steps
        return Prediction((alpha[0], alpha[1]), (cold[0], cold[1]), prototypes=self._next_live)

    def predict(self, anchors: BothSides) -> Pair:
        live = int(self.live)
        if not live:
            raise RuntimeError("there are no prototypes before the first committed step")
        passes, parts = Passes(), []
        for side in (0, 1):
            full, weight = replace(anchors[side], low=None), self._whole(self.network.lasting["weight"][side], live)
            at = passes.prepare(weight, full.tau)
            parts.append(prototypes.log_normalizer(full, at, passes=passes))
        return parts[0], parts[1]

    def weight(self, side: int) -> Tensor:
        """This rank's live prototypes of one side after `advance`; all of them, [m, d], unless they are divided."""
        return self.network.working["weight"][side, : Division(self._ranks, self._next_live).rows]

    def slopes(self, side: int, anchors: Anchors, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = self._whole(self.network.working["weight"][side], self._next_live)
        return prototypes.alpha_slopes(anchors, weight, partners_bd)

    def metrics(self) -> dict[str, Tensor]:
        norms = [self.weight(side).norm(dim=1).sum() for side in (0, 1)]
        return {"prototype_norm": self._ranks.all_reduce(torch.stack(norms).sum()) / (2 * self._next_live)}

    def distributions(self) -> dict[str, Tensor]:
        weight = self.network.lasting["weight"][:, : Division(self._ranks, int(self.live)).rows]
        return {f"prototype_norm_for_{side}": weight[i].norm(dim=1) for i, side in enumerate(("image", "text"))}

    def commit(self, update: AnchorBatch) -> None:
        for side, (gradient, at) in enumerate(self._held_back):
            after = self._updated(side, gradient, at, number=self.network.next_updates)
            at.weight.copy_(after.weight)  # nothing to do if it was updated in place
        self._held_back = []
        self.network.commit()
        self.live.fill_(self._next_live)
        self.queue.add(update)

    def replicated_state(self) -> dict[str, Tensor]:
        state = self.network.replicated_state() | {"npn.live": self.live} | self.queue.state()
        return {name: tensor for name, tensor in state.items() if name not in self.own_state()}

    def own_state(self) -> dict[str, Tensor]:
        return {f"npn.{name}": tensor for name, tensor in self.network.lasting.items()} if self.divided else {}

    def gathered_state(self) -> dict[str, Tensor]:
        m = self.config.prototypes
        return {
            name: torch.stack([self._whole(side, m) for side in tensor]) for name, tensor in self.own_state().items()
        }

    def divide_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.own_state().items():
            for side in (0, 1):
                rows, mine = Division(self._ranks, self.config.prototypes).own(0, state[name][side])
                tensor[side, rows] = mine

    def _whole(self, own: Tensor, count: int) -> Tensor:
        """The first `count` prototypes of all ranks, [count, d], from this rank's share; collective if divided."""
        return Division(self._ranks, count).whole(own[: -(-count // self._ranks.size)], count=count)

    def _inner_updates(self, side: int, anchors: Anchors) -> tuple[Prototypes, Tensor | None]:
        """The prototypes after a step's updates, and alpha before the first update, if there is any."""
        first, weight = None, self.weight(side)
        dtype = None if anchors.low is None else anchors.low.dtype
        at = self._passes.prepare(weight, anchors.tau, dtype=dtype)
        for inner in range(self.config.inner_steps):
            objective = self.config.npn_objective
            gradient, alpha = prototypes.unit_gradient(anchors, at, objective=objective, passes=self._passes)
            first = alpha if first is None else first
            if self.config.npn_schedule == "simultaneous":
                self._held_back.append((gradient.clone(), replace(at, norms=at.norms.clone())))
            else:
                at = self._updated(side, gradient, at, number=self.network.next_updates + inner + 1)
        weight.copy_(at.weight)  # nothing to do if it was updated in place
        return at, first

    def _updated(self, side: int, gradient: Tensor, at: Prototypes, *, number: int) -> Prototypes:
        """The prototypes after the optimizer's update `number`."""
        slots = {name: slot[: len(at.weight)] for name, slot in self.network.slots(side, "weight").items()}
        return self._passes.descend(gradient, at, slots, optimizer=self.network.optimizer, number=number)

    def _fill(self, batch: AnchorBatch) -> int:
        """Write features to the working prototypes where a restart or growth is due; returns how many are live.

        A restart writes to all of them, growth to those that are not live yet.
        """
        m, live, queue = self.config.prototypes, int(self.live), self.queue
        restart = not live or (self.config.restart_every > 0 and batch.step % self.config.restart_every == 0)
        if restart and live and self.config.reset_accumulator:
            self.network.clear_slots()
        first = 0 if restart else live
        if self.config.restart_with == "previous" and queue.filled:
            ready = max(first, queue.filled)
            self._write(first, queue.features[:, first:ready])
            return ready
        partners = (batch.features[1], batch.features[0])
        if restart and m <= batch.size:
            chosen: Tensor | slice = slice(None)
            if m < batch.size:  # drawn with the seed of this step
                generator = torch.Generator().manual_seed((self.context.seed * 0x9E3779B97F4A7C15 + batch.step) % 2**63)
                drawn = torch.randperm(batch.size, generator=generator)[:m]
                chosen = to_device(drawn, self.context.device)
            self._write(0, (partners[0][chosen], partners[1][chosen]))
            return m
        if restart and queue.features.shape[1]:
            newest = copy.deepcopy(queue)
            newest.add(batch)
            self._write(0, newest.features)
            return newest.filled
        added = min(m - first, batch.size)  # growth, or a first batch smaller than the run's
        self._write(first, (partners[0][:added], partners[1][:added]))
        return first + added

    def _write(self, start: int, features: Pair | Tensor) -> None:
        """Overwrite the working prototypes `start`, `start + 1`, ... of both sides; each rank takes its own share."""
        for side in (0, 1):
            rows, mine = Division(self._ranks, self.config.prototypes).own(start, features[side])
            none = (mine == 0).all(dim=1, keepdim=True)  # a feature of zeros has no direction: any, instead of NaN
            self.network.working["weight"][side, rows] = mine.masked_fill(none, mine.shape[1] ** -0.5)


def is_compiled(config: NpnConfig, context: ObjectiveContext) -> bool:
    """Whether updates are compiled, the same on every rank. Collective where `npn_compile` is `auto`, on GPUs."""
    if config.npn_compile != "auto":
        return config.npn_compile
    if context.device.type != "cuda" or context.total_steps < WORTH_COMPILING:
        return False
    reasons = context.world.gather_objects(why_not_compiled(context.device))
    if reason := next(filter(None, reasons), ""):
        log.warning("The network's updates are not compiled: torch.compile fails on this machine (%s).", reason)
    return not reason


def is_divided(config: NpnConfig, world: World) -> bool:
    """Whether each rank has a share of the prototypes.

    Raises:
        UserError: `npn_update` is `prototypes`, and the prototypes cannot be divided among these ranks.
    """
    possible = config.prototypes >= world.size and config.tau_min >= LEAST_TAU
    if config.npn_update == "prototypes" and world.size > 1 and not possible:
        raise UserError(
            f"objective.npn_update = prototypes needs at least one prototype per rank (objective.prototypes = "
            f"{config.prototypes}, {world.size} ranks) and objective.tau_min >= {LEAST_TAU} (given {config.tau_min}): "
            "use objective.npn_update=replicated."
        )
    return world.size > 1 and possible and config.npn_update != "replicated"
