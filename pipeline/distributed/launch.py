"""Start several ranks of a program on this machine, and end ranks with their launcher.

`launch` is like torchrun, but ends with the failing rank's own message. A launcher that is killed (SIGKILL, or an
out-of-memory kill) cannot end its ranks. They would continue to train as orphans, keep the GPUs and the run's folder,
and nothing would restart the run when they fail: `end_with_launcher` lets a rank write a checkpoint and exit then.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from pipeline.distributed.signals import (
    EXIT_PREEMPTED,
    STOP_SIGNALS,
    exit_on_stop_signals,
    leave_at_once,
)

SECONDS_TO_SAVE = "900"
"""How long the other ranks may write a checkpoint after the first one has exited; torch's default is 30."""
LAUNCHERS_SET = frozenset({
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
})  # fmt: skip
"""By torchrun, deepspeed, srun or a job's script; besides these, torchrun's variables TORCHELASTIC_*."""
PR_SET_PDEATHSIG = 1
"""Of Linux's prctl: the signal that a process gets when its parent ends."""


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that is not a rank of the current run: it must not wait for other ranks."""
    return {k: v for k, v in environment.items() if k not in LAUNCHERS_SET and not k.startswith("TORCHELASTIC_")}


def launch(module: str, arguments: Sequence[str], *, ranks: int) -> int:
    """Run `python -m module arguments` as several ranks.

    A stop signal is passed on to the ranks, which then end as they do without a launcher.

    Returns:
        The exit code: 0, or that of the first rank that failed, which has printed why.
    """
    exit_on_stop_signals(_pass_on)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # torch would kill the ranks 30 s after a stop signal
    )
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS_TO_SAVE)
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        if -code in STOP_SIGNALS:  # a rank that had not yet started Python
            return EXIT_PREEMPTED
        return code if code > 0 else 128 - code  # a signal's number is negative there
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _pass_on(number: int) -> None:
    """Send SIGTERM to the ranks; without any, end this process.

    It is SIGTERM whatever arrived: a terminal sends SIGINT to the ranks, too, and a second one would interrupt them.
    """
    ranks = psutil.Process().children()
    if not ranks:
        leave_at_once(number)
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.terminate()


def end_with_launcher() -> None:
    """If a launcher started this process, let the kernel send this process SIGTERM when the launcher is gone.

    A process without a launcher is left alone: a run under `nohup` may outlive the shell that started it.
    """
    if {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys():  # the second one is DeepSpeed's
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
