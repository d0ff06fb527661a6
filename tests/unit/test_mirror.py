"""The copy of a run's checkpoints in other storage; tested in memory, in a folder and on an S3 server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from pipeline.checkpoint import writer as writer_module
from pipeline.checkpoint.layout import best_checkpoint, run_id_of
from pipeline.checkpoint.mirror import Mirror
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.run_files import META_NAME, checkpoint_folders, digest_of, name_of, read_run_id, write_run_id
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup
from tests.mirrors import begin, fetch, fetched, write, writer_of
from tests.training import SMALL, prepare, settings_in, train_here
from tests.written_checkpoints import Towers, failing, save_again, snapshot
from tests.written_checkpoints import writer_of as plain_writer

SETTINGS = [*SMALL, "samples=80", "data.sources=nowhere"]
OTHER = "0123456789abcdef"
MOMENTS = "moments.safetensors"


def change_meta(mirror: Mirror, step: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a mirror's checkpoint.json, with a digest that fits, as somebody who can write there could."""
    meta = json.loads(mirror.read(f"{name_of(step)}/{META_NAME}"))
    change(meta)
    meta["digest"] = digest_of(meta)
    mirror._files.pipe_file(f"{name_of(step)}/{META_NAME}", json.dumps(meta).encode())


def test_a_fresh_machine_resumes_from_the_mirror(tmp_path: Path, url: str, towers: Towers) -> None:
    run = tmp_path / "run"
    writer = writer_of(run, url, towers, keep_last=2)
    writer.save(replace(snapshot(towers, 1), best=True))
    writer.finish()
    events = write(run, url, towers, [2, 3, 4], keep_last=2, keep_every=2)
    assert sum("is in the mirror" in event for event in events) == 3
    mirror, average = Mirror(url, run), {name: value + 1 for name, value in towers[0].items()}
    assert mirror.names() == [name_of(step) for step in (1, 2, 3, 4)], "the best one stays, and a multiple of two"
    assert mirror.read("latest") == name_of(4)
    writer = writer_of(run, url, towers, keep_last=1)
    writer.save(replace(snapshot(towers, 5), ema=average))
    writer.finish()
    assert mirror.names() == [name_of(1), name_of(5)]
    shutil.rmtree(run)
    found, notes = fetched(run, url)
    assert found.step == 5
    assert found.read_rows("u", 3, 6).tolist() == [3.0, 4.0, 5.0]
    ema = found.ema()
    assert ema is not None
    assert all(torch.equal(value, average[name]) for name, value in ema.items())
    assert best_checkpoint(run) == run / "checkpoints" / name_of(1)
    assert len(notes) == 1
    assert fetch(run, url) == [], "a checkpoint that is here already was downloaded again"
    for damaged in (MOMENTS, META_NAME):
        (run / "checkpoints" / name_of(5) / damaged).write_bytes(b"x")
        assert len(fetch(run, url)) == 1
        assert fetched(run, url)[0].step == 5


