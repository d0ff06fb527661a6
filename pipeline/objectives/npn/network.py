"""What an NPN is to the objective: interface and settings, the state of networks, the batch as it sees it.

Every rank trains these small networks for itself, on the same numbers, outside the encoders' engine.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import pydantic
import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives.npn.kernels import AdaGrad, InnerOptimizer
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.registry import ObjectiveContext, Pair, StatefulPart
from pipeline.objectives.softmax import AnchorBatch
from pipeline.objectives.temperature import Adam, TemperatureConfig
from pipeline.registries import Registry


class ReplicatedNetwork(StatefulPart):
    """Parameters of both sides with their optimizer's slots, and a working copy of all of them.

    `begin` copies the lasting values to the working copy, which the updates of a step change; `commit` swaps the two.
    So a skipped step leaves no trace. Everything is stacked as [2, ...], image anchors first. `copies` names further
    copies of the parameters, zero at first (moving averages, say).
    """

    def __init__(
        self, parameters: dict[str, Tensor], optimizer: InnerOptimizer, *, copies: tuple[str, ...] = ()
    ) -> None:
        self.names, self.optimizer = tuple(parameters), optimizer
        self.lasting = parameters | {
            self._key(name, slot): torch.zeros_like(parameters[name])
            for slot in (*optimizer.slots, *copies)
            for name in parameters
        }
        self.working = {name: torch.empty_like(tensor) for name, tensor in self.lasting.items()}
        # On the host: updates that the optimizer remembers.
        self.updates, self.next_updates = torch.zeros((), dtype=torch.int64), 0

    def begin(self) -> None:
        self.next_updates = int(self.updates)
        for name, tensor in self.lasting.items():
            self.working[name].copy_(tensor)

    def commit(self) -> None:
        self.lasting, self.working = self.working, self.lasting
        self.updates.fill_(self.next_updates)

    def side(self, side: int, *, copy: str = "", lasting: bool = False) -> dict[str, Tensor]:
        """One side's parameters, or a copy of them, by parameter name: views of the working copy or of the state."""
        tensors = self.lasting if lasting else self.working
        return {name: tensors[self._key(name, copy) if copy else name][side] for name in self.names}

    def slots(self, side: int, name: str) -> dict[str, Tensor]:
        """What the optimizer remembers of one side's parameter, in the working copy."""
        return {slot: self.working[self._key(name, slot)][side] for slot in self.optimizer.slots}

    def clear_slots(self) -> None:
        self.next_updates = 0
        for slot in self.optimizer.slots:
            for name in self.names:
                self.working[self._key(name, slot)].zero_()

    def gradients(
        self, side: int, predict: Callable[[Mapping[str, Tensor]], Tensor], slope: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of a loss of one side's prediction, whose derivative by it is `slope`, and the prediction."""
        with torch.enable_grad():
            parameters = {name: value.detach().requires_grad_() for name, value in self.side(side).items()}
            prediction = predict(parameters)
        value = prediction.detach()
        return list(torch.autograd.grad(prediction, list(parameters.values()), slope(value))), value

    def step(self, side: int, gradients: list[Tensor], *, number: int) -> None:
        """The optimizer's update `number`, counted from 1, of one side."""
        for (name, parameter), gradient in zip(self.side(side).items(), gradients, strict=True):
            self.optimizer.step(parameter, gradient, self.slots(side, name), updates=number)

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return {"npn_lr": float(self.optimizer.lr)}

    def replicated_state(self) -> dict[str, Tensor]:
        return {f"npn.{name}": tensor for name, tensor in (self.lasting | {"updates": self.updates}).items()}

    def _key(self, name: str, slot: str) -> str:
        """The name of a slot or copy in the state; that of a lone parameter needs no name of the parameter."""
        return slot if len(self.names) == 1 else f"{name}.{slot}"


BothSides = tuple[Anchors, Anchors]


@dataclass(frozen=True)
class Prediction:
    """Log-normalizers of the batch's anchors, [B] each."""

    alpha: Pair
    """To be used."""
    cold: Pair
    """From before the inner updates."""
    prototypes: int | Tensor = 0
    """Prototypes that the prediction is a mean over, for each anchor if they differ, [B]; 0 for a network without
    any."""


NPNS: Registry[type[Npn]] = Registry(
    "network", setting="objective.npn", package="pipeline.objectives.npn", group="neuclip.npn"
)
register_npn = NPNS.register


@section
class NpnConfig(TemperatureConfig):
    """Settings of methods with an NPN. A variant without prototypes has no use for those of prototypes."""

    eps: float = Field(default=1e-14, gt=0)
    """The small constant beside the normalizer g."""
    npn: Annotated[str, AfterValidator(NPNS.known)] = "prototypes"
    """`prototypes`: equations (10) and (11). `mlp`: the ablation of section 5.2. `queue`: prototypes that are the
    newest features, without learning, so that `restart_every`, `inner_steps` and `npn_update` have no meaning."""
    npn_objective: Literal["unified", "separate"] = "unified"
    """`unified`: equation (12). `separate`: squared error of the logs (section 5.2)."""
    npn_schedule: Literal["alternating", "simultaneous"] = "alternating"
    """`alternating`: Algorithm 1. `simultaneous`: the order of Algorithm 3, one update per step and alpha from before
    it; the rest of that algorithm is restart_every 0, npn_optimizer adam, stop_gradient false, ratio_cap 0."""
    npn_update: Literal["auto", "replicated", "prototypes"] = "auto"
    """How several ranks compute an update. `prototypes`: each rank owns a share of the prototypes, and every update
    adds up B scalars over the ranks. `replicated`: every rank computes the whole update, without communication. `auto`
    is `prototypes` on several ranks, unless there are fewer prototypes than ranks or `tau_min` is below 0.002."""
    npn_optimizer: Literal["adagrad", "adam"] = "adagrad"
    """Optimizer of the network."""
    npn_lr: float = Field(default=0.01, gt=0)
    """Learning rate of the network's optimizer."""
    npn_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the inner matrix products; `auto` is bf16 on a GPU and fp32 on a CPU. The last prediction, which the
    encoders' gradients use, is always fp32."""
    npn_compile: bool | Literal["auto"] = "auto"
    """Let torch.compile fuse what an update does beside its matrix products. `auto`: on GPUs where it works, in runs of
    at least 2,000 steps, where the seconds of compiling are won back."""
    prototypes: int = Field(default=4096, ge=1, le=2**30)
    """Number of prototypes m per side."""
    restart_every: int = Field(default=500, ge=0)
    """Steps T_r between restarts from features; 0 = never."""
    restart_with: Literal["current", "previous"] = "current"
    """A restart takes the newest features including the `current` batch, or those of `previous` batches only."""
    inner_steps: int = Field(default=10, ge=0)
    """Updates T_u of the network per step."""
    reset_accumulator: bool = False
    """A restart also clears the optimizer's memory."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> NpnConfig:
        NPNS[self.npn].check(self)
        if self.npn_schedule == "simultaneous" and self.inner_steps != 1:
            raise ValueError(f"npn_schedule = simultaneous needs inner_steps = 1, not {self.inner_steps}")
        return self


class Npn(StatefulPart):
    """A network per side that predicts log-normalizers. The effect of `advance` is pending until `commit`.

    A variant is one file with a class that `@register_npn("name")` makes selectable as `objective.npn=name`: in this
    folder, or in an installed package with an entry point of the group `neuclip.npn`. `parameters` are the initial
    ones of both sides, [2, ...] each.
    """

    needs_ids = False
    """Whether it uses the ids of anchors."""

    is_mean: ClassVar[bool] = False
    """Whether predictions are means over samples, as many as `Prediction.prototypes` says; `neuclip_plus` needs it."""

    def __init__(self, config: NpnConfig, context: ObjectiveContext, parameters: dict[str, Tensor]) -> None:
        self.config, self.context = config, context
        optimizer = AdaGrad(config.npn_lr) if config.npn_optimizer == "adagrad" else Adam(config.npn_lr)
        self.network = ReplicatedNetwork(parameters, optimizer)

    @classmethod
    def check(cls, config: NpnConfig) -> None:
        """Raise a ValueError if settings do not go together with this variant; called before anything is built."""

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
        """Scalars for the log, after `advance`."""
        return {}

    def replicated_state(self) -> dict[str, Tensor]:
        return self.network.replicated_state()

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        return self.network.learning_rates(lr_scale=lr_scale)


def anchors_of(batch: AnchorBatch, config: NpnConfig, *, tau: Tensor) -> BothSides:
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
            ids=batch.ids,
        )
        for side in (0, 1)
    )
    return first, second
