"""`jobs.train` in which a given rank kills itself (SIGKILL) at the n-th call of a given function, as in a crash.

python -m tests.e2e.doomed_run pipeline.checkpoint.writer:sha256_of 3 0 ARGUMENTS-OF-TRAIN

With `0:SIGTERM` in place of `0`, rank 0 sends itself that signal instead; with `0:25`, it sleeps for 25 seconds. With
`each` in place of `3`, it does so at every call.
"""

import functools
import importlib
import os
import signal
import sys
import time
from typing import Any

from jobs.cli import run
from jobs.train import command


def doom(place, count, fate):
    """Patch `module:object.attribute` so that its `count`-th call, or each, runs `fate` first."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def fatal(*args, **kwargs):
        nonlocal calls
        calls += 1
        if count in (str(calls), "each"):
            fate()
        return original(*args, **kwargs)

    setattr(owner, name, fatal)


if __name__ == "__main__":
    place, count, rank, *arguments = sys.argv[1:]
    rank, _, fate = rank.partition(":")
    if os.environ.get("RANK", "0") == rank:
        number = signal.SIGKILL if not fate else signal.Signals[fate] if fate.isalpha() else None
        doom(place, count, lambda: os.kill(os.getpid(), number) if number else time.sleep(float(fate)))
    run(command, arguments, prog_name="doomed")
