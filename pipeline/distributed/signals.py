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


def exit_on_stop_signals(action: Callable[[int], None] | None = None) -> None:
    """Until `StopSignals` takes over, a stop signal ends this process at once, or calls `action` with its number.

    Call it in the main thread; again, to change the action.

    A thread does it, because Python runs a signal's handler only between two steps of the main thread, which may be in
    the middle of a long import or waiting for other ranks. A shell may have started the run with SIGINT ignored; that
    is overridden, because the run handles SIGINT in every phase.
    """
    _Waiting.action = action or leave_at_once
    if _Waiting.active:
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # so that it reaches the thread and not the default action
    _Waiting.active = True

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


class StopSignals:
    """The signals that have arrived since `begin`, while the run trains and between its stages.

    SIGINT after another signal raises KeyboardInterrupt, which ends the run with its own exit code.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self.announce: Callable[[int], None] | None = None
        """Called in a thread with the number of the first signal as soon as it arrives: the main thread may be in a
        long call, and takes note of the signal afterwards."""
        self._share: Callable[[int], int] | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._action_before: Callable[[int], None] | None = None

    def __enter__(self) -> StopSignals:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(
        self, announce: Callable[[int], None] | None = None, *, share: Callable[[int], int] | None = None
    ) -> None:
        """Collect signals from now on. Call it in the main thread; again, to change the arguments.

        `share` adds to the number of ranks that have received a signal, and returns it.
        """

        def first(number: int) -> None:
            call, self.announce = self.announce, None
            if call is not None:
                call(number)
                with suppress(RuntimeError):  # rank 0, which keeps the number, has ended
                    if self._share is not None:
                        self._share(1)

        self.announce, self._share = announce, share
        if not self._before:
            self._before = {number: signal.signal(number, self._receive) for number in STOP_SIGNALS}
            self._action_before, _Waiting.action = _Waiting.action, first

    def end(self) -> None:
        """Leave signals to whoever handled them before `begin`, unless `ignore_stop_signals` was called meanwhile."""
        if self._before and _Waiting.action is not None:
            _Waiting.action = self._action_before
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before, self.announce = {}, None

    def on_any_rank(self) -> bool:
        """Whether a signal has arrived on this rank, or is known to have arrived on another one. Not collective."""
        with suppress(RuntimeError):  # as above
            return bool(self.received or (self._share and self._share(0)))
        return False

    def _receive(self, number: int, _: Any) -> None:
        if number == signal.SIGINT and self.received:
            ignore_stop_signals()  # the thread may not yet have seen this one
            raise KeyboardInterrupt
        self.received.append(number)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes that are started inside receive none of these signals; this process gets them at the end of the block.

    Helpers such as multiprocessing's resource tracker and fork server belong to this process's group and would die of a
    signal to the group before the run has written its last checkpoint.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGHUP, signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
