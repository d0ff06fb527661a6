"""Ranks that wait for each other forever, as in NCCL, of which one ends in a given way. Only heartbeats run.

python -m tests.dist.lost_rank step|start RUN ENDING RANK
"""

import os
import signal
import sys
import time
from pathlib import Path

from pipeline.distributed.exit_record import record_exit
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.errors import UserError
from pipeline.training.recipe import load_recipe
from pipeline.training.run_folder import STARTING, folder_of_a_start

LOST_AFTER = 3.0
PATIENCE = 30.0


def end(how):
    """End this process, or freeze it."""
    if how == "error":
        raise UserError("a shard is damaged")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "abort": signal.SIGABRT, "frozen": signal.SIGSTOP}[how])


def main(place, output, how, victim):
    with (
        start_world(device="cpu") as world,
        Heartbeat(output / STARTING, world=world, lost_after=LOST_AFTER, limit=1000.0) as heartbeat,
    ):

        def work():
            time.sleep(1.5 * LOST_AFTER)
            if world.rank == victim:
                end(how)
            time.sleep(PATIENCE)

        try:
            if place == "start":
                given = [f"output={output}", "data.sources=x", "samples=80", "batch_size=8", "schedule.warmup_steps=1"]
                with folder_of_a_start(load_recipe(None, given), heartbeat=heartbeat):
                    work()
            heartbeat.move(output / "heartbeats")
            work()
        except UserError as error:
            record_exit(error.exit_code, str(error))
            leave(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    leave(0)
