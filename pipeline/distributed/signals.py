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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipeline.distributed.exit_record import record_exit

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: stopped by a signal; start again with --resume latest."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class _Waiting:
    """What a thread does when a stop signal arrives and the main thread may be unable to notice it."""

    active = False
    """Whether the thread exists."""
    action: Callable[[int], None] | None = None
    """None: nothing, because the main thread handles signals itself."""


def exit_on_stop_signals() -> None:
    """Until `stop_signals` takes over, a stop signal ends this process at once. Call it in the main thread.

    A thread does it, because Python runs a signal's handler only between two steps of the main thread, which may be in
    the middle of a long import or waiting for other ranks. A shell may have started the run with SIGINT ignored; that
    is overridden, because the run handles SIGINT in every phase.
    """
    if _Waiting.active:
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _ignore)
    _Waiting.active, _Waiting.action = True, leave_at_once

    def watch() -> None:
        with writing:  # kept open as long as this thread lives
            while number := reading.recv(1):
                if _Waiting.action is not None and number[0] in STOP_SIGNALS:
                    _Waiting.action(number[0])

    threading.Thread(target=watch, name="signals", daemon=True).start()


def leave_at_once(number: int) -> None:
    """End this process before its first step. Its loading processes notice that and end, too."""
    name = signal.Signals(number).name
    with suppress(OSError, ValueError):
        print(f"Stopped by {name} while starting; nothing was lost. Start again.", file=sys.stderr, flush=True)
    record_exit(EXIT_PREEMPTED, f"Stopped by {name} while starting.")
    os._exit(EXIT_PREEMPTED)


def ignore_stop_signals() -> None:
    """The run has ended, and only its processes have to: a stop signal changes nothing any more."""
    _Waiting.action = None


def _ignore(number: int, frame: Any) -> None:
    """A handler, so that the signal reaches the thread and not the default action."""


@contextmanager
def on_stop_signals(action: Callable[[int], None] | None) -> Iterator[None]:
    """Within the block, a thread calls `action` with the number of each stop signal, instead of ending the process."""
    before, _Waiting.action = _Waiting.action, action
    try:
        yield
    finally:
        _Waiting.action = before


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """The signals that have arrived, in a list that grows. SIGINT after another signal raises KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        with on_stop_signals(None):  # after it, another stage of the run may start
            yield received
    finally:
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
