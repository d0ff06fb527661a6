"""`sessions.jsonl`, which says when and where each run of a download took place, including killed ones."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from data_prep.dataset.dataset_folder import Folder
from data_prep.settings.download_config import FetchConfig
from pipeline.errors import UserError
from pipeline.files import read_tree, write_json

_BEAT_SECONDS = 5.0
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
            "host": socket.gethostname(),
            "worker": fetch.worker,
            "distributor": fetch.distributor,
        }

    def beat(self) -> None:
        """Record the duration of the session; cheap enough to be called often."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._write_state()

    def __enter__(self) -> Journal:
        if self._state.exists():
            self._append(read_tree(self._state))
        self._write_state()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        outcome = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {error}".strip()
        with suppress(OSError):  # the state is kept, and the next session writes its line
            self._append(self._ended("finished" if error is None else outcome))
            self._state.unlink(missing_ok=True)

    def _ended(self, outcome: str) -> dict[str, Any]:
        return {**self._line, "seconds": round(time.monotonic() - self._clock, 1), "outcome": outcome}

    def _write_state(self) -> None:
        self._last_beat = time.monotonic()
        with suppress(OSError):
            write_json(self._state, self._ended("killed"))

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
