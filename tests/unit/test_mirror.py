"""The copy of a run's checkpoints in an object store; tested in memory, in a folder and on an S3 server."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from pipeline.checkpoint import mirror as mirror_module
from pipeline.checkpoint import writer as writer_module
from pipeline.checkpoint.mirror import fetch_newest, refuse_taken
from pipeline.checkpoint.mirror_store import MirrorStore
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.run_files import name_of, read_run_id
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup
from tests.mirrors import fetched, write, writer_of
from tests.training import SMALL, prepare, settings_in, train_here
from tests.written_checkpoints import Towers, failing, save_again, snapshot

SETTINGS = [*SMALL, "samples=80", "data.sources=nowhere"]


def test_a_fresh_machine_resumes_from_the_mirror(tmp_path: Path, url: str, towers: Towers) -> None:
    run = tmp_path / "run"
    events = write(run, url, towers, [1, 2, 3], keep_last=2)
    assert sum("is in the mirror" in event for event in events) == 3
    store = MirrorStore(url, run)
    assert store.names() == ["step-00000002", "step-00000003"]
    assert store.read("latest") == "step-00000003"
    shutil.rmtree(run)
    found, notes = fetched(run, url)
    assert found.step == 3
    assert found.read_rows("u", 3, 6).tolist() == [3.0, 4.0, 5.0]
    assert len(notes) == 1
    fetch_newest(run, url, world=World(), on_event=notes.append)
    assert len(notes) == 1, "a checkpoint that is here already was downloaded again"


def test_a_checkpoint_that_is_written_again_stays_in_the_mirror_meanwhile(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: it was removed before it was uploaded again, although it was the only one there."""
    run = tmp_path / "run"
    write(run, url, towers, [1], keep_last=1)

    def fail(*_: object) -> None:
        raise AssertionError("the only checkpoint in the mirror was removed")

    monkeypatch.setattr(MirrorStore, "remove", fail)
    (event,) = (event for event in write(run, url, towers, [1], keep_last=1) if "mirror" in event)
    assert "is in the mirror" in event


def test_a_damaged_copy_is_replaced_when_its_checkpoint_is_written_again(
    tmp_path: Path, url: str, towers: Towers
) -> None:
    """Regression test: it was said to be in the mirror, by the sizes of its files."""
    run = tmp_path / "run"
    write(run, url, towers, [1])
    store = MirrorStore(url, run)
    weights = f"{store._root}/step-00000001/open_clip_model.safetensors"
    whole = store._files.cat_file(weights)
    store._files.pipe_file(weights, b"x" * len(whole))
    (event,) = (event for event in write(run, url, towers, [1]) if "mirror" in event)
    assert "is in the mirror" in event
    store._files.invalidate_cache()
    assert store._files.cat_file(weights) == whole


@pytest.mark.parametrize(
    ("mirror", "run", "message"),
    [
        ("{0}/mirror", "b[1]", r"b\[1\]/checkpoints has a '\['"),
        ("memory://m*", "run", r"has a '\*', .* rename the mirror or the run's folder"),
        ("s3://bucket/runs", "what?", r"has a '\?'"),
        ("{0}", "run", "would be the run's own folder"),
        ("file://{0}/", "run", "would be the run's own folder"),
        ("s3:/bucket/runs", "run", r"is neither a URL, such as s3://BUCKET/FOLDER, nor a folder"),
        ("s3://", "run", r"is neither a URL"),
        ("file:", "run", r"is neither a URL"),
    ],
)
def test_a_mirror_that_would_be_another_place_is_refused(tmp_path: Path, mirror: str, run: str, message: str) -> None:
    """Regression test: with a bracket no checkpoint was found, and a misspelt URL was a folder of this machine."""
    with pytest.raises(UserError, match=message):
        MirrorStore(mirror.format(tmp_path), tmp_path / run)


