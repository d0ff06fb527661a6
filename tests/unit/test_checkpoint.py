"""Checkpoints on disk are complete and verified, and a run survives damaged files and failed writes."""

import errno
import json
import os
import shutil
import stat
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from pipeline.checkpoint import reader
from pipeline.checkpoint import writer as writer_module
from pipeline.checkpoint.layout import restore_replaced
from pipeline.checkpoint.reader import agreed_checkpoint, damage
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.watcher import forget_after
from pipeline.files import UMASK
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.model.model_folder import save_tensors, weights_digest
from pipeline.run_files import name_of
from pipeline.training import hooks
from pipeline.versions import versions
from tests.launch import python
from tests.thread_world import on_ranks
from tests.written_checkpoints import failing, latest, snapshot, write, writer_of


def test_round_trip_and_open_clip_reads_the_folder(tmp_path, towers):
    write(tmp_path, towers, [7])
    found = latest(tmp_path)
    assert (found.step, found.meta["samples"]) == (7, 56)
    assert all(torch.equal(value, towers[0][name]) for name, value in found.weights().items())
    assert torch.equal(found.moments()["visual.proj", "exp_avg"], torch.full((2, 3), 7.0))
    assert torch.equal(found.read_rows("u", 3, 6), torch.tensor([3.0, 4.0, 5.0]))
    with pytest.raises(UserError, match=r"rows \[5, 12\)"):
        found.read_rows("u", 5, 12)
    import open_clip

    model = open_clip.create_model(f"local-dir:{found.path}")
    assert model.logit_scale.item() == 2.5
    assert load_for_evaluation(str(tmp_path)).digest == weights_digest(towers[0])
    save_file({"u/10": torch.arange(10.0, 15.0)}, found.path / "rows-00001-00000.safetensors")  # of another rank
    found.meta["files"]["rows-00001-00000.safetensors"] = {"rows": {"table": "u", "first": 10, "count": 5}}
    assert found.read_rows("u", 8, 12).tolist() == [8.0, 9.0, 10.0, 11.0]


@pytest.mark.parametrize("broken", [None, "moments.safetensors", "open_clip_model.safetensors"])
def test_ranks_share_the_hashing_and_agree(tmp_path, towers, monkeypatch, broken):
    write(tmp_path, towers, [1, 2])
    newest = tmp_path / "checkpoints" / "step-00000002"
    files = len(json.loads((newest / "checkpoint.json").read_text())["files"])
    if broken:
        data = bytearray((newest / broken).read_bytes())
        data[-1] ^= 1
        (newest / broken).write_bytes(data)
    hashed: list[Path] = []
    original = reader.sha256_of
    monkeypatch.setattr(reader, "sha256_of", lambda path: hashed.append(path) or original(path))
    events: list[str] = []

    def rank(world):
        found = agreed_checkpoint(tmp_path, "latest", world=world, on_event=events.append)
        return found.step

    assert on_ranks(3, rank) == [1 if broken else 2] * 3
    assert len(events) == (1 if broken else 0)
    assert sum(path.parent == newest for path in hashed) <= files, "every file is hashed by one rank"


def test_old_checkpoints_and_leftovers_are_deleted_and_copies_left_alone(tmp_path, towers):
    folder = tmp_path / "checkpoints"
    (folder / ".step-00000009").mkdir(parents=True)  # of a write that was killed
    (folder / ".step-00000009" / "half").write_bytes(b"x")
    write(tmp_path, towers, [1])
    shutil.copytree(folder / name_of(1), folder / "step-00000001.bak")
    events = write(tmp_path, towers, [2, 3, 4, 5, 6], keep_last=2, keep_every=3)
    assert [event for event in events if "could NOT" in event] == []
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest", "step-00000001.bak", name_of(3), name_of(5), name_of(6)
    ]  # fmt: skip
    assert (folder / "latest").read_text() == "step-00000006\n"
    assert latest(tmp_path).step == 6
    listed = {*json.loads((folder / name_of(6) / "checkpoint.json").read_text())["files"], "checkpoint.json"}
    assert listed == {path.name for path in (folder / name_of(6)).iterdir()}
    writer_of(tmp_path, towers).abandon_after(3)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000001.bak", name_of(3)]


def test_evaluation_state_of_abandoned_steps_is_deleted(tmp_path, towers):
    write(tmp_path, towers, [1, 2, 3], keep_last=3)
    folders = ("checkpoints", "evaluation", "evaluation-ledger/suite-1")
    for name in folders[1:]:
        for step in (1, 2, 3):
            (tmp_path / name / name_of(step)).mkdir(parents=True)
    writer_of(tmp_path, towers).abandon_after(2)
    forget_after(tmp_path, 2)
    left = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/step-0000000[123]"))
    assert left == sorted(f"{name}/{name_of(step)}" for name in folders for step in (1, 2))


def test_damaged_checkpoint_is_reported_and_skipped(tmp_path, towers):
    write(tmp_path, towers, [1, 2])
    newest = tmp_path / "checkpoints" / "step-00000002"
    for name in ("open_clip_model.safetensors", "checkpoint.json"):
        whole = (newest / name).read_bytes()
        half = len(whole) // 2
        for data in (whole[:-5], whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :], whole[:40], None):
            (newest / name).unlink() if data is None else (newest / name).write_bytes(data)
            if data is None and name == "checkpoint.json":
                continue  # not finished
            events: list[str] = []
            assert name in damage(newest)
            assert latest(tmp_path, on_event=events.append).step == 1
            assert "step-00000002 is damaged" in events[0]
            with pytest.raises(UserError, match=name):
                agreed_checkpoint(tmp_path, str(newest), world=World(), on_event=print)
        (newest / name).write_bytes(whole[:-5])
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    with pytest.raises(UserError, match="All 1 checkpoints"):
        latest(tmp_path)


