"""The processes of a run: ranks on this machine and workers of loaders, and how they end with their parent.

`launch` is like torchrun, but ends with the failing rank's own message. A launcher that is killed (SIGKILL, or an
out-of-memory kill) cannot end its ranks. They would continue to train as orphans, keep the GPUs and the run's folder,
and nothing would restart the run when they fail: `end_with_launcher` lets a rank write a checkpoint and exit then.

Workers are started by `forkserver`: a clean process without CUDA or threads imports what they need once and forks every
worker. Plain `fork` would copy locks that threads of this process (CUDA, NCCL, OpenMP, a thread pool) may hold at that
moment, and the worker would wait for them forever; `spawn` would import torch in every worker.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from pipeline.distributed.signals import (
    EXIT_PREEMPTED,
    STOP_SIGNALS,
    exit_on_stop_signals,
    leave_at_once,
    signals_blocked,
)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader  # ranks are launched without torch

T = TypeVar("T")
PARENT_CHECK_SECONDS = 1.0
_preloaded: dict[str, None] = {}
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

    def pass_on(number: int) -> None:
        """To the ranks as SIGTERM: a terminal sends them SIGINT, too, and a second one would interrupt them."""
        ranks = psutil.Process().children()
        if not ranks:
            leave_at_once(number)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.terminate()

    exit_on_stop_signals(pass_on)
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


def end_with_launcher() -> None:
    """If a launcher started this process, let the kernel send this process SIGTERM when the launcher is gone.

    A process without a launcher is left alone: a run under `nohup` may outlive the shell that started it.
    """
    if {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys():  # the second one is DeepSpeed's
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def preload(*modules: str) -> None:
    """Let the fork server import these modules when it starts, so that its workers need not."""
    _preloaded.update(dict.fromkeys(modules))


def start_forkserver() -> Any:
    """Start the fork server of the workers if it is not running; returns while it is still importing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_preloaded))
    with signals_blocked():
        resource_tracker.ensure_running()
    with signals_blocked():  # again: starting the tracker has unblocked SIGINT and SIGTERM
        forkserver.ensure_running()
    return context


def start_workers(loader: DataLoader[T]) -> Iterator[T]:
    """The loader's iterator, with its workers started. They import the program's main module, in which a script without
    `if __name__ == "__main__"` would run again, only if the loader has an object that is defined there."""
    if not loader.num_workers:
        return iter(loader)
    main = sys.modules["__main__"]
    with signals_blocked():  # torch may start helper processes here
        try:
            sys.modules["__main__"] = ModuleType("__main__")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Got pickle error")  # of torch, before the second try
                return iter(loader)
        except (pickle.PicklingError, AttributeError):
            sys.modules["__main__"] = main
            return iter(loader)
        finally:
            sys.modules["__main__"] = main


def means_worker_died(error: Exception) -> bool:
    """Whether torch noticed that a worker ended, or a tensor that it sent can no longer be fetched from it. Errors that
    a worker itself raised arrive as "Caught ... in DataLoader worker process ..."."""
    message = str(error)
    return "DataLoader worker (pid" in message or (isinstance(error, (OSError, EOFError)) and "Caught" not in message)


def worker_died_message(error: Exception, *, memory: str) -> str:
    """Why, and what to do about it: `memory` where memory ran out."""
    what = f"{type(error).__name__}: {error}".rstrip(".")
    if "exit code" in what:
        return f"A worker of the loader ended by itself; it printed its error above ({what})."
    return (
        f"A worker of the loader was killed ({what}), which usually means that the machine ran out of memory. " + memory
    )


def live_with_parent() -> None:
    """End this worker when its parent has ended or terminates it, and at no other signal.

    A signal to the whole process group (Ctrl-C, a launcher that stops the run) must leave the workers alive until the
    parent has finished. torch's own watchdog checks the parent's id, which is the fork server's.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for this thread and those it will start
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while parent.is_alive():
            received = signal.sigtimedwait(signals, PARENT_CHECK_SECONDS)
            if received is not None and received.si_signo == signal.SIGTERM and received.si_pid == parent.pid:
                break
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
