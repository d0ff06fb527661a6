"""One rank of the test of collectives that `neuclip doctor` starts under torchrun."""

from __future__ import annotations

import sys
import time

import torch

from pipeline.distributed.world import leave, start_world

SIZE, REPEATS = 2**22, 5


def main(device: str) -> None:
    """Sum and gather known numbers, and time an all-reduce of 16 MiB; rank 0 prints one line."""
    with start_world(timeout_minutes=2.0, device=device) as world:
        own = torch.full((4,), float(world.rank + 1), device=world.device)
        total = world.size * (world.size + 1) / 2
        assert world.all_reduce(own).tolist() == [total] * 4, "all_reduce returned wrong numbers"
        gathered = world.all_gather(own[:1]).tolist()
        assert gathered == [float(rank + 1) for rank in range(world.size)], "all_gather returned wrong numbers"
        x = torch.ones(SIZE, device=world.device)
        world.all_reduce(x)
        world.barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            result = world.all_reduce(x)
        assert float(result[-1]) == world.size
        speed = REPEATS * SIZE * 4 / (time.perf_counter() - start) / 2**20
        if world.is_main:
            print(f"round trip: {world.size} processes agree; all-reduce of 16 MiB at {speed:,.0f} MiB/s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    leave(0)
