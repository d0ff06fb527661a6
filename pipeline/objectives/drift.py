"""Checks that state which every rank computes for itself stays bit-identical on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import UserError

log = logging.getLogger(__name__)

MAX_EVENTS = 3
"""One mismatch may be a flipped bit; three mean that the ranks compute different things."""
_ODD = 0x9E3779B1


def fingerprint(tensors: Mapping[str, Tensor], *, device: torch.device) -> Tensor:
    """A 64-bit hash of the tensors' bits and positions, as a 0-dim int64 on `device`, without host synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors.values():
        bits = tensor.detach().contiguous().view(torch.uint8 if tensor.element_size() < 4 else _integer(tensor))
        words = bits.flatten().to(device=device, dtype=torch.int64)
        places = torch.arange(1, words.numel() + 1, device=device).mul_(_ODD).bitwise_or_(1)
        total = total * _ODD + (words + places).mul_(places).sum()  # integer sums wrap: any order
    return total


class DriftGuard:
    """Compares fingerprints every `every` commits; on a mismatch rank 0's state wins and the event is counted."""

    def __init__(self, world: World, *, every: int, device: torch.device) -> None:
        self.world, self.every, self.device, self.events = world, every, device, 0

    def due(self, steps: int) -> bool:
        return self.every > 0 and self.world.size > 1 and steps % self.every == 0

    def check(self, tensors: Mapping[str, Tensor], *, step: int) -> bool:
        """Whether the ranks agree; if not, rank 0's tensors are copied to all ranks, in place.

        This waits for the device, so it runs only every so many steps.

        Raises:
            UserError: The third mismatch since the process began; raised on every rank.
        """
        own = fingerprint(tensors, device=self.device)
        seen = self.world.all_gather(own.reshape(1))
        if bool((seen == seen[0]).all()):
            return True
        self.events += 1
        different = [rank for rank, value in enumerate(seen.tolist()) if value != int(seen[0])]
        if self.world.is_main:
            log.warning("step %d: objective state of ranks %s differed from rank 0's; it was replaced", step, different)
        for tensor in tensors.values():
            shared = tensor.to(self.device)
            tensor.copy_(self.world.broadcast(shared.clone()))
        if self.events >= MAX_EVENTS:
            raise UserError(
                f"The objective's state differed between ranks {self.events} times since the start (last at step "
                f"{step}, ranks {different} against rank 0). Every rank must run the same torch build on the same kind "
                "of device with the same settings; if they do, suspect these devices. Resume from the last checkpoint."
            )
        return False


def _integer(tensor: Tensor) -> torch.dtype:
    return torch.int64 if tensor.element_size() == 8 else torch.int32
