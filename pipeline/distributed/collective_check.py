"""The test of collectives of `neuclip doctor`: one rank of it under a launcher, or all ranks of one machine.

torchrun --nproc-per-node 8 -m pipeline.distributed.collective_check cuda
python -m pipeline.distributed.collective_check cpu 2
"""

from __future__ import annotations

import socket
import sys
import time

import torch

from pipeline.distributed.processes import end_with_launcher, launch
from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave

REPEATS = 5


def main(device: str) -> None:
    """Sum known numbers, and time a large all-reduce; rank 0 prints one line."""
    with start_world(timeout_minutes=2.0, device=device) as world:
        count = 2**27 if device == "cuda" else 2**22  # on GPUs, more than latency would hide
        x = torch.full((count,), float(world.rank + 1), device=world.device)
        assert float(world.all_reduce(x)[-1]) == world.size * (world.size + 1) / 2, "all_reduce returned wrong numbers"
        world.barrier()
        start = time.perf_counter()
        for _ in range(REPEATS):
            result = world.all_reduce(x)
        result[-1].item()  # waits for the device
        sent = REPEATS * x.nbytes * 2 * (world.size - 1) / world.size  # what nccl-tests calls bus bandwidth
        rate = sent / (time.perf_counter() - start) / 1e9
        hosts = len(set(world.gather_objects(socket.gethostname())))
        if world.is_main:
            width = f"bus bandwidth of an all-reduce of {x.nbytes // 2**20} MiB: {rate:,.1f} GB/s"
            print(f"round trip: {world.size} processes agree ({hosts} host{'s' * (hosts != 1)}, {width})", flush=True)


if __name__ == "__main__":
    device, *ranks = sys.argv[1:]
    if ranks:
        sys.exit(launch("pipeline.distributed.collective_check", [device], ranks=int(ranks[0])))
    end_with_launcher()  # which the doctor kills when they do not connect in time
    main(device)
    leave(0)
