"""Worker processes of loaders: no lock of a thread of the parent is copied, and scripts need no main guard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.run.images import ImagePass
from tests.checkpoints import make_model
from tests.evaluation_suite import generator, image_bytes

LOCK = threading.Lock()
SCRIPT = """
from torch.utils.data import DataLoader
from pipeline.distributed.processes import start_forkserver, start_workers

print("started")
loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context=start_forkserver())
print([batch.tolist() for batch in start_workers(loader)])
"""


class LockedImages:
    """Reads with a lock of this module, as libraries do with their own."""

    def __len__(self) -> int:
        return 2

    def read(self, index: int) -> bytes:
        if not LOCK.acquire(timeout=10):
            raise TaskError("the lock was copied while it was held: this worker would wait forever")
        LOCK.release()
        return image_bytes(generator(0, "locked"), 1)[1]

    def name(self, index: int) -> str:
        return str(index)


class KillingImages(LockedImages):
    """Its worker dies as of too little memory."""

    def read(self, index: int) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_locks_that_are_held_when_workers_start_are_not_copied():
    images = ImagePass(LockedImages(), {"a": make_model(0).preprocess}, micro_batch=2, batch_size=1, workers=2)
    with LOCK:
        ((number, valid, tensors),) = images.run()
    assert (number, valid) == (0, 2)
    assert set(tensors) == {"a"}


def test_workers_do_not_run_the_users_script_again(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        timeout=120, env={"PYTHONPATH": ".", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.split("\n")[:2] == ["started", "[[0, 1], [2, 3]]"], done.stderr


def test_a_worker_that_is_killed_is_reported():
    images = ImagePass(KillingImages(), {"a": make_model(0).preprocess}, micro_batch=2, batch_size=1, workers=1)
    with pytest.raises(TaskError, match=r"was killed .*memory.*Lower `workers` or `batch_size`"):
        next(images.run())
