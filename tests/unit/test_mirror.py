"""The copy of a run's checkpoints in other storage; tested in memory and in a folder."""

import json
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from pipeline.checkpoint import writer as writer_module
from pipeline.checkpoint.layout import best_checkpoint
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.writer import Snapshot
from pipeline.distributed.world import WRITER, World
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.run_files import META_NAME, checkpoint_folders, digest_of, name_of, read_run_id
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup
from tests.launch import wait_for
from tests.training import SMALL, prepare, settings_in, train_here
from tests.written_checkpoints import begin, failing, fetch, fetched, snapshot, steps_in, write, writer_of

SETTINGS = [*SMALL, "samples=80", "data.sources=nowhere"]
OTHER = "0123456789abcdef"
MOMENTS = "moments.safetensors"


def change_meta(mirror, step, change):
    """Change a mirror's checkpoint.json, with a digest that fits, as somebody who can write there could."""
    meta = json.loads(mirror.read(f"{name_of(step)}/{META_NAME}"))
    change(meta)
    meta["digest"] = digest_of(meta)
    mirror._files.pipe_file(f"{name_of(step)}/{META_NAME}", json.dumps(meta).encode())


def test_a_fresh_machine_resumes_from_the_mirror(tmp_path, url, towers):
    run = tmp_path / "run"
    write(run, towers, [replace(snapshot(towers, 1), best=True)], mirror=url)
    events = write(run, towers, [2, 3, 4], mirror=url, keep_last=2, keep_every=2)
    assert sum("is in the mirror" in event for event in events) == 3
    mirror, average = Mirror(url, run), {name: value + 1 for name, value in towers[0].items()}
    assert steps_in(mirror) == [1, 2, 3, 4], "the best one stays, and a multiple of two"
    write(run, towers, [replace(snapshot(towers, 5), ema=average)], mirror=url, keep_last=1)
    assert steps_in(mirror) == [1, 5]
    shutil.rmtree(run)
    found, notes = fetched(run, url)
    assert found.step == 5
    assert found.read_rows("u", 3, 6).tolist() == [3.0, 4.0, 5.0]
    ema = found.ema()
    assert all(torch.equal(value, average[name]) for name, value in ema.items())
    assert best_checkpoint(run) == run / "checkpoints" / name_of(1)
    assert len(notes) == 1
    assert fetch(run, url) == [], "a checkpoint that is here already was downloaded again"
    for damaged in (MOMENTS, META_NAME):
        (run / "checkpoints" / name_of(5) / damaged).write_bytes(b"x")
        assert len(fetch(run, url)) == 1
        assert fetched(run, url)[0].step == 5


