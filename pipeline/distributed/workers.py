"""How worker processes of loaders are started, and when they end.

Workers are started by `forkserver`: a clean process without CUDA or threads imports what they need once and forks every
worker. Plain `fork` would copy locks that threads of this process (CUDA, NCCL, OpenMP, a thread pool) may hold at that
moment, and the worker would wait for them forever; `spawn` would import torch in every worker.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from types import ModuleType
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from pipeline.distributed.signals import signals_blocked

T = TypeVar("T")
PARENT_CHECK_SECONDS = 1.0
_preloaded: dict[str, None] = {}


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
    with signals_blocked():  # torch may start helper processes here
        try:
            with _hidden_main(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Got pickle error")  # of torch, before the second try
                return iter(loader)
        except (pickle.PicklingError, AttributeError):
            return iter(loader)


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


@contextmanager
def _hidden_main() -> Iterator[None]:
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
