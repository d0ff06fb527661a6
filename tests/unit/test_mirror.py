"""The copy of a run's checkpoints in an object store; tested in memory and in a folder."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import mirror as mirror_module
from pipeline.checkpoint.mirror import MirrorStore, fetch_newest, kept_names
from pipeline.checkpoint.reader import find_checkpoint
from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.unit.test_checkpoint import Towers, snapshot, towers  # noqa: F401 (a fixture)


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}/runs" if request.param == "memory" else f"file://{tmp_path}/store"


def write(run: Path, url: str, towers: Towers, steps: list[int], **settings: Any) -> list[str]:  # noqa: F811
    events: list[str] = []
    config = CheckpointConfig(every=1, mirror=url, **settings)
    writer = CheckpointWriter(run, config=config, world=World(), architecture=towers[1], on_event=events.append)
    for step in steps:
        writer.save(snapshot(towers, step))
        writer.finish()
    return events


def test_a_fresh_machine_resumes_from_the_mirror(tmp_path: Path, url: str, towers: Towers) -> None:  # noqa: F811
    run = tmp_path / "run"
    events = write(run, url, towers, [1, 2, 3], keep_last=2)
    assert sum("is in the mirror" in event for event in events) == 3
    store = MirrorStore(url, run)
    assert store.names() == ["step-00000002", "step-00000003"]
    assert store.read("latest") == "step-00000003"
    shutil.rmtree(run)
    notes: list[str] = []
    fetch_newest(run, url, world=World(), on_event=notes.append)
    found = find_checkpoint(run, "latest", on_event=notes.append)
    assert found is not None
    assert found.step == 3
    assert found.read_rows("u", 3, 6).tolist() == [3.0, 4.0, 5.0]
    assert len(notes) == 1
    fetch_newest(run, url, world=World(), on_event=notes.append)
    assert len(notes) == 1, "a checkpoint that is here already was downloaded again"


def test_an_upload_that_is_killed_never_looks_complete(
    tmp_path: Path,
    url: str,
    towers: Towers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1])
    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.0)
    original, calls = MirrorStore._sha256, 0

    def dies(self: MirrorStore, name: str) -> str:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise ConnectionError("the network is gone")
        return original(self, name)

    monkeypatch.setattr(MirrorStore, "_sha256", dies)
    events = write(run, url, towers, [2])
    assert any("is NOT in the mirror" in event and "the network is gone" in event for event in events)
    store = MirrorStore(url, run)
    assert store.names() == ["step-00000001"]
    assert store.read("latest") == "step-00000001"
    monkeypatch.undo()
    write(run, url, towers, [3])  # the next checkpoint is uploaded as usual
    assert store.names()[-1] == "step-00000003"


def test_a_file_that_arrives_with_other_contents_is_noticed(
    tmp_path: Path,
    url: str,
    towers: Towers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(MirrorStore, "_sha256", lambda self, name: "0" * 64)
    events = write(tmp_path / "run", url, towers, [1])
    assert any("arrived with other contents" in event for event in events)
    assert MirrorStore(url, tmp_path / "run").names() == []


def test_a_damaged_checkpoint_in_the_mirror_is_skipped(tmp_path: Path, towers: Towers) -> None:  # noqa: F811
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    write(run, url, towers, [1, 2])
    moments = tmp_path / "store" / "run" / "checkpoints" / "step-00000002" / "moments.safetensors"
    moments.write_bytes(moments.read_bytes()[:-1] + b"x")
    shutil.rmtree(run)
    notes: list[str] = []
    fetch_newest(run, url, world=World(), on_event=notes.append)
    found = find_checkpoint(run, "latest", on_event=notes.append)
    assert found is not None
    assert found.step == 1
    assert "step-00000002 of the mirror is damaged and was skipped: the contents of moments.safetensors" in notes[0]
    assert not list((run / "checkpoints").glob(".*"))


def test_a_rollback_removes_later_checkpoints_from_the_mirror(
    tmp_path: Path,
    url: str,
    towers: Towers,  # noqa: F811
) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1, 2, 3])
    config = CheckpointConfig(mirror=url)
    writer = CheckpointWriter(run, config=config, world=World(), architecture=towers[1], on_event=print)
    writer.abandon_after(1)
    store = MirrorStore(url, run)
    assert (store.names(), store.read("latest")) == (["step-00000001"], "step-00000001")


def test_storage_that_does_not_exist_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint.mirror = 'nowhere://x' cannot be used"):
        fetch_newest(tmp_path / "run", "nowhere://x", world=World(), on_event=print)


def test_what_is_kept() -> None:
    names = [f"step-{step:08d}" for step in (10, 20, 30, 40)]
    assert kept_names(names, keep_last=1, keep_every=None) == {names[3]}
    assert kept_names(names, keep_last=1, keep_every=20, best=names[0]) == {names[0], names[1], names[3]}
