"""What the fork server of the loading processes imports, and nobody else: the workers' modules, and calm signals.

A launcher or a terminal that asks a run to stop signals its whole process group, while the trainer still wants batches
up to its last checkpoint. The server ends when the trainer and its workers have.
"""

import signal

import pipeline.data.loading.tokenize
import pipeline.data.loading.worker  # noqa: F401 (imported once here, inherited by every worker)

for _number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(_number, signal.SIG_IGN)
