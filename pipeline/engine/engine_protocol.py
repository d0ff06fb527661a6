"""The interface of an engine, and `register_engine`, which makes one selectable as `engine.name`.

An engine is a class with the methods of `Engine` and the static method `EngineClass.facts`: in a file of
`pipeline.engine`, or in an installed package with an entry point of the group `neuclip.engines`. It does not know the
objective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Size, Tensor

from pipeline.distributed.world import World
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.model.attention import PackedText
from pipeline.model.towers import Towers
from pipeline.registries import Registry


class EngineState(Protocol):
    """An engine's weights and optimizer state as full fp32 tensors by parameter name, whatever the parallel layout.

    All methods are collective: every rank calls them, and iterates over all of what they yield.
    """

    def weights(self, *, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
        """fp32 master weights and buffers on the CPU, by the names of open_clip's state dict.

        A rank that does not `keep` them takes part, copies nothing and yields nothing.
        """
        ...

    def moments(self, *, keep: bool = True) -> Iterator[tuple[str, str, Tensor]]:
        """`(parameter, key, value)` of the optimizer's per-weight state (Adam: exp_avg, exp_avg_sq), on the CPU.

        `keep` as for `weights`.
        """
        ...

    def counter(self) -> int:
        """How many updates the optimizer has made; 0 before the first."""
        ...

    def shapes(self) -> dict[str, Size]:
        """Full shapes of all weights and buffers by name."""
        ...

    def masters(self) -> list[Tensor]:
        """The fp32 master weights that this rank steps, as they lie in memory: at ZeRO stages 1 to 3 flat pieces."""
        ...

    def load(self, *, weights: Mapping[str, Tensor], moments: Mapping[tuple[str, str], Tensor], counter: int) -> None:
        """Restore weights, moments and the update counter; a `UserError` if names are missing, or shapes differ."""
        ...


class Engine(Protocol):
    """Forward, backward and optimizer step of the towers on one rank."""

    optimizer_config: OptimizerConfig
    dtype: torch.dtype
    """Precision of the weights that compute, and so of the images that `forward` takes."""
    bf16: bool
    """Whether products are computed in bf16, by bf16 weights or by autocast."""

    @property
    def state(self) -> EngineState: ...

    @property
    def module(self) -> Towers: ...

    def forward(self, image: Tensor, text: Tensor | PackedText) -> tuple[Tensor, Tensor]:
        """Normalized images [b, 3, H, W] and tokens [b, L], or packed texts -> two [b, d] unit-norm fp32 features.

        In place of images, the image tower's outputs [b, d] before the normalisation can be given.
        """
        ...

    def backward(self, features: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
        """Accumulate d(global loss)/d(parameters), given d(global loss)/d(this rank's features)."""
        ...

    def step(self, *, lr_scale: float) -> bool:
        """Reduce, clip and apply the accumulated gradient, with `lr_scale` times the learning rate `optimizer.lr`.

        Returns:
            False when the step was skipped because the gradient holds inf or NaN, and nothing of it is kept. The same
            on all ranks. Steps whose loss is not finite are skipped in this way: their gradients are NaN.
        """
        ...

    def gradient_norm(self) -> float | None:
        """Norm of the last step's gradient over all ranks, before clipping; None where it is not known."""
        ...


@dataclass(frozen=True)
class EngineFacts:
    """What a plan needs to know about an engine without building it."""

    stage: int
    """How much is sharded over the ranks, as ZeRO counts: 0 nothing, 1 optimizer, 2 gradients, 3 weights."""
    bf16: bool
    """Whether products are computed in bf16."""
    dtype: torch.dtype
    """Of the weights that compute."""
    bucket: int
    """Elements in the buffers of its communication."""


class EngineClass(Protocol):
    """A class that `register_engine` takes: it describes itself and builds the towers' engine."""

    def __call__(
        self,
        towers: Towers,
        *,
        config: EngineConfig,
        optimizer: OptimizerConfig,
        world: World,
        global_batch: int,
        compile_towers: bool | Literal["auto"] = False,
    ) -> Engine:
        """Build the engine for towers on this rank's device, which take `global_batch` samples a step over all ranks.

        `compile_towers`: with torch.compile; "auto": unless that fails.

        Raises:
            UserError: Settings, optimizer and towers do not go together.
        """
        ...

    def facts(
        self, config: EngineConfig, *, optimizer: OptimizerConfig, global_batch: int, world_size: int
    ) -> EngineFacts:
        """Describe the engine; a `UserError` if settings are refused, as far as that needs neither model nor GPU."""
        ...


ENGINES: Registry[EngineClass] = Registry(
    "engine", setting="engine.name", package="pipeline.engine", group="neuclip.engines"
)
register_engine = ENGINES.register