@pytest.mark.parametrize("cleaned", [False, True])
def test_an_upload_that_ends_early_never_looks_complete(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch, cleaned: bool
) -> None:
    """Its files are removed if that is possible: they filled the mirror, and nothing lists them."""
    run = tmp_path / "run"
    write(run, url, towers, [1])
    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.0)
    if not cleaned:  # as after a kill
        monkeypatch.setattr(MirrorStore, "remove", lambda self, name: None)
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
    assert store._files.exists(f"{store._root}/step-00000002") != cleaned
    assert store.names() == ["step-00000001"]
    assert store.read("latest") == "step-00000001"
    monkeypatch.undo()
    write(run, url, towers, [3])  # the next checkpoint is uploaded as usual
    assert store.names()[-1] == "step-00000003"


def test_a_file_that_arrives_with_other_contents_is_noticed(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(MirrorStore, "_sha256", lambda self, name: "0" * 64)
    events = write(tmp_path / "run", url, towers, [1])
    assert any("arrived with other contents" in event for event in events)
    assert MirrorStore(url, tmp_path / "run").names() == []


def test_a_damaged_checkpoint_in_the_mirror_is_skipped(tmp_path: Path, towers: Towers) -> None:
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    write(run, url, towers, [1, 2])
    moments = tmp_path / "store" / "run" / "checkpoints" / "step-00000002" / "moments.safetensors"
    moments.write_bytes(moments.read_bytes()[:-1] + b"x")
    shutil.rmtree(run)
    found, notes = fetched(run, url)
    assert found.step == 1
    assert "step-00000002 of the mirror is damaged and was skipped: the contents of moments.safetensors" in notes[0]
    assert not list((run / "checkpoints").glob(".*"))


def test_a_rollback_removes_later_checkpoints_from_the_mirror(tmp_path: Path, url: str, towers: Towers) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1, 2, 3])
    writer_of(run, url, towers).abandon_after(1)
    store = MirrorStore(url, run)
    assert (store.names(), store.read("latest")) == (["step-00000001"], "step-00000001")


def test_a_rollback_that_the_mirror_does_not_follow_is_reported(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: MirrorStore) -> list[str]:
        raise RuntimeError("no credentials")  # not an OSError: client libraries have errors of their own

    monkeypatch.setattr(mirror_module, "PAUSE_SECONDS", 0.0)
    run, events, released = tmp_path / "run", list[str](), threading.Event()
    write(run, url, towers, [1])
    writer = writer_of(run, url, towers, events.append, mirror_minutes=0.001)
    with monkeypatch.context() as patch:
        patch.setattr(MirrorStore, "names", refuse)
        writer.abandon_after(1)
        assert "could not be rolled back (no credentials): remove later steps there" in events.pop()
    original = MirrorStore.upload
    monkeypatch.setattr(MirrorStore, "upload", lambda self, path: (released.wait(30), original(self, path)))
    writer.save(snapshot(towers, 2))
    writer.wait()
    events.clear()
    writer.abandon_after(1)
    assert "could not be rolled back (an upload has taken more than 0 s)" in events[0]
    released.set()
    assert writer._mirror is not None
    assert writer._mirror.wait(30)


def test_an_average_comes_back_from_the_mirror(tmp_path: Path, url: str, towers: Towers) -> None:
    run, events = tmp_path / "run", list[str]()
    writer = writer_of(run, url, towers, events.append)
    writer.save(replace(snapshot(towers, 1), ema=towers[0]))
    writer.close()
    assert any("is in the mirror" in event for event in events)
    shutil.rmtree(run)
    found, _ = fetched(run, url)
    average = found.ema()
    assert average is not None
    assert all(torch.equal(value, towers[0][name]) for name, value in average.items())


def test_an_unfinished_folder_of_the_same_step_is_replaced(tmp_path: Path, url: str, towers: Towers) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1, 2])
    (run / "checkpoints" / "step-00000002" / "checkpoint.json").unlink()
    assert fetched(run, url)[0].step == 2


