"""Signals that stop a run.

Before the first step a signal ends the process at once, with EXIT_PREEMPTED: there is nothing to save yet. While the
run trains, signals are collected, and the run stops after its step and a checkpoint.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: stopped by a signal; start again with --resume latest."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class _Starting:
    """Whether a stop signal ends the process at once."""

    active = False


def exit_on_stop_signals() -> None:
    """Until `stop_signals` takes over, a stop signal ends this process at once. Call it in the main thread.

    A thread does it, because Python runs a signal's handler only between two steps of the main thread, which may be in
    the middle of a long import or waiting for other ranks. A shell may have started the run with SIGINT ignored; that
    is overridden, because the run handles SIGINT in every phase.
    """
    if _Starting.active:
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)
    _Starting.active = True

    def watch() -> None:
        with writing:  # kept open as long as this thread lives
            while number := reading.recv(1):
                if _Starting.active and number[0] in STOP_SIGNALS:
                    leave_at_once(number[0])

    threading.Thread(target=watch, name="signals", daemon=True).start()


def leave_at_once(number: int) -> None:
    """End this process before its first step. Its loading processes notice that and end, too."""
    name = signal.Signals(number).name
    with suppress(OSError, ValueError):
        print(f"Stopped by {name} while starting; nothing was lost. Start again.", file=sys.stderr, flush=True)
    os._exit(EXIT_PREEMPTED)


def _ignore(number: int, frame: Any) -> None:
    """A handler, so that the signal reaches the thread and not the default action."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals that have arrived, in a list that grows. SIGINT after another signal raises KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    starting, _Starting.active = _Starting.active, False
    try:
        yield received
    finally:
        _Starting.active = starting  # of another stage of the run
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started inside do not receive stop signals; this process gets them at the end of the block.

    Helpers such as multiprocessing's resource tracker and fork server belong to this process's group and would die of a
    signal to the group before the run has written its last checkpoint.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