def test_what_is_damaged_or_half_uploaded_is_never_taken_for_whole(tmp_path, url, towers, monkeypatch):
    run, mirror = tmp_path / "run", Mirror(url, tmp_path / "run")
    write(run, towers, [1], mirror=url)
    original, size, files = Mirror._make_folder, type(mirror._files).size, list[str]()

    def dies(mirror, path):
        files.append(path)
        if len(files) == 4:
            raise ConnectionError("the network is gone")
        original(mirror, path)

    for method, broken, why in (
        (Mirror._make_folder, dies, "ConnectionError: the network is gone"),
        (size, lambda *_: 3, "arrived with another size"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Mirror if method is original else type(mirror._files), method.__name__, broken)
            (event,) = [event for event in write(run, towers, [2], mirror=url) if "mirror" in event]
        assert "step-00000002 is NOT in the mirror" in event
        assert why in event
        assert event.endswith("Training continues.")
        assert mirror._files.exists(f"{name_of(2)}/open_clip_config.json")
        assert steps_in(mirror) == [1]
    meta = mirror.read(f"{name_of(1)}/{META_NAME}")
    for file, text in (
        (MOMENTS, "x" * mirror._files.size(f"{name_of(1)}/{MOMENTS}")),
        (MOMENTS, None),
        *((META_NAME, text) for text in ("[]", "7", '{"files": []}', "\udcff", "[" * 100_000, '{"config": 7}', meta)),
    ):
        write(run, towers, [2], mirror=url)  # again: what is damaged is replaced
        mirror._files.rm_file(f"{name_of(2)}/{file}")
        if text is not None:
            mirror._files.pipe_file(f"{name_of(2)}/{file}", text.encode(errors="surrogateescape"))
        mirror._files.pipe_file("best", b"\xff")
        shutil.rmtree(run / "checkpoints")
        found, notes = fetched(run, url)
        assert found.step == 1, text
        assert "step-00000002 of the mirror is damaged and was skipped" in notes[0]
        assert file in notes[0] or "format" in notes[0]
        assert not list((run / "checkpoints").glob(".*"))


def test_a_download_that_fails_ends_the_start(tmp_path, towers, monkeypatch):
    """Regression test: an older checkpoint was taken when the network failed during the download of the newest."""
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    write(run, towers, [1, 2], mirror=url)
    shutil.rmtree(run)
    monkeypatch.setattr(LocalFileSystem, "get_file", lambda *_, **__: 1 // 0)
    with pytest.raises(UserError, match=r"cannot be used \(ZeroDivisionError"):
        fetch(run, url)


def test_the_mirror_of_another_run_is_refused(tmp_path, towers):
    url, first, other = f"file://{tmp_path}/store", tmp_path / "one" / "run", tmp_path / "other" / "run"
    write(first, towers, [1, 2], mirror=url)
    own = rf"belongs to run {read_run_id(first)}, and .*"
    begin(first, url, resume="old", step=2)
    begin(tmp_path / "third", url)
    for run, resume, step, refused in (
        (other, None, -1, "has checkpoints: add --resume latest"),
        (first, "old", 1, r"later checkpoints than old \(step-00000002\)"),
        (other, "elsewhere/step-00000001", 1, f"{own} is a new one; --resume latest continues that"),
        (other, "elsewhere/step-00000001", 9, f"{own} is a new one; --resume latest continues that"),
    ):
        with pytest.raises(UserError, match=refused):
            begin(run, url, resume=resume, step=step)
    write_text(other / "run_id", OTHER)
    for start in (lambda: begin(other, url, resume="elsewhere", step=9), lambda: fetch(other, url)):
        with pytest.raises(UserError, match=rf"{own} is run {OTHER}"):
            start()
    assert not (other / "checkpoints").exists()
    events = write(other, towers, [1], mirror=url, keep_last=1)  # as if both had begun before either had a checkpoint
    assert "NOT in the mirror" in events[-1]
    assert f"belongs to run {read_run_id(first)}" in events[-1]
    mirror = Mirror(url, first)
    assert steps_in(mirror) == [1, 2]
    change_meta(mirror, 1, lambda meta: meta.update(run_id=OTHER))
    with pytest.raises(UserError, match=f"belongs to run {OTHER}"):
        fetch(tmp_path / "third" / "run", url)


def test_a_mirror_cannot_name_what_is_outside_the_run(tmp_path, towers):
    run, url, precious = tmp_path / "deep" / "run", f"file://{tmp_path}/store", tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").write_text("ten years")
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda meta, name=name: meta["files"].update({name: {"bytes": 0, "sha256": "0"}}), "only plain names")
        for name in ("../../outside", "ema/../../../outside", str(tmp_path / "outside"), ".")
    ]
    for change, why in (*changes, (lambda meta: meta.update(run_id="x/../../elsewhere"), "run_id is wrong")):
        write(run, towers, [1, 2], mirror=url)
        mirror = Mirror(url, run)
        change_meta(mirror, 2, change)
        shutil.rmtree(run)
        before = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
        found, notes = fetched(run, url)
        assert found.step == 1
        assert why in notes[0]
        after = {path for path in tmp_path.rglob("*") if "store" not in path.parts}
        assert all(path.is_relative_to(run) for path in after - before)
    for name in ("/../../precious", ".", "..", str(precious), "step-00000001/../../../../precious"):
        mirror._files.pipe_file("best", name.encode())
        shutil.rmtree(run)
        assert fetched(run, url)[0].step == 1
        assert not (run / "checkpoints" / "best").exists()
        write_text(run / "checkpoints" / "best", name)
        assert best_checkpoint(run) is None
        write(run, towers, [2, 3], mirror=url, keep_last=1)
        assert (precious / "thesis").read_text() == "ten years"
        assert [path.name for path in checkpoint_folders(run)] == ["step-00000003"]
        write(run, towers, [1], mirror=url)


