"""`jobs.train` in which a given rank sleeps at the n-th call of a given function, or is stopped there.

python -m tests.e2e.sleeping_run pipeline.engine.deepspeed_engine:DeepSpeedEngine.forward 3 1 SECONDS ARGUMENTS-OF-TRAIN
"""

from __future__ import annotations

import os
import sys
import time

from jobs.cli import run
from jobs.train import command
from tests.e2e.doomed_run import doom

if __name__ == "__main__":
    place, count, rank, seconds, *arguments = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        doom(place, int(count), lambda: time.sleep(float(seconds)))
    run(command, arguments, prog_name="sleeping")
