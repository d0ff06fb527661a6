"""`jobs.train` with a pause in every step, so that a test has time to interfere.

python -m tests.e2e.slow_run SECONDS ARGUMENTS-OF-TRAIN

With `mirror` instead of seconds, the writer waits until each finished checkpoint is in the mirror, so that none is
skipped.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from jobs.cli import run
from jobs.train import command
from pipeline.checkpoint.mirror import Mirror
from pipeline.engine.deepspeed_engine import DeepSpeedEngine

if __name__ == "__main__":
    seconds, *arguments = sys.argv[1:]
    step, offer = DeepSpeedEngine.step, Mirror.offer

    def slow_step(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        time.sleep(float(seconds))
        return step(engine, *args, **kwargs)

    def offer_and_wait(mirror: Mirror, path: Path) -> None:
        offer(mirror, path)
        assert mirror.wait(60)

    if seconds == "mirror":
        Mirror.offer = offer_and_wait  # type: ignore[method-assign]
    else:
        DeepSpeedEngine.step = slow_step  # type: ignore[method-assign]
    run(command, arguments, prog_name="slow")
