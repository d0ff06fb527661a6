"""Exponential moving average (EMA) of the weights, kept beside the fp32 master weights of this rank.

With ZeRO each rank averages the part of the master weights that it steps, so that an update needs no communication.
The average is gathered in the way of the weights themselves: for that moment it takes their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipeline.config import section
from pipeline.engine.engine_protocol import EngineState


@section
class EmaConfig:
    """Exponential moving average of the weights, in addition to the trained weights."""

    decay: float | None = Field(default=None, gt=0, lt=1)
    """Share of the average that each step keeps, for example 0.9999 in long runs and 0.999 in runs of some thousand
    steps; None: no average. Takes 4 bytes per weight, divided among the ranks at ZeRO stages 1 to 3."""
    warmup: bool = True
    """Use min(decay, (1 + t) / (10 + t)) at step t, so that the initial weights do not dominate short runs."""
    evaluate: bool = True
    """Evaluate and validate the average, instead of the trained weights, while training."""


class WeightAverage:
    """The average of one rank's master weights.

    Args:
        config: The section, with a decay.
        state: The engine's state.
    """

    def __init__(self, config: EmaConfig, state: EngineState) -> None:
        assert config.decay is not None
        self._decay, self._warmup, self._state = config.decay, config.warmup, state
        self.reset()

    def reset(self) -> None:
        """Start again from the current weights."""
        self.updates = 0
        """Steps that are averaged."""
        self._average = [master.detach().clone() for master in self._state.masters()]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates)) if self._warmup else self._decay
        masters = [master.detach() for master in self._state.masters()]
        get_ema_multi_avg_fn(decay)(self._average, masters, self.updates)
        self.updates += 1

    def weights(self, *, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The average as full tensors, like `EngineState.weights`, with the trained model's buffers. Collective."""
        with self._in_place():
            yield from self._state.weights(keep=keep)

    def load(self, weights: Mapping[str, Tensor], *, updates: int) -> None:
        """Restore an average, given as full tensors. Collective; the engine's weights must be loaded afterwards."""
        self._state.load(weights=weights, moments={}, counter=0)
        self.reset()
        self.updates = updates

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Inside, the master weights hold the average."""
        masters = [master.detach() for master in self._state.masters()]
        kept = [master.clone() for master in masters]
        try:
            for master, average in zip(masters, self._average, strict=True):
                master.copy_(average)
            yield
        finally:
            for master, value in zip(masters, kept, strict=True):
                master.copy_(value)