WITHOUT_ADDRESSES = """
import os, resource, sys, torch
from pathlib import Path
from pipeline.errors import exit_code_of, explain_memory_error
from pipeline.model.model_folder import create_from, load_tensors, save_tensors
from pipeline.model.starting_weights import start_in
folder = Path(sys.argv[1])
works = [
    lambda: save_tensors({"a": torch.zeros(4)}, folder / "new.safetensors"),
    lambda: load_tensors(folder / "open_clip_model.safetensors"),
    lambda: create_from(start_in(folder)),
]
for work in works:
    work()
used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + 2**16, used + 2**16))
for work in works:
    try:
        work()
    except MemoryError as error:
        print(exit_code_of(error), explain_memory_error(error))
"""


def test_exhausted_addresses_are_an_error_and_no_abort(tmp_path, towers):
    """Regression test: safetensors aborted the process (SIGABRT), or the weights were called damaged."""
    write(tmp_path, towers, [1])
    done = python("-c", WITHOUT_ADDRESSES, str(tmp_path / "checkpoints" / name_of(1)))
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert len(said) == 3
    for line in said:
        assert line.startswith("2 `ulimit -v` allows this process")
        assert line.endswith("MiB more are needed): raise it.")


def test_a_checkpoint_is_written_without_a_thread(tmp_path, towers, monkeypatch):
    """Regression test: a run whose threads were used up (`ulimit -u` or `-v`) ended with 70, "probably a bug"."""

    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert write(tmp_path, towers, [1])[0].startswith("Checkpoint step-00000001 written")
    assert not damage(tmp_path / "checkpoints" / name_of(1))


class OneOfTwo(World):
    """One rank of two; the other one is another object in this process."""

    def barrier(self):
        pass


def test_first_rank_reports_failures_of_other_ranks(tmp_path, towers):
    def full():
        yield torch.arange(4.0)
        raise OSError(errno.ENOSPC, "No space left on device")

    events: list[str] = []
    first, second = (
        writer_of(tmp_path, towers, world=OneOfTwo(rank=rank, size=2), on_event=events.append) for rank in (0, 1)
    )
    first.save(snapshot(towers, 1))
    second.save(replace(snapshot(towers, 1), rows={"u": (10, full())}))
    second.wait()
    first.wait()
    assert "could NOT be written" in events[0]
    assert "rank 1: OSError: [Errno 28] No space left on device" in events[0]


def test_writing_a_table_keeps_no_block_but_the_last(tmp_path, towers):
    held, alive = list[weakref.ref[torch.Tensor]](), list[int]()

    def blocks():
        for start in (0.0, 4.0, 8.0):
            alive.append(sum(reference() is not None for reference in held))
            block = torch.arange(start, start + 4)
            held.append(weakref.ref(block))
            yield block
            del block

    write(tmp_path, towers, [replace(snapshot(towers, 1), rows={"u": (0, blocks())})])
    assert alive == [0, 1, 1]
    assert latest(tmp_path).read_rows("u", 0, 12).tolist() == list(range(12))


def test_file_permissions_follow_the_umask(tmp_path, towers):
    before = os.umask(0o027)
    try:
        write(tmp_path, towers, [1])
    finally:
        os.umask(before)
    files = list((tmp_path / "checkpoints" / "step-00000001").iterdir())
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    save_tensors({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o666 & ~UMASK


@pytest.mark.parametrize(("failures", "saved"), [(2, True), (99, False)])
def test_the_last_checkpoint_is_retried(tmp_path, towers, monkeypatch, failures, saved):
    run, events = tmp_path / "run", list[str]()
    write(run, towers, [1])
    writer = writer_of(run, towers, on_event=events.append)
    monkeypatch.setattr(writer_module, "save_tensors", failing(failures))
    monkeypatch.setattr(hooks, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(hooks, "RETRY_MINUTES", 0.01)
    state = SimpleNamespace(world=World(), step=5, snapshot=lambda: snapshot(towers, 5), mark=str)
    writer.save(snapshot(towers, 5))
    writer.wait()
    assert "could NOT be written (OSError: [Errno 28] No space left" in events[0]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000001", "latest"}
    saver = hooks.Saver(state, writer, SimpleNamespace(event=events.append))
    assert saver.finish(stopped=lambda: False, again=True) == saved
    if saved:
        assert latest(run).step == 5
    else:
        assert "step-00000005, is NOT on disk (OSError: [Errno 28] No space left on device)" in events[-1]


def test_versions_are_read_once(monkeypatch):
    """A checkpoint states them, and must be written also by a process that cannot open more files."""
    before = versions()
    monkeypatch.setattr("importlib.metadata.version", failing(99))
    assert versions() == before


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_while_a_checkpoint_is_written_again_leaves_one_of_them(tmp_path, towers, monkeypatch, renames):
    """Regression test: the first one was removed before the second had its name, although it was the only one."""
    write(tmp_path, towers, [4], keep_last=1)
    plain, calls = os.replace, list[str]()

    def die(source, target):
        if name_of(4) in Path(source).name and Path(source).is_dir():
            if len(calls) == renames:
                raise KeyboardInterrupt  # as a kill: nothing of the writer runs after it
            calls.append(str(source))
        plain(source, target)

    monkeypatch.setattr(os, "replace", die)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: calls.append("removed"))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    write(tmp_path, towers, [4], keep_last=1)
    monkeypatch.undo()
    restore_replaced(tmp_path)
    assert latest(tmp_path).step == 4
    write(tmp_path, towers, [4], keep_last=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", name_of(4)]
