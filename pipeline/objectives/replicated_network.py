"""Small networks that every rank trains for itself, on the same numbers, outside the encoders' engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeline.objectives.optimizers import InnerOptimizer


class ReplicatedNetwork:
    """Parameters of both sides with their optimizer's slots, and a working copy of all of them.

    `begin` copies the lasting values to the working copy, which the updates of a step change; `commit` swaps the two.
    So a skipped step leaves no trace. Everything is stacked as [2, ...], image anchors first.

    Args:
        parameters: Initial values, by name.
        optimizer: Updates them in `step`.
        copies: Further copies of the parameters, zero at first (moving averages, say), by name.
        slot_name: Names a slot or copy in the state.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        optimizer: InnerOptimizer,
        *,
        copies: tuple[str, ...] = (),
        slot_name: str = "{parameter}.{slot}",
    ) -> None:
        self.names, self.optimizer, self._slot_name = tuple(parameters), optimizer, slot_name
        further = {
            self._key(name, slot): torch.zeros_like(value)
            for slot in (*optimizer.slots, *copies)
            for name, value in parameters.items()
        }
        self.lasting = parameters | further
        self.working = {name: torch.empty_like(tensor) for name, tensor in self.lasting.items()}
        # On the host: updates that the optimizer remembers.
        self.updates = torch.zeros((), dtype=torch.int64)
        self.next_updates = 0

    def begin(self) -> None:
        """Start a step from the lasting values."""
        self.next_updates = int(self.updates)
        for name, tensor in self.lasting.items():
            self.working[name].copy_(tensor)

    def commit(self) -> None:
        """Make the working copy lasting."""
        self.lasting, self.working = self.working, self.lasting
        self.updates.fill_(self.next_updates)

    def side(self, side: int, *, copy: str = "", lasting: bool = False) -> dict[str, Tensor]:
        """One side's parameters, or a copy of them, by parameter name: views of the working copy or of the state."""
        tensors = self.lasting if lasting else self.working
        return {name: tensors[self._key(name, copy) if copy else name][side] for name in self.names}

    def slots(self, side: int, name: str) -> dict[str, Tensor]:
        """The optimizer's slots of one side of a parameter."""
        return {slot: self.working[self._key(name, slot)][side] for slot in self.optimizer.slots}

    def clear_slots(self) -> None:
        """Forget all that the optimizer remembers."""
        self.next_updates = 0
        for slot in self.optimizer.slots:
            for name in self.names:
                self.working[self._key(name, slot)].zero_()

    def gradients(
        self, side: int, predict: Callable[[Mapping[str, Tensor]], Tensor], slope: Callable[[Tensor], Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Gradients of a loss of one side's prediction, and the prediction.

        Args:
            side: 0 for image anchors, 1 for text anchors.
            predict: Maps the parameters to the prediction.
            slope: Maps the prediction to the loss's derivative by it.
        """
        with torch.enable_grad():
            parameters = {name: value.detach().requires_grad_() for name, value in self.side(side).items()}
            prediction = predict(parameters)
        value = prediction.detach()
        return list(torch.autograd.grad(prediction, list(parameters.values()), slope(value))), value

    def step(self, side: int, gradients: list[Tensor], *, number: int) -> None:
        """Update one side's parameters; `number` counts the optimizer's updates from 1."""
        for (name, parameter), gradient in zip(self.side(side).items(), gradients, strict=True):
            self.optimizer.step(parameter, gradient, self.slots(side, name), updates=number)

    def state(self) -> dict[str, Tensor]:
        """The lasting tensors themselves, by their names in a checkpoint."""
        return {f"npn.{name}": tensor for name, tensor in (self.lasting | {"updates": self.updates}).items()}

    def _key(self, parameter: str, slot: str) -> str:
        return self._slot_name.format(parameter=parameter, slot=slot)
