"""Which checkpoints are damaged, foreign or outdated, and that no other one is skipped or removed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import writer as writer_module
from pipeline.checkpoint.layout import best_checkpoint
from pipeline.checkpoint.reader import agreed_checkpoint, damage, open_checkpoint
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.run_files import (
    checkpoint_folders,
    digest_of,
    finished_checkpoints,
    name_of,
    read_meta,
    read_run_id,
    step_of,
)
from tests.written_checkpoints import latest, snapshot, write, writer_of


def change_meta(run, step, change):
    """Change a checkpoint.json and its digest."""
    path = run / "checkpoints" / name_of(step) / "checkpoint.json"
    meta = json.loads(path.read_text())
    del meta["digest"]
    change(meta)
    path.write_text(json.dumps({**meta, "digest": digest_of(meta)}))
    return path.parent


def test_an_altered_list_of_files_is_damage(tmp_path, towers):
    write(tmp_path, towers, [1])
    path = tmp_path / "checkpoints" / name_of(1) / "checkpoint.json"
    whole = json.loads(path.read_text())
    for change in ({"counter": 0}, {"samples": 0}, {"files": None}, {"digest": None}):
        path.write_text(json.dumps({key: value for key, value in {**whole, **change}.items() if value is not None}))
        assert "checkpoint.json do not match" in damage(path.parent)


MOMENTS, WEIGHTS = "moments.safetensors", "open_clip_model.safetensors"
WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"no {key}": (lambda meta, key=key: meta.pop(key)) for key in ("step", "counter", "samples", "files", "data")},
    **{
        f"{key} of a wrong type": (lambda meta, key=key: meta.update({key: "7"}))
        for key in ("step", "counter", "files")
    },
    "no config": lambda meta: meta.pop("config"),
    "another step": lambda meta: meta.update(step=1, samples=8),
    "steps without samples": lambda meta: meta.update(step=2, samples=9),
    "negative": lambda meta: meta.update(counter=-1),
    "a position without its batch": lambda meta: meta["data"].pop("batch"),
    "an order hash that is no number": lambda meta: meta["data"].update(order_hash="x"),
    "files without moments": lambda meta: meta["files"].pop(MOMENTS),
    "files without weights": lambda meta: meta["files"].pop(WEIGHTS),
    "an average without weights": lambda meta: meta.update(ema_updates=3),
    "an average of an unknown number of steps": lambda meta: meta.update(ema_updates=None),
    "a file without its size": lambda meta: meta["files"][MOMENTS].pop("bytes"),
    "rows of a wrong type": lambda meta: meta["files"]["rows-00000-00000.safetensors"].update(rows=[1]),
    "a list in place of an entry": lambda meta: meta["files"].update({MOMENTS: []}),
    "a file elsewhere": lambda meta: meta["files"].update({"../x": meta["files"][MOMENTS]}),
    "faults of a wrong type": lambda meta: meta.update(faults={"skipped": "x"}),
    "no id": lambda meta: meta.pop("run_id"),
    "an id that is a path": lambda meta: meta.update(run_id="x/../../elsewhere"),
    "a history of a wrong type": lambda meta: meta.update(validation=[1]),
    "a number for no tensor": lambda meta: meta.update(counter=10**400),
    "a position beyond any": lambda meta: meta["data"].update(batch=10**400),
    "a rollback to no step": lambda meta: meta.update(
        faults={"skipped": 0, "rollbacks": 1, "in_a_row": 0, "rolled_back_to": "x"}
    ),
}


def test_a_checkpoint_json_that_cannot_be_continued_is_skipped(tmp_path, towers):
    write(tmp_path, towers, [1, 2])
    whole = (tmp_path / "checkpoints" / name_of(2) / "checkpoint.json").read_bytes()
    for case, change in WRONG.items():
        folder = change_meta(tmp_path, 2, change)
        assert damage(folder), case
        assert latest(tmp_path).step == 1
        (folder / "checkpoint.json").write_bytes(whole)
    change_meta(tmp_path, 2, lambda meta: meta.pop("features"))
    assert latest(tmp_path).step == 2, "as version 0.2.0 wrote it"


def test_a_renamed_folder_is_damage(tmp_path, towers):
    write(tmp_path, towers, [3, 4])
    (tmp_path / "checkpoints" / name_of(4)).rename(tmp_path / "checkpoints" / name_of(9))
    assert latest(tmp_path).step == 3
    shutil.copytree(tmp_path / "checkpoints" / name_of(9), tmp_path / "elsewhere")
    assert open_checkpoint(tmp_path / "elsewhere").step == 4


def test_a_checkpoint_of_another_run_is_skipped(tmp_path, towers):
    one, two, events = tmp_path / "one", tmp_path / "two", list[str]()
    write(one, towers, [1])
    write(two, towers, [5])
    shutil.copytree(two / "checkpoints" / name_of(5), one / "checkpoints" / name_of(5))
    found = latest(one, on_event=events.append)
    assert found.step == 1
    assert f"step-00000005 in {one}/checkpoints was written by another run ({read_run_id(two)}; this one" in events[0]
    write(one, towers, [6, 7], keep_last=1)
    assert [step_of(path) for path in finished_checkpoints(one)] == [5, 7]
    writer_of(one, towers).abandon_after(0)
    assert [step_of(path) for path in finished_checkpoints(one)] == [5]
    with pytest.raises(UserError, match=r"All 1 checkpoints in .* are damaged, or of another run"):
        latest(one)
    found = agreed_checkpoint(two, str(one / "checkpoints" / name_of(5)), world=World(), on_event=print)
    assert found is not None, "a checkpoint that is named may be of any run"


def test_a_foreign_checkpoint_of_the_same_step_is_kept(tmp_path, towers):
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, towers, [1])
    write(two, towers, [2])
    folder, foreign = one / "checkpoints", read_run_id(two)
    for name in (f"{name_of(2)}.run-{foreign}", f"{name_of(2)}.run-{foreign}.2"):
        shutil.copytree(two / "checkpoints" / name_of(2), folder / name_of(2), dirs_exist_ok=True)
        events = write(one, towers, [2])
        assert f"step-00000002 was written by another run ({foreign}) and is {name} now" in events[0]
        assert open_checkpoint(folder / name).run_id == foreign
        assert open_checkpoint(folder / name_of(2)).run_id == read_run_id(one)
        shutil.rmtree(folder / name_of(2))


def test_new_checkpoints_stay_beside_damaged_and_later_ones(tmp_path, towers):
    write(tmp_path, towers, [10, 20, 35])
    damaged = tmp_path / "checkpoints" / name_of(35) / MOMENTS
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (tmp_path / "checkpoints" / name_of(99)).mkdir()
    start = tmp_path / "checkpoints" / name_of(20)
    for step, left in ((30, [20, 30, 35, 99]), (34, [20, 34, 35, 99]), (36, [20, 36, 99])):
        write(tmp_path, towers, [step], resumed_from=start, keep_last=1)
        assert [step_of(path) for path in checkpoint_folders(tmp_path)] == left


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_full_disk_at_a_pointer_loses_no_checkpoint(tmp_path, towers, monkeypatch, name):
    original = writer_module.write_text

    def full(path, text, **how):
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, text, **how)

    monkeypatch.setattr(writer_module, "write_text", full)
    events = write(tmp_path, towers, [replace(snapshot(towers, 1), best=True)])
    assert events[0].startswith("Checkpoint step-00000001 written")
    assert f"`{name}` does not name step-00000001" in events[1]
    assert not [event for event in events if "NOT be written" in event]
    assert latest(tmp_path)


def test_a_folder_with_later_checkpoints_is_refused(tmp_path, towers):
    run = tmp_path / "run"
    write(run, towers, [1, 2])
    old = str(run / "checkpoints" / name_of(1))
    with pytest.raises(UserError, match=r"has later checkpoints than .* \(step-00000002\)"):
        agreed_checkpoint(run, old, world=World(), on_event=print)
    found = agreed_checkpoint(tmp_path / "another", old, world=World(), on_event=print)
    assert found.step == 1
    with pytest.raises(UserError, match=r"run has checkpoints: add --resume latest"):
        agreed_checkpoint(run, None, world=World(), on_event=print)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_foreign_folder_with_devices_and_pipes_is_refused_at_once(tmp_path, towers, target):
    """A link to an endless device was read until the memory was full, and a pipe without a writer for ever."""
    write(tmp_path, towers, [1])
    checkpoint = tmp_path / "checkpoints" / name_of(1)
    os.mkfifo(tmp_path / "pipe")
    special = {"/dev/zero": Path(target), "pipe": tmp_path / "pipe"}[target]
    for name in [*read_meta(checkpoint)["files"], "checkpoint.json"]:
        plain = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to(special)
        assert re.search("cannot be read|is missing", damage(checkpoint))
        (checkpoint / name).unlink()
        (checkpoint / name).write_bytes(plain)
    assert not damage(checkpoint)
    for place in (tmp_path / "run_id", checkpoint.parent / "best", checkpoint.parent / "latest"):
        place.unlink(missing_ok=True)
        place.symlink_to(special)
    assert latest(tmp_path).path == checkpoint
    assert best_checkpoint(tmp_path) is None
    (checkpoint / "rows-00009-00000.safetensors").symlink_to(special)
    assert len(open_checkpoint(checkpoint).read_rows("u", 0, 10)) == 10
