"""A run whose disk is full or becomes read-only: it trains on, and its exit code says that the end is not on disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.reader import damage
from pipeline.checkpoint.writer import CheckpointWriter, Snapshot
from pipeline.distributed.exit_record import read_ends
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.run_files import METRICS_NAME, finished_checkpoints, name_of, read_records
from pipeline.training import saving
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train
from pipeline.training.run_state import EXIT_NOT_SAVED
from tests.metrics import equal, weights
from tests.mounts import JournalledDisk, fill, small_disk
from tests.training import SMALL, in_this_process, prepare, settings_in, train_here

STEPS = 6


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disks")
    prepare(folder, image_size=32)
    train_here(*settings(folder, folder / "whole"))
    return folder


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "RETRY_MINUTES", 0.0)


def settings(base: Path, output: Path, *more: str) -> list[str]:
    given = (f"samples={8 * STEPS}", "checkpoint.every=2", "telemetry.tensorboard=true")
    return settings_in(base, output, *given, *more)


def code_of(*overrides: str) -> int:
    with in_this_process():
        return train(load_recipe(None, [*SMALL, *overrides]))


def before_step(step: int, action: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `action` before the checkpoint of a step is written."""
    plain = CheckpointWriter.save

    def save(writer: CheckpointWriter, snapshot: Snapshot) -> None:
        if snapshot.step == step:
            writer.wait()
            action()
        plain(writer, snapshot)

    monkeypatch.setattr(CheckpointWriter, "save", save)


def continues(base: Path, run: Path, *more: str) -> bool:
    """Whether a run that is continued ends as the undisturbed one."""
    train_here(*settings(base, run, *more), resume="latest")
    return equal(weights(run, STEPS), weights(base / "whole", STEPS))


def events(run: Path) -> list[str]:
    return [str(record.get("message")) for record in read_records(run / METRICS_NAME) if record["kind"] == "event"]


def steps_of(run: Path) -> list[str]:
    assert not any(damage(path) for path in finished_checkpoints(run))
    return [path.name for path in finished_checkpoints(run)]


def test_a_full_disk_ends_a_run_with_74_and_it_continues_when_there_is_space(base, tmp_path, monkeypatch, capfd):
    with small_disk(tmp_path / "disk", megabytes=64) as disk:
        before_step(4, lambda: fill(disk), monkeypatch)
        run = disk / "run"
        assert code_of(*settings(base, run)) == EXIT_NOT_SAVED
        assert (
            "The last checkpoint is not on disk: OSError: [Errno 28] No space left on device" in capfd.readouterr().err
        )
        (end,) = read_ends(run / "heartbeats")
        assert (end.code, "No space left on device" in end.reason) == (EXIT_NOT_SAVED, True)
        assert steps_of(run) == [name_of(2)]
        monkeypatch.undo()
        (disk / "filler").unlink()
        assert continues(base, run)


def test_a_full_disk_with_a_fallback_loses_nothing(base, tmp_path, monkeypatch):
    with small_disk(tmp_path / "disk", megabytes=64) as disk:
        before_step(4, lambda: fill(disk), monkeypatch)
        spare = f"checkpoint.fallback={tmp_path / 'spare'}"
        assert code_of(*settings(base, disk / "run", spare)) == 0
        (other,) = (tmp_path / "spare").iterdir()
        assert steps_of(other) == [name_of(STEPS)]


def test_a_run_continues_from_the_fallback_with_the_same_bits(base, tmp_path, monkeypatch):
    spare = tmp_path / "spare"
    with small_disk(tmp_path / "disk", megabytes=64) as disk:

        def stop() -> None:
            fill(disk)
            os.kill(os.getpid(), signal.SIGTERM)

        before_step(4, stop, monkeypatch)
        run, setting = disk / "run", f"checkpoint.fallback={spare}"
        assert code_of(*settings(base, run, setting)) == EXIT_PREEMPTED
        (other,) = spare.iterdir()
        assert (steps_of(run), steps_of(other)) == ([name_of(2)], [name_of(5)])
        monkeypatch.undo()
        (disk / "filler").unlink()
        assert continues(base, run, setting)
        assert f"Resumed from {name_of(5)} (step 5 of {STEPS})." in events(run), "which only the fallback has"


@pytest.mark.parametrize("fallback", [False, True])
def test_a_disk_that_becomes_read_only_ends_a_run_with_74_unless_there_is_a_fallback(
    base, tmp_path, monkeypatch, capfd, fallback
):
    disk = JournalledDisk(tmp_path / "disk", megabytes=64)
    try:
        before_step(4, disk.fail, monkeypatch)
        spare = [f"checkpoint.fallback={tmp_path / 'spare'}"] if fallback else []
        assert code_of(*settings(base, disk.folder / "run", *spare)) == (0 if fallback else EXIT_NOT_SAVED)
        monkeypatch.undo()
        if fallback:
            (other,) = (tmp_path / "spare").iterdir()
            assert steps_of(other) == [name_of(STEPS)]
            return
        assert "Read-only file system" in capfd.readouterr().err
        disk.repair()
        assert steps_of(disk.folder / "run") == [name_of(2)]
        assert continues(base, disk.folder / "run")
    finally:
        disk.close()
