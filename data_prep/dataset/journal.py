"""`sessions.jsonl`: when and where each run of a download took place, including killed ones."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from data_prep.dataset.dataset_folder import Folder
from data_prep.settings.download_config import FetchConfig
from pipeline.errors import UserError
from pipeline.files import write_json

_BEAT_SECONDS = 5.0
KILLED = "killed"
_KEYS = {"started", "seconds", "host", "worker", "distributor", "outcome"}


class Journal:
    """One session, as a context manager: its line is written when it ends.

    Until then its state is in the worker's staging folder; the next session writes the line of a killed one. The caller
    must hold the worker's lock. A disk too full for the journal does not stop the download.
    """

    def __init__(self, folder: Folder, fetch: FetchConfig) -> None:
        self._folder = folder
        self._state = folder.staging / "session.json"
        self._clock = self._last_beat = time.monotonic()
        self._line: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": 0.0,
            "host": socket.gethostname(),
            "worker": fetch.worker,
            "distributor": fetch.distributor,
            "outcome": KILLED,
        }

    def beat(self) -> None:
        """Record the duration of the session; cheap enough to be called often."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._write_state()

    def __enter__(self) -> Journal:
        if self._state.exists():
            self._append(_read_state(self._state) or {**self._line, "outcome": f"{KILLED}; its note was damaged"})
        self._write_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            outcome = "finished"
        else:
            outcome = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {error}".strip()
        with contextlib.suppress(OSError):  # the state is kept, and the next session writes its line
            self._append({**self._line, "seconds": self._seconds(), "outcome": outcome})
            self._state.unlink(missing_ok=True)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._clock, 1)

    def _write_state(self) -> None:
        self._last_beat = time.monotonic()
        with contextlib.suppress(OSError):
            write_json(self._state, {**self._line, "seconds": self._seconds()})

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line; a truncated line before it (after a kill or a full disk) is terminated first."""
        with self._folder.sessions.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
            is_cut = bool(end) and file.read(1) != b"\n"
            file.write((b"\n" if is_cut else b"") + json.dumps(line).encode() + b"\n")


def read_sessions(folder: Folder) -> tuple[list[dict[str, Any]], int]:
    """The sessions in order, and the number of damaged lines."""
    sessions, damaged = [], 0
    lines = folder.sessions.read_bytes().splitlines() if folder.sessions.exists() else []
    for line in filter(None, lines):
        try:
            session = json.loads(line)
            if not set(session) >= _KEYS:
                raise ValueError("it lacks a field")
            sessions.append(session)
        except (ValueError, TypeError):
            damaged += 1
    return sessions, damaged


def _read_state(path: Path) -> dict[str, Any] | None:
    try:
        state = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and set(state) >= _KEYS else None