@pytest.fixture
def released(monkeypatch):
    """Uploads wait until it is set."""
    event, upload = threading.Event(), Mirror.upload
    monkeypatch.setattr(Mirror, "upload", lambda self, path: (event.wait(30), upload(self, path)))
    return event


def test_a_rollback_removes_later_checkpoints_from_the_mirror(tmp_path, towers, released):
    run, place = tmp_path / "run", {"mirror": f"file://{tmp_path}/store"}
    released.set()
    write(run, towers, [1, 2], **place)
    released.clear()
    writer = writer_of(run, towers, **place)
    writer.save(snapshot(towers, 3))
    writer.wait()
    writer.abandon_after(1)  # while the third one is uploaded
    released.set()
    writer.finish()
    assert steps_in(Mirror(place["mirror"], run)) == [1]
    write(run, towers, [2], **place)
    writer = writer_of(run, towers, **place)
    writer.abandon_after(1)  # before it has written anything
    writer.finish()
    assert steps_in(Mirror(place["mirror"], run)) == [1]


def test_uploads_hold_no_snapshots_and_are_waited_for_after_a_failure(tmp_path, towers, monkeypatch, released):
    run, url = tmp_path / "run", f"file://{tmp_path}/store"
    writer, held = writer_of(run, towers, mirror=url), list[weakref.ref[Snapshot]]()
    for step in (1, 2):
        given = snapshot(towers, step)
        held.append(weakref.ref(given))
        writer.save(given)
        del given
        writer.wait()
    wait_for(lambda: not any(reference() for reference in held), "snapshots are freed", seconds=30, pause=0.01)
    monkeypatch.setattr(writer_module, "save_tensors", failing(1))
    writer.save(snapshot(towers, 3))
    writer.wait()
    threading.Timer(0.2, released.set).start()
    writer.finish()
    assert writer.problem
    assert steps_in(Mirror(url, run)) == [1, 2]


def test_the_end_of_a_run_waits_for_the_mirror_only_once(tmp_path, towers, released):
    events, settings = list[str](), {"mirror": f"file://{tmp_path}/store", "mirror_minutes": 0.001}
    writer = writer_of(tmp_path / "run", towers, on_event=events.append, **settings)
    writer.save(snapshot(towers, 1))
    writer.finish()
    writer.finish()
    released.set()
    writer._thread.join(30)  # it would call the next test's `upload`
    assert sum("was not finished in 0.001 minutes" in event for event in events) == 1


def test_a_second_ctrl_c_does_not_wait_for_the_mirror(tmp_path, monkeypatch):
    released, begun = threading.Event(), list[float]()

    def hang(mirror, path):
        if not begun:  # else a later checkpoint: its signals would reach the test runner
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
        if thread.name == WRITER:
            thread.join(30)  # it would call the next test's `upload`
    assert seconds < 30


@pytest.mark.parametrize(
    ("mirror", "run", "message"),
    [
        ("{0}/mirror", "b[1]", r"b\[1\]/checkpoints must be a URL"),
        ("memory://m*", "run", "nor the run may have one of"),
        ("{0}", "run", "a folder other than the run's own"),
        ("file://{0}/", "run", "a folder other than the run's own"),
        ("s3:/bucket/runs", "run", "must be a URL, such as s3://BUCKET/FOLDER"),
        ("s3://", "run", "must be a URL"),
        ("file:", "run", "must be a URL"),
        ("nowhere://x", "run", "checkpoint.mirror = 'nowhere://x' cannot be used"),
    ],
)
def test_a_mirror_that_would_be_another_place_is_refused(tmp_path, mirror, run, message):
    """Regression test: with a bracket no checkpoint was found, and a misspelt URL was a folder of this machine."""
    mirror = mirror.format(tmp_path)
    with pytest.raises(UserError, match=message):
        Mirror(mirror, tmp_path / run)
    config = load_recipe(None, [*SETTINGS, f"output={tmp_path / run}", f"checkpoint.mirror='{mirror}'"])
    with pytest.raises(UserError, match=message), setup(config, world=World(), resume=None):
        pass
