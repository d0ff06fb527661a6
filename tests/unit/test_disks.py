"""A run whose disk is full or becomes read-only: it trains on, and its exit code says that the end is not on disk.

The mounts need root, and a machine that allows them.
"""

import os
import subprocess
from contextlib import suppress

import pytest

from pipeline.checkpoint.reader import damage
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.distributed.exit_record import read_ends
from pipeline.run_files import finished_checkpoints, name_of
from pipeline.training import hooks
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train
from pipeline.training.run_state import EXIT_NOT_SAVED
from tests.metrics import equal, weights
from tests.training import SMALL, in_this_process, prepare, settings_in, train_here

STEPS, MEGABYTES = 6, 64


def _call(*command):
    return subprocess.run([str(word) for word in command], capture_output=True, check=False).returncode == 0


class SmallDisk:
    """A disk of its own, mounted at a folder, which can be filled."""

    error = "No space left on device"

    def __init__(self, folder):
        self.folder, self._filler = folder, folder / "filler"
        folder.mkdir()
        if os.geteuid() or not _call("mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "none", folder):
            pytest.skip("this machine does not allow mounts")

    def fail(self):
        """Write until nothing more fits."""
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def repair(self):
        self._filler.unlink()

    def close(self):
        _call("umount", "--lazy", self.folder)


class JournalledDisk:
    """ext4 in a file, as a block device: the kernel makes it read-only when its journal fails."""

    error = "Read-only file system"

    def __init__(self, folder):
        self.folder, self._file = folder, folder.with_suffix(".ext4")
        folder.mkdir()
        with self._file.open("wb") as file:
            file.truncate(MEGABYTES << 20)
        if os.geteuid() or not _call("mkfs.ext4", "-q", self._file) or not self._mount():
            pytest.skip("this machine does not allow mounts of files")

    def _mount(self):
        return _call("mount", "-o", "loop", self._file, self.folder)

    def fail(self):
        """As after an error of the device: from now on it is read-only, also for files that are open."""
        assert _call("mount", "-o", "remount,abort", self.folder)

    def repair(self):
        self.close()
        _call("fsck.ext4", "-fy", self._file)  # its exit code says that it found something
        assert self._mount()

    def close(self):
        _call("umount", self.folder) or _call("umount", "--lazy", self.folder)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disks")
    prepare(folder, image_size=32)
    train_here(*settings(folder, folder / "whole"))
    return folder


@pytest.fixture(autouse=True)
def no_retries(monkeypatch):
    monkeypatch.setattr(hooks, "RETRY_MINUTES", 0.0)


def settings(base, output, *more):
    given = (f"samples={8 * STEPS}", "checkpoint.every=2", "telemetry.tensorboard=true")
    return settings_in(base, output, *given, *more)


def code_of(*overrides):
    with in_this_process():
        return train(load_recipe(None, [*SMALL, *overrides]))


def before_step(step, action, monkeypatch):
    """Call `action` before the checkpoint of a step is written."""
    plain = CheckpointWriter.save

    def save(writer, snapshot):
        if snapshot.step == step:
            writer.wait()
            action()
        plain(writer, snapshot)

    monkeypatch.setattr(CheckpointWriter, "save", save)


def steps_of(run):
    assert not any(damage(path) for path in finished_checkpoints(run))
    return [path.name for path in finished_checkpoints(run)]


@pytest.mark.parametrize("kind", [SmallDisk, JournalledDisk])
def test_a_disk_that_fails_ends_a_run_with_74_and_it_continues_on_a_sound_one(kind, base, tmp_path, monkeypatch, capfd):
    disk = kind(tmp_path / "disk")
    run = disk.folder / "run"
    try:
        before_step(4, disk.fail, monkeypatch)
        assert code_of(*settings(base, run)) == EXIT_NOT_SAVED
        monkeypatch.undo()
        said = capfd.readouterr().err
        assert disk.error in said
        if kind is SmallDisk:
            assert "The last checkpoint is not on disk: OSError: [Errno 28] No space left on device" in said
            (end,) = read_ends(run / "heartbeats")
            assert (end.code, disk.error in end.reason) == (EXIT_NOT_SAVED, True)
        disk.repair()
        assert steps_of(run) == [name_of(2)]
        train_here(*settings(base, run), resume="latest")
        assert equal(weights(run, STEPS), weights(base / "whole", STEPS)), "as a run that nothing disturbed"
    finally:
        disk.close()
