"""Parts of an objective that have state of their own, such as its temperature and its estimator of normalizers.

The objective saves, loads, compares and logs its parts; see `Objective`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeline.objectives.sample_table import PerSampleTable

Pair = tuple[Tensor, Tensor]
"""The image side and the text side."""


class StatefulPart:
    """A part of an objective; by default without any state."""

    table: PerSampleTable | None = None
    """Per-sample state."""
    needs_ids = False
    """Whether it uses `AnchorBatch.ids`."""

    def replicated_state(self) -> dict[str, Tensor]:
        """The state that every rank holds, by name: the tensors themselves, so that loading writes into them."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """This rank's share of state that is divided among the ranks, by name."""
        return {}

    def gathered_state(self) -> dict[str, Tensor]:
        """State that is divided among the ranks, whole on every rank, by name; collective."""
        return {}

    def added_state(self) -> dict[str, int]:
        """Tensors that checkpoints of an older version lack, by name, and the value that each is filled with then."""
        return {}

    def divide_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of what `gathered_state` returned, possibly on another number of ranks."""

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        """Current learning rates, by the name of their setting."""
        return {}

    def distributions(self) -> dict[str, Tensor]:
        """Values of the lasting state for histograms, computed on each call."""
        return {}

    def commit(self, update: Any) -> None:
        """Apply `AnchorWeights.update` of the pending batch."""


class Temperature(StatefulPart):
    """Supplies the temperature of every anchor."""

    @abstractmethod
    def of_anchors(self, size: int, fetched: Tensor | None) -> Pair:
        """tau of a batch's anchors, [B] each (expanded scalars for a global one); fetched: the batch's table rows."""

    @abstractmethod
    def logit_scale(self) -> float:
        """log(1/tau), as open_clip stores it."""

    def update(self, gradient: Any, *, lr_scale: float) -> None:
        """Learn from dL/dtau."""
        raise NotImplementedError(f"{type(self).__name__} is not learned")
