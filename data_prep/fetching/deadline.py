"""A time limit for whole attempts, including connections, handshakes, headers, redirects and bodies.

A socket's own time-out restarts with every byte, so a server that sends byte by byte never exceeds it. Here, one thread
shuts down the sockets of an attempt whose time is over; reads from them then return end-of-stream.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Attempt:
    """One attempt in progress. `is_late` means that it was cut off, even if its response looks complete."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds
        self.is_late = False
        # Copies of the descriptors: TLS takes the original out of its socket object.
        self.sockets: list[socket.socket] = []


class Deadlines:
    """Cuts off every attempt after a fixed number of seconds. Name look-ups have no socket and cannot be cut off.

    The thread starts with the first attempt and sleeps while there is none.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._changed = threading.Condition()
        # In the order of their deadlines, because all have the same time limit.
        self._attempts: dict[Attempt, None] = {}
        self._mine = threading.local()
        self._is_watched = False

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Apply the time limit to connections that this thread makes inside the block."""
        with self._changed:
            attempt = self._mine.attempt = Attempt(self._seconds)
            self._attempts[attempt] = None
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, daemon=True, name="deadlines").start()
            self._changed.notify()
        try:
            yield attempt
        finally:
            with self._changed:
                self._attempts.pop(attempt, None)
                for copy in attempt.sockets:
                    copy.close()
            self._mine.attempt = None

    def over(self, connect: Callable[..., socket.socket]) -> Callable[..., socket.socket]:
        """Wrap `connect` for use inside `attempt`.

        The socket is shut down when the attempt's time is over, and connecting takes no longer than the time left.

        Raises:
            TimeoutError: The time is already over.
        """

        def timed(
            address: tuple[str, int], timeout: float, source_address: tuple[str, int] | None = None
        ) -> socket.socket:
            attempt: Attempt = self._mine.attempt
            left = attempt.ends - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no time is left of {self._seconds:g} s")
            connection = connect(address, min(timeout, left), source_address)
            connection.settimeout(timeout)
            with self._changed:
                attempt.sockets.append(connection.dup())
                if attempt.is_late:
                    _shut(attempt)
            return connection

        return timed

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._attempts)
                first = next(iter(self._attempts))
            time.sleep(max(0.0, first.ends - time.monotonic()))
            with self._changed:
                if first in self._attempts:
                    del self._attempts[first]
                    first.is_late = True
                    _shut(first)


def _shut(attempt: Attempt) -> None:
    for copy in attempt.sockets:
        with contextlib.suppress(OSError):  # the peer has already closed it
            copy.shutdown(socket.SHUT_RDWR)
