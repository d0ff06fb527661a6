"""`jobs.train` with a pause in every step, so that a test has time to interfere.

python -m tests.e2e.slow_run SECONDS ARGUMENTS-OF-TRAIN

With `until=FILE` instead of seconds, it pauses until the file exists: for a second at first, and 3% longer every step.
With `mirror`, the writer waits until each finished checkpoint is in the mirror, so that none is skipped.
"""

import itertools
import sys
import time
from pathlib import Path

from jobs.cli import run
from jobs.train import command
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.engine.deepspeed_engine import DeepSpeedEngine

if __name__ == "__main__":
    seconds, *arguments = sys.argv[1:]
    step, save = DeepSpeedEngine.step, CheckpointWriter.save

    pauses = (1.03**number for number in itertools.count())

    def slow_step(engine, *args, **kwargs):
        until = seconds.partition("until=")[2]
        if not until or not Path(until).exists():
            time.sleep(next(pauses) if until else float(seconds))
        return step(engine, *args, **kwargs)

    def save_and_wait(writer, snapshot):
        save(writer, snapshot)
        writer.finish()

    if seconds == "mirror":
        CheckpointWriter.save = save_and_wait
    else:
        DeepSpeedEngine.step = slow_step
    run(command, arguments, prog_name="slow")
