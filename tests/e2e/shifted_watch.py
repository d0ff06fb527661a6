"""`neuclip watch` on a machine whose clock is wrong by HOURS; the dates of files are not.

python -m tests.e2e.shifted_watch HOURS ARGUMENTS-OF-WATCH
"""

from __future__ import annotations

import sys
import time

from jobs.cli import run
from jobs.watch import command

if __name__ == "__main__":
    hours, *arguments = sys.argv[1:]
    seconds, date, shift = time.time, time.gmtime, 3600.0 * float(hours)
    time.time = lambda: seconds() + shift
    time.time_ns = lambda: int((seconds() + shift) * 1e9)
    time.gmtime = lambda at=None: date(time.time() if at is None else at)
    run(command, arguments, prog_name="watch")