def test_what_is_damaged_or_half_uploaded_is_never_taken_for_whole(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror = tmp_path / "run", Mirror(url, tmp_path / "run")
    write(run, url, towers, [1])
    original, calls = Mirror._sha256, 0

    def dies(mirror: Mirror, path: str) -> str:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ConnectionError("the network is gone")
        return original(mirror, path)

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_sha256", dies)
        (event,) = [event for event in write(run, url, towers, [2]) if "mirror" in event]
        assert "NOT in the mirror" in event
        assert "the network is gone" in event
    assert (mirror.names(), mirror.names(finished=False)) == ([name_of(1)], [name_of(1), name_of(2)])
    shutil.rmtree(run / "checkpoints")
    assert fetched(run, url)[0].step == 1
    write(run, url, towers, [3, 4])  # removes what was left of step 2
    assert mirror.names(finished=False) == [name_of(step) for step in (1, 3, 4)]
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_sha256", lambda *_: "0" * 64)
        assert "arrived with other contents" in " ".join(write(run, url, towers, [5]))
    assert mirror.names() == [name_of(step) for step in (1, 3, 4)]

    weights = f"{name_of(3)}/open_clip_model.safetensors"
    whole = mirror._files.cat_file(weights)
    for step, file in ((3, weights), (4, f"{name_of(4)}/{MOMENTS}")):
        mirror._files.pipe_file(file, b"x" * len(mirror._files.cat_file(file)))
        assert mirror.names()[-1] == name_of(4), step
    shutil.rmtree(run / "checkpoints")
    found, notes = fetched(run, url)
    assert found.step == 1
    assert f"{name_of(4)} of the mirror is damaged and was skipped: the contents of {MOMENTS}" in notes[0]
    assert not list((run / "checkpoints").glob(".*"))
    write(run, url, towers, [3])  # again: what is damaged is replaced
    assert mirror._files.cat_file(weights) == whole


def test_a_checkpoint_that_is_written_again_stays_in_the_mirror_meanwhile(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: it was removed before it was uploaded again, although it was the only one there."""
    write(tmp_path / "run", url, towers, [1], keep_last=1)
    monkeypatch.setattr(Mirror, "remove", lambda *_: pytest.fail("the only checkpoint in the mirror was removed"))
    assert "is in the mirror" in write(tmp_path / "run", url, towers, [1], keep_last=1)[-1]


@pytest.mark.parametrize(
    "text",
    [b"[]", b"7", b'{"files": []}', b"\xff", b"[" * 100_000, b"", b'{"config": 7}'],
)
def test_a_checkpoint_json_that_is_none_is_skipped(tmp_path: Path, url: str, towers: Towers, text: bytes) -> None:
    run, mirror = tmp_path / "run", Mirror(url, tmp_path / "run")
    write(run, url, towers, [1, 2])
    mirror._files.pipe_file(f"{name_of(2)}/{META_NAME}", text)
    mirror._files.pipe_file("best", b"\xff")
    shutil.rmtree(run)
    found, notes = fetched(run, url)
    assert found.step == 1
    assert "step-00000002 of the mirror is damaged and was skipped" in notes[0]
    assert "is in the mirror" in write(run, url, towers, [2])[-1]


def test_the_mirror_of_another_run_is_refused(tmp_path: Path, url: str, towers: Towers) -> None:
    first, other, mirror = tmp_path / "one" / "run", tmp_path / "other" / "run", Mirror(url, tmp_path / "run")
    write(first, url, towers, [1, 2])
    with pytest.raises(UserError, match="has checkpoints: add --resume latest"):
        begin(other, url)
    with pytest.raises(UserError, match=r"later checkpoints than old \(step-00000002\)"):
        begin(first, url, resume="old", step=1)
    begin(first, url, resume="old", step=2)
    begin(tmp_path / "third", url)
    for step in (1, 9):
        with pytest.raises(
            UserError,
            match=rf"belongs to run {read_run_id(first)}, and .* is a new one; --resume latest continues that",
        ):
            begin(other, url, resume="elsewhere/step-00000001", step=step)
    write_run_id(other, OTHER)
    refused = rf"belongs to run {read_run_id(first)}, and .* is run {OTHER}"
    with pytest.raises(UserError, match=refused):
        begin(other, url, resume="elsewhere", step=9)
    with pytest.raises(UserError, match=refused):
        fetch(other, url)
    assert not (other / "checkpoints").exists()
    events = write(other, url, towers, [3], keep_last=1)  # as if both had begun before either had a checkpoint
    assert f"NOT in the mirror {mirror.url} (OSError: it belongs to run {read_run_id(first)}" in events[-1]
    writer_of(other, url, towers, events.append).abandon_after(1)
    assert "could not be rolled back" in events[-1]
    assert (mirror.names(), mirror.read("latest")) == ([name_of(1), name_of(2)], name_of(2))
    change_meta(mirror, 1, lambda meta: meta.update(run_id=OTHER))
    with pytest.raises(UserError, match=f"belongs to run {OTHER}"):
        fetch(tmp_path / "third" / "run", url)


def test_another_runs_checkpoint_of_the_same_step_is_kept(tmp_path: Path, url: str, towers: Towers) -> None:
    run, other = tmp_path / "run", tmp_path / "other" / "run"
    write(run, url, towers, [1, 3])
    write_run_id(other, OTHER)
    writer = plain_writer(other, towers)
    writer.save(snapshot(towers, 3))
    writer.wait()
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    found, notes = fetched(run, url)
    assert (found.step, found.run_id) == (3, read_run_id(run))
    assert f"step-00000003 was written by another run ({OTHER}) and is step-00000003.run-{OTHER} now" in notes[0]
    assert (run / "checkpoints" / f"step-00000003.run-{OTHER}" / META_NAME).is_file()


@pytest.mark.parametrize("name", ["../../outside", "ema/../../../outside", "{abs}", "."])
def test_a_mirror_cannot_write_outside_the_run(tmp_path: Path, url: str, towers: Towers, name: str) -> None:
    run, name = tmp_path / "deep" / "run", name.format(abs=tmp_path / "outside")
    write(run, url, towers, [1, 2])
    change_meta(Mirror(url, run), 2, lambda meta: meta["files"].update({name: {"bytes": 0, "sha256": "0"}}))
    shutil.rmtree(run)
    before = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    found, notes = fetched(run, url)
    assert found.step == 1
    assert "only plain names" in notes[0]
    after = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
    assert all(path.is_relative_to(run) for path in after - before)


@pytest.mark.parametrize("name", ["/../../precious", ".", "..", "{abs}", "step-00000001/../../../../precious"])
def test_a_name_in_best_deletes_nothing(tmp_path: Path, url: str, towers: Towers, name: str) -> None:
    run, precious = tmp_path / "run", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("ten years")
    write(run, url, towers, [1])
    Mirror(url, run).point("best", name.format(abs=precious))
    shutil.rmtree(run)
    assert fetched(run, url)[0].step == 1
    assert not (run / "checkpoints" / "best").exists()
    write_text(run / "checkpoints" / "best", name.format(abs=precious))
    assert best_checkpoint(run) is None
    write(run, url, towers, [2, 3], keep_last=1)
    assert (precious / "thesis").read_text() == "ten years"
    assert [path.name for path in checkpoint_folders(run)] == ["step-00000003"]


def test_ids_in_a_mirror_are_no_paths(tmp_path: Path, url: str, towers: Towers) -> None:
    run, mirror = tmp_path / "run", Mirror(url, tmp_path / "run")
    write(run, url, towers, [1])
    change_meta(mirror, 1, lambda meta: meta.update(run_id="x/../../elsewhere"))
    shutil.rmtree(run)
    assert "damaged and was skipped: in checkpoint.json, run_id is wrong" in fetch(run, url)[0]
    assert (mirror.belongs_to(), run_id_of(run)) == ("", "")


def test_a_rollback_removes_later_checkpoints_from_the_mirror(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror, events, released = tmp_path / "run", Mirror(url, tmp_path / "run"), list[str](), threading.Event()
    write(run, url, towers, [1, 2, 3])
    writer = writer_of(run, url, towers, events.append, mirror_minutes=0.001)
    writer.abandon_after(1)
    assert (mirror.names(), mirror.read("latest")) == ([name_of(1)], name_of(1))
    original = Mirror.upload
    monkeypatch.setattr(Mirror, "upload", lambda self, path: (released.wait(30), original(self, path)))
    writer.save(snapshot(towers, 2))
    writer.wait()
    events.clear()
    writer.abandon_after(1)
    assert "could not be rolled back (an upload has taken more than 0 s): remove later steps there" in events[0]
    released.set()
    assert writer._uploads is not None
    assert writer._uploads.wait(30)


def test_a_checkpoint_in_the_fallback_folder_is_uploaded_beside_the_best_one(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mirror = tmp_path / "run", Mirror(url, tmp_path / "run")
    writer = writer_of(run, url, towers, keep_last=1)
    writer.save(replace(snapshot(towers, 1), best=True))
    writer.finish()
    original = Mirror.upload
    monkeypatch.setattr(Mirror, "upload", lambda self, path: (time.sleep(0.3), original(self, path)))
    monkeypatch.setattr(writer_module, "save_tensors", failing(1))
    assert save_again(writer, towers, 2, fallback=str(tmp_path / "spare"))
    writer.finish()
    assert (tmp_path / "spare" / f"run-{read_run_id(run)}" / "checkpoints" / "step-00000002").is_dir()
    assert (mirror.names(), mirror.read("best")) == ([name_of(1), name_of(2)], name_of(1))


def test_the_end_of_a_run_waits_for_the_mirror_only_once(
    tmp_path: Path, url: str, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, events = threading.Event(), list[str]()
    monkeypatch.setattr(Mirror, "upload", lambda self, path: released.wait(30))
    writer = writer_of(tmp_path / "run", url, towers, events.append, mirror_minutes=0.001)
    writer.save(snapshot(towers, 1))
    writer.finish()
    writer.finish()
    released.set()
    assert writer._uploads is not None
    assert writer._uploads.wait(30)  # its thread would call the next test's `upload`
    assert sum("was not finished in 0.001 minutes" in event for event in events) == 1


def test_a_second_ctrl_c_does_not_wait_for_the_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, begun = threading.Event(), list[float]()

    def hang(mirror: Mirror, path: Path) -> None:
        if begun:
            return  # a later checkpoint: its signals would reach the test runner
        begun.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(60)

    monkeypatch.setattr(Mirror, "upload", hang)
    given = ("samples=4000", "checkpoint.every=1", f"checkpoint.mirror=file://{tmp_path / 'store'}")
    with pytest.raises(KeyboardInterrupt):
        train_here(*settings_in(prepare(tmp_path), "run", *given))
    seconds = time.monotonic() - begun[0]
    released.set()
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join(30)  # it would call the next test's `upload`
    assert seconds < 30


@pytest.mark.parametrize(
    ("mirror", "run", "message"),
    [
        ("{0}/mirror", "b[1]", r"b\[1\]/checkpoints has one of \*, \? and \["),
        ("memory://m*", "run", r"has one of .* rename the mirror or the run"),
        ("{0}", "run", "would be the run's own folder"),
        ("file://{0}/", "run", "would be the run's own folder"),
        ("s3:/bucket/runs", "run", r"is neither a URL, such as s3://BUCKET/FOLDER, nor a folder"),
        ("s3://", "run", r"is neither a URL"),
        ("file:", "run", r"is neither a URL"),
        ("nowhere://x", "run", "checkpoint.mirror = 'nowhere://x' cannot be used"),
    ],
)
def test_a_mirror_that_would_be_another_place_is_refused(tmp_path: Path, mirror: str, run: str, message: str) -> None:
    """Regression test: with a bracket no checkpoint was found, and a misspelt URL was a folder of this machine."""
    mirror = mirror.format(tmp_path)
    with pytest.raises(UserError, match=message):
        Mirror(mirror, tmp_path / run)
    config = load_recipe(None, [*SETTINGS, f"output={tmp_path / run}", f"checkpoint.mirror='{mirror}'"])
    for rank in (0, 1):
        with pytest.raises(UserError, match=message), setup(config, world=World(rank=rank, size=2), resume=None):
            pass


def test_what_answers_without_storing_is_no_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: a proxy that answers every request with a page of its own was taken for an empty mirror."""
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda *_, **__: b"<html>")
    for start in (fetch, begin):
        with pytest.raises(UserError, match="returned other bytes than were written"):
            start(tmp_path / "run", f"file://{tmp_path}/mirror")
