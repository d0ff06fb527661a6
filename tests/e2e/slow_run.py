"""`jobs.train` with a pause in every step, so that a test has time to interfere.

python -m tests.e2e.slow_run SECONDS ARGUMENTS-OF-TRAIN
"""

from __future__ import annotations

import sys
import time
from typing import Any

from jobs.cli import run
from jobs.train import command
from pipeline.engine.deepspeed_engine import DeepSpeedEngine

if __name__ == "__main__":
    seconds, *arguments = sys.argv[1:]
    step = DeepSpeedEngine.step

    def slow_step(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        time.sleep(float(seconds))
        return step(engine, *args, **kwargs)

    DeepSpeedEngine.step = slow_step  # type: ignore[method-assign]
    run(command, arguments, prog_name="slow")
