"""Ranks that wait for each other forever, as in NCCL, of which one ends in a given way. Only heartbeats run.

python -m tests.dist.lost_rank RUN ENDING RANK
python -m tests.dist.lost_rank start ENDING RANK         before there are heartbeats
python -m tests.dist.lost_rank group ENDING RANK         while the process group is made
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.distributed.exit_record import record_exit, start_recording
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.peers import start_watched
from pipeline.distributed.start import start_world
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World, leave
from pipeline.errors import UserError

LOST_AFTER = 3.0
PATIENCE = 30.0
WATCHDOG = """[rank1]:[E1123 12:00:00 ProcessGroupNCCL.cpp:2210] [Rank 1] failure detected by watchdog at work 7
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG 0 Rank 1] Process group watchdog thread terminated with exception: NCCL error: remote process exited
ncclRemoteError: A call failed possibly due to a network error
Exception raised from checkForNCCLErrors at ProcessGroupNCCL.cpp:2267 (most recent call first):
frame #0: c10::Error::Error (0x7f from libc10.so)
"""


def end(how: str) -> None:
    """End this process, or freeze it."""
    if how == "error":  # of the loader, for example
        record_exit(2, "a shard is damaged")
        os._exit(2)
    if how == "abort":
        os.write(2, WATCHDOG.encode())
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "abort": signal.SIGABRT, "frozen": signal.SIGSTOP}[how])


def start(how: str, victim: int) -> None:
    """Ranks that wait at the start of a run."""
    with start_world(device="cpu") as world, start_watched(world, lost_after=LOST_AFTER):
        time.sleep(2 * LOST_AFTER)
        if world.rank == victim:
            if how == "error":
                raise UserError("its GPU has no free memory")
            end(how)
        time.sleep(PATIENCE)
    leave(0)


def group(how: str, victim: int) -> None:
    """Ranks that wait in `init_process_group` for one that ends there."""

    def lost(*_: object, **__: object) -> None:
        time.sleep(LOST_AFTER / 10)  # before its second heartbeat
        if how == "error":
            raise dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:100, unhandled system error")
        end(how)

    if int(os.environ["RANK"]) == victim:
        dist.init_process_group = lost
    with start_world(device="cpu", lost_after=LOST_AFTER):
        leave(0)


def main(run: Path, how: str, victim: int) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda" if how == "abort" and rank == victim else "cpu")
    world = World(rank=rank, size=int(os.environ["WORLD_SIZE"]), device=device)
    phases = Phases(torch.device("cpu"))
    start_recording(run, rank=rank)
    with Heartbeat(run, world=world, phases=phases, timeout_seconds=1000.0, lost_after=LOST_AFTER):
        phases.mark("communication", step=5)
        time.sleep(2 * LOST_AFTER)
        if rank == victim:
            end(how)
        time.sleep(PATIENCE)
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] in ("start", "group"):
        (start if sys.argv[1] == "start" else group)(sys.argv[2], int(sys.argv[3]))
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