def test_a_checkpoint_in_the_fallback_folder_is_uploaded_beside_the_best_one(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    writer = writer_of(run, url, towers, keep_last=1)
    writer.save(replace(snapshot(towers, 1), best=True))
    writer.finish()
    original = MirrorStore.upload
    monkeypatch.setattr(MirrorStore, "upload", lambda self, path: (time.sleep(0.3), original(self, path)))
    monkeypatch.setattr(writer_module, "save_tensors", failing(1))
    assert save_again(writer, towers, 2, fallback=str(tmp_path / "spare"))
    writer.close()
    assert (tmp_path / "spare" / f"run-{read_run_id(run)}" / "checkpoints" / "step-00000002").is_dir()
    store = MirrorStore(url, run)
    assert store.names() == ["step-00000001", "step-00000002"]
    assert store.read("best") == "step-00000001"


def test_the_end_of_a_run_waits_for_the_mirror_only_once(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, events = threading.Event(), list[str]()
    monkeypatch.setattr(MirrorStore, "upload", lambda self, path: released.wait(30))
    writer = writer_of(tmp_path / "run", url, towers, events.append, mirror_minutes=0.001)
    writer.save(snapshot(towers, 1))
    writer.finish()
    writer.finish()
    released.set()
    assert writer._mirror is not None
    assert writer._mirror.wait(30)  # its thread would call the next test's `upload`
    assert sum("was not finished in 0.001 minutes" in event for event in events) == 1


def test_a_second_ctrl_c_does_not_wait_for_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, begun = threading.Event(), list[float]()

    def hang(store: MirrorStore, path: Path) -> None:
        if begun:
            return  # a later checkpoint: its signals would reach the test runner
        begun.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(60)

    monkeypatch.setattr(MirrorStore, "upload", hang)
    given = ("samples=4000", "checkpoint.every=1", f"checkpoint.mirror=file://{tmp_path / 'store'}")
    with pytest.raises(KeyboardInterrupt):
        train_here(*settings_in(prepare(tmp_path), "run", *given))
    seconds = time.monotonic() - begun[0]
    released.set()
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join(30)  # it would call the next test's `upload`
    assert seconds < 30


def test_storage_that_does_not_exist_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint.mirror = 'nowhere://x' cannot be used"):
        fetch_newest(tmp_path / "run", "nowhere://x", world=World(), on_event=print)
    run = load_recipe(None, [*SETTINGS, f"output={tmp_path / 'run'}", "checkpoint.mirror=nowhere://x"])
    for rank in (0, 1):
        with (
            pytest.raises(UserError, match=r"checkpoint.mirror = 'nowhere://x' cannot be used"),
            setup(run, world=World(rank=rank, size=2), resume=None),
        ):
            pass


def test_what_answers_without_storing_is_no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: a proxy that answers every request with a page of its own was taken for an empty mirror."""
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda *_, **__: b"<html>")
    run, url = tmp_path / "run", f"file://{tmp_path}/mirror"
    with pytest.raises(UserError, match="returned other bytes than were written"):
        fetch_newest(run, url, world=World(), on_event=print)
    with pytest.raises(UserError, match="returned other bytes than were written"):
        refuse_taken(run, url, resume=None, step=-1, world=World())


def test_an_upload_may_not_take_longer_than_the_other_ranks_wait() -> None:
    limits = ["checkpoint.mirror_minutes=5", "engine.timeout_minutes=5"]
    with pytest.raises(UserError, match=r"mirror_minutes = 5 must be less than engine\.timeout_minutes = 5"):
        load_recipe(None, [*SETTINGS, *limits, "output=x", "checkpoint.mirror=s3://bucket/runs"])
    load_recipe(None, [*SETTINGS, *limits, "output=x"])


def test_a_damaged_checkpoint_is_replaced_by_its_copy(tmp_path: Path, url: str, towers: Towers) -> None:
    run = tmp_path / "run"
    write(run, url, towers, [1, 2])
    for path in run.glob("checkpoints/step-*/moments.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    found, notes = fetched(run, url)
    assert found.step == 2
    assert len(notes) == 1
    assert "was downloaded" in notes[0]


def test_a_file_that_is_missing_in_the_mirror_fails_no_upload(tmp_path: Path, url: str, towers: Towers) -> None:
    run, store = tmp_path / "run", MirrorStore(url, tmp_path / "run")
    write(run, url, towers, [1])
    store._files.rm_file(f"{store._root}/{name_of(1)}/moments.safetensors")
    assert store.problem(name_of(1)) == "moments.safetensors is missing."
    assert "Checkpoint step-00000002 is in the mirror" in " ".join(write(run, url, towers, [2]))
