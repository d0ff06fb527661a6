"""Timeouts of process groups, refused starts, how a process exits while a group still exists, and work of rank 0 for
which the others wait."""

import os
from contextlib import suppress
from datetime import timedelta

import fsspec
import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint.mirror import Mirror
from pipeline.distributed import start
from pipeline.distributed.start import start_world
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import NEXT_BATCH, WRITER, World, limit_collectives
from pipeline.errors import UserError
from pipeline.files import file_lock
from pipeline.training.recipe import parse_recipe
from pipeline.training.run_folder import hold_folder
from tests.launch import python
from tests.thread_world import on_ranks


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def test_existing_process_groups_get_the_timeout_of_the_run():
    with start_world(timeout_minutes=3.0):
        theirs = dist.new_group([0])
        assert timeout_of(theirs) != timedelta(minutes=7)
        limit_collectives(7.0)
        assert timeout_of(theirs) == timedelta(minutes=7)
        assert timeout_of(dist.group.WORLD) == timedelta(minutes=7)
    assert not dist.is_initialized()


def test_processes_started_by_srun_without_a_world_are_rejected(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    with pytest.raises(UserError, match=r"srun started 8 processes .*train.sbatch.*RANK=\$SLURM_PROCID"), start_world():
        pass
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    with start_world() as one:
        assert one.size == 1


def test_a_process_without_launcher_leaves_its_environment_as_it_was(monkeypatch):
    """A port that stays in the environment was met again by every training run that this process started later."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")

    def failed_run():
        with start_world():
            assert os.environ["MASTER_PORT"] != "1"
            raise KeyError("a failed run")

    with pytest.raises(KeyError, match="a failed run"):
        failed_run()
    assert os.environ["MASTER_PORT"] == "1"
    assert not os.environ.keys() & set(names)


def test_a_run_folder_in_use_by_another_process_is_rejected(tmp_path, monkeypatch):
    run = parse_recipe({"output": str(tmp_path), "samples": 8_000, "batch_size": 8, "data": {"sources": "nowhere"}})
    with hold_folder(run, world=World()):
        pass  # the lock is released on exit
    monkeypatch.setattr("pipeline.training.run_folder.LOCK_SECONDS", 1)
    refused = rf"training in .* \(.*, process {os.getpid()}\): stop it first"
    with file_lock(tmp_path / ".lock"), pytest.raises(UserError, match=refused), hold_folder(run, world=World()):
        pass
    with hold_folder(run, world=World()):
        pass


def test_a_process_group_is_kept_only_where_destroying_it_would_block(monkeypatch):
    """This is NCCL with several ranks after an error; a single process cannot create it, so it is mocked."""
    destroyed = []
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(joined) and not destroyed)
    monkeypatch.setattr(start, "_join", lambda *_, **__: joined.append("group") or 1)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    for device, size, fails, expected in (
        ("cuda", 2, True, False),
        ("cuda", 2, False, True),
        ("cuda", 1, True, True),
        ("cpu", 2, True, True),
    ):
        joined: list[str] = []
        destroyed.clear()
        monkeypatch.setenv("WORLD_SIZE", str(size))
        monkeypatch.setattr(start, "choose_device", lambda *_, device=device, **__: torch.device(device))
        monkeypatch.setattr(start, "Phases", lambda device: None)
        with suppress(ArithmeticError), start_world():
            if fails:
                raise ArithmeticError
        assert bool(destroyed) == expected, (device, size, fails)


LEAVING = """
import atexit, os, sys, threading
import torch.distributed as dist
from jobs.cli import _fail
from pipeline.distributed.world import NEXT_BATCH, WRITER
class Last:
    def __del__(self, write=os.write): write(1, b"taken apart")
sys.last_of_all = Last()
atexit.register(print, "registered", end=" ")
name = sys.argv[1]
if name == "group":
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
if name in (NEXT_BATCH, WRITER):
    threading.Thread(target=threading.Event().wait, daemon=True, name=name).start()
_fail("one rank's trouble", 2)
"""


@pytest.mark.parametrize(
    ("name", "ranks", "printed"),
    [
        ("alone", 1, "registered taken apart"),
        ("of two", 2, "registered "),
        (WRITER, 1, "registered "),
        (NEXT_BATCH, 1, "registered "),
        ("group", 1, ""),  # what is registered may wait for other ranks
    ],
)
def test_a_process_leaves_with_its_message_and_code_and_no_shutdown_that_hangs(name, ranks, printed):
    """gloo's threads, and those that write or fetch, may use the interpreter after its shutdown has begun."""
    done = python("-c", LEAVING, name, WORLD_SIZE=str(ranks))
    assert (done.returncode, done.stdout) == (2, printed), done.stderr
    assert "Error: one rank's trouble" in done.stderr


def test_the_others_wait_for_the_work_of_rank_0_or_its_error():
    """As the heartbeats see it, rank 0 is behind meanwhile, so that it is named if it makes no progress."""

    def full():
        raise UserError("the folder is full")

    def program(world):
        object.__setattr__(world, "phases", Phases(torch.device("cpu")))
        marks = lambda: world.phases.latest.count  # noqa: E731
        done, error = world.work_on_main(lambda: ("done", marks())), ""
        try:
            world.work_on_main(lambda: 1 // 0)
        except ZeroDivisionError:
            error = "failed"
        count = marks()
        with pytest.raises(UserError, match="the folder is full"):
            world.work_on_main(full)
        return done, count, error

    assert on_ranks(2, program) == [(("done", 0), 4, "failed"), (None, 4, "")]


def test_every_block_of_a_download_is_progress(tmp_path):
    noted: list[float] = []
    mirror = Mirror("memory://progress", tmp_path / "run", progress=lambda: noted.append(0.0))
    files = fsspec.filesystem("memory")
    files.pipe_file("/progress/run/checkpoints/x", bytes(100))
    mirror._files.get_file("x", str(tmp_path / "x"), callback=mirror._downloaded)
    assert noted
