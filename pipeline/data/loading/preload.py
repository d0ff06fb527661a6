"""Imported by the fork server of the loader's workers only: loads the workers' modules and ignores signals.

To stop a run, a launcher or a terminal signals the whole process group, but the trainer needs batches until it has
written its last checkpoint. The fork server ends when the trainer and its workers have ended.
"""

import signal

import pipeline.data.loading.tokenize
import pipeline.data.loading.worker  # noqa: F401 (imported here once, inherited by every worker)

for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_number, signal.SIG_IGN)
