"""Worker processes of loaders: no lock of the parent is copied, scripts need no main guard, and hangs are reported."""

import os
import re
import signal
import threading

import pytest

from pipeline.data.loading import worker
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.run.images import ImagePass
from tests.checkpoints import make_model
from tests.evaluation_suite import generator, image_bytes
from tests.launch import lives, python, wait_for
from tests.shards import open_loader, write_shards

LOCK = threading.Lock()
SCRIPT = """
from torch.utils.data import DataLoader
from pipeline.distributed.processes import start_forkserver, start_workers

print("started")
loader = DataLoader(range(4), batch_size=2, num_workers=1, multiprocessing_context=start_forkserver())
print([batch.tolist() for batch in start_workers(loader)])
"""
HANGS = """
import os, signal, sys
from threading import Timer
from tests.shards import open_loader
if __name__ == "__main__":
    common = dict(streams=4, shuffle_buffer=10, timeout_minutes=0.05)
    with open_loader(sys.argv[1], workers=2, **common) as loader, open_loader(sys.argv[1], **common) as alone:
        assert next(loader).sample_id.tolist() == next(alone).sample_id.tolist()
        pids = [worker.pid for worker in loader._parts._workers]
        os.kill(pids[1], signal.SIGSTOP)
        Timer(1.5, os.kill, (pids[1], signal.SIGCONT)).start()  # longer than one wait for it
        for _ in range(6):
            assert next(loader).sample_id.tolist() == next(alone).sample_id.tolist()
        print(*pids, flush=True)
        os.kill(pids[1], signal.SIGSTOP)
        while True:
            next(loader)
"""


class LockedImages:
    """Reads with a lock of this module, as libraries do with their own."""

    def __len__(self):
        return 2

    def read(self, index):
        if not LOCK.acquire(timeout=10):
            raise TaskError("the lock was copied while it was held: this worker would wait forever")
        LOCK.release()
        return image_bytes(generator(0, "locked"), 1)[1]

    def name(self, index):
        return str(index)


class KillingImages(LockedImages):
    """Its worker dies as of too little memory."""

    def read(self, index):
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
    done = python(str(tmp_path / "script.py"))
    assert done.stdout.split("\n")[:2] == ["started", "[[0, 1], [2, 3]]"], done.stderr


def test_a_worker_that_is_killed_is_reported():
    images = ImagePass(KillingImages(), {"a": make_model(0).preprocess}, micro_batch=2, batch_size=1, workers=1)
    with pytest.raises(TaskError, match=r"was killed .*memory.*Lower `workers` or `batch_size`"):
        next(images.run())


@pytest.mark.slow
def test_a_worker_that_stays_stopped_is_reported_and_no_process_is_left_running(tmp_path):
    write_shards(tmp_path / "shards", [20, 30, 15])
    (tmp_path / "hangs.py").write_text(HANGS)
    done = python(str(tmp_path / "hangs.py"), str(tmp_path / "shards"), timeout=200)
    assert done.returncode == 76, done.stderr[-2000:]
    pids = done.stdout.split()
    assert "Rank 0: no batch came from the loading workers for 0.05 minutes" in done.stderr
    place = rf"sample \d+ of {re.escape(str(tmp_path))}/shards/0000[012]\.tar"
    assert re.search(rf"Worker 0 \(process {pids[0]}\) is sleeping at {place}", done.stderr), done.stderr[-2000:]
    stopped = rf"Worker 1 \(process {pids[1]}\) is stopped at {place}"
    assert re.search(stopped, done.stderr), done.stderr[-2000:]
    wait_for(lambda: not any(lives(int(pid)) for pid in pids), "the workers end with the run", seconds=20)


def test_a_too_low_open_file_limit_is_rejected_before_a_worker_starts(tmp_path, monkeypatch):
    write_shards(tmp_path, [20])
    monkeypatch.setattr(worker, "allow_open_files", lambda: 40)
    with pytest.raises(UserError, match=r"40 files open \(ulimit -n\), but 2 loading workers with 4 streams need"):
        open_loader(tmp_path, streams=4, workers=2)
