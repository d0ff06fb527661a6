"""`sessions.jsonl`: when and where each run of a download worked, also the ones that were killed."""

from __future__ import annotations

import json
import socket
import time
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from data_prep.dataset.dataset_folder import Folder
from data_prep.settings.download_config import FetchConfig
from pipeline.errors import UserError
from pipeline.files import write_json

_BEAT_SECONDS = 5.0
KILLED = "killed"


class Journal:
    """One session, as a context manager: its line is written when it ends.

    Until then its state lies in the worker's staging folder; what a killed session left there becomes its line when
    the next one begins. Only for the holder of the worker's lock.
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
        """Note how long the session has lasted; cheap to call often."""
        if time.monotonic() - self._last_beat >= _BEAT_SECONDS:
            self._write_state()

    def __enter__(self) -> Journal:
        if self._state.exists():
            self._append(json.loads(self._state.read_text(encoding="utf-8")))
        self._write_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            outcome = "finished"
        else:
            outcome = str(error) if isinstance(error, UserError) else f"{type(error).__name__} {error}".strip()
        self._append({**self._line, "seconds": self._seconds(), "outcome": outcome})
        self._state.unlink(missing_ok=True)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._clock, 1)

    def _write_state(self) -> None:
        self._last_beat = time.monotonic()
        write_json(self._state, {**self._line, "seconds": self._seconds()})

    def _append(self, line: dict[str, Any]) -> None:
        with self._folder.sessions.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
