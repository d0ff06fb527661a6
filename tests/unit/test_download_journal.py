"""The journal has a line for every session, including killed ones, with its running time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep import ingest
from data_prep.dataset.dataset_folder import Folder
from data_prep.ingest import journal
from data_prep.settings.download_config import FetchConfig
from pipeline.errors import UserError


def lines(folder: Folder) -> list[dict]:
    return [json.loads(line) for line in folder.sessions.read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock that the journal reads, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(ingest, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    return now


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make()
    return folder


def work(folder: Folder, clock: list[float], seconds: float, error: BaseException) -> None:
    with journal(folder, FetchConfig()):
        clock[0] += seconds
        raise error


def test_killed_stopped_and_finished_sessions_each_have_one_line(folder, clock):
    killed = journal(folder, FetchConfig())
    beat = killed.__enter__()
    for _ in range(30):  # killed here, without leaving the context
        clock[0] += 1
        beat()
    assert not folder.sessions.exists()

    for error, seconds in ((KeyboardInterrupt(), 2), (UserError("Paused: no network."), 0)):
        with pytest.raises(type(error)):
            work(folder, clock, seconds, error)
    with journal(folder, FetchConfig(distributor="ray")):
        clock[0] += 7
    assert [(line["outcome"], line["seconds"]) for line in lines(folder)] == [
        ("killed", 30.0),
        ("KeyboardInterrupt", 2.0),
        ("Paused: no network.", 0.0),
        ("finished", 7.0),
    ]
    assert lines(folder)[-1]["distributor"] == "ray"
