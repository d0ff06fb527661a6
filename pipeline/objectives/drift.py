"""Replicated state is compared over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.errors import UserError

log = logging.getLogger(__name__)
DRIFT_CHECK_EVERY = 500
"""Steps. A comparison waits for the device."""
MAX_EVENTS = 3
"""One mismatch may be a flipped bit; three mean that the ranks compute different things."""
_ODD = 0x9E3779B1


def fingerprint(tensors: Mapping[str, Tensor], *, device: torch.device) -> Tensor:
    """A 64-bit hash of the tensors' bits and positions, as a 0-dim int64 on `device`, without host synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors.values():
        whole_number = {4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
        bits = tensor.detach().contiguous().view(whole_number)
        words = bits.flatten().to(device=device, dtype=torch.int64)
        places = torch.arange(1, words.numel() + 1, device=device).mul_(_ODD).bitwise_or_(1)
        total = total * _ODD + (words + places).mul_(places).sum()  # integer sums wrap: any order
    return total


class DriftGuard:
    """Compares the ranks' state; on a mismatch rank 0's wins, and the event is counted."""

    def __init__(self, world: World, *, device: torch.device) -> None:
        self.world = world
        self.every = DRIFT_CHECK_EVERY if world.size > 1 else 0
        """Steps between two comparisons; 0: never."""
        self.device = device
        self.events = 0

    def check(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Copy rank 0's tensors to all ranks, in place, if they differ.

        Raises:
            UserError: The third mismatch since the process began; raised on every rank.
        """
        own = fingerprint(tensors, device=self.device)
        seen = self.world.all_gather(own.reshape(1))
        if bool((seen == seen[0]).all()):
            return
        self.events += 1
        different = [rank for rank, value in enumerate(seen.tolist()) if value != int(seen[0])]
        if self.world.is_main:
            log.warning("step %d: objective state of ranks %s differed from rank 0's; it was replaced", step, different)
        for tensor in tensors.values():
            tensor.copy_(self.world.broadcast(tensor.to(self.device, copy=True)))
        if self.events >= MAX_EVENTS:
            raise UserError(
                f"The objective's state differed between ranks {self.events} times since the start (last at step "
                f"{step}, ranks {different} against rank 0). Every rank must run the same torch build on the same kind "
                "of device with the same settings; if they do, suspect these devices. Resume from the last checkpoint."
            )
