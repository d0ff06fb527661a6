"""Named places in the code at which a test can kill the program or make a write fail.

The environment variable NEUCLIP_FAULT says what happens where, as ACTION@POINT or ACTION@POINT:DETAIL, where the detail
given at the point must contain DETAIL. The actions are

- `kill`: the whole download ends by SIGKILL;
- `die`: only the process that gets there does;
- `full`: the point raises what a full disk raises.

With NEUCLIP_FAULT_ONCE=FILE the fault happens only once; the file is created at that moment.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

VARIABLE, ONCE, RUN = "NEUCLIP_FAULT", "NEUCLIP_FAULT_ONCE", "NEUCLIP_FAULT_RUN"

# In the order in which publishing gets there.
SHARD_POINTS = (
    "shard.spool",
    "shard.tar",
    "shard.meta",
    "shard.commit",
    "shard.committed",
    "shard.tar-renamed",
    "shard.meta-renamed",
    "shard.recorded",
)
REMOVAL_POINTS = ("removal.begin", "removal.names", "removal.shard", "removal.end")
SET_POINTS = ("plan.part", "plan", "settings", "manifest", "report", "datasheet", "journal")
POINTS = (*SHARD_POINTS, *REMOVAL_POINTS, *SET_POINTS, "decode")


def fault_point(point: str, detail: str = "") -> None:
    """Called at each point; does nothing unless the environment variable names a fault there."""
    wanted = os.environ.get(VARIABLE)
    if wanted:
        _strike(wanted, point, detail)


def _strike(wanted: str, point: str, detail: str) -> None:
    assert point in POINTS
    action, _, place = wanted.partition("@")
    name, _, part = place.partition(":")
    if name != point or part not in detail:
        return
    once = os.environ.get(ONCE)
    if once:
        try:
            Path(once).touch(exist_ok=False)
        except FileExistsError:
            return
    if action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
    if action == "kill" and RUN in os.environ:
        os.kill(int(os.environ[RUN]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
