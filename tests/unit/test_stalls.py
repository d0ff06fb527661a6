"""A hanging data loading worker ends the run with a diagnosis; tested in a separate process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.data.data_config import DataConfig
from pipeline.data.loading import worker_processes
from pipeline.data.loading.loader import build_loader
from pipeline.data.loading.worker import share
from pipeline.data.loading.worker_processes import describe_workers
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.launch import ROOT, environment, lives, python, wait_for
from tests.shards import count_tokens, write_shards

HANGS = """
import os, signal, sys
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.loader import build_loader
from pipeline.distributed.world import World
from tests.shards import count_tokens
if __name__ == "__main__":
    config = DataConfig(sources=sys.argv[1], streams=4, shuffle_buffer=10, workers=2, timeout_minutes=0.05)
    with build_loader(config, world=World(), global_batch=8, seed=0, image_size=16, tokenize=count_tokens) as loader:
        next(loader)
        print(*(worker.pid for worker in loader._parts._workers), flush=True)
        os.kill(loader._parts._workers[1].pid, signal.SIGSTOP)
        while True:
            next(loader)
"""


@pytest.mark.slow
def test_a_stopped_worker_is_reported_and_no_process_is_left_running(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", [20, 30, 15])
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    done = python(str(script), str(tmp_path / "shards"), timeout=200)
    assert done.returncode == 76, done.stderr[-2000:]
    pids = done.stdout.split()
    assert "Rank 0: no batch came from the loading workers for 0.05 minutes" in done.stderr
    place = rf"sample \d+ of {re.escape(str(tmp_path))}/shards/0000[012]\.tar"
    assert re.search(rf"Worker 0 \(process {pids[0]}\) is waiting at {place}", done.stderr), done.stderr[-2000:]
    stopped = rf"Worker 1 \(process {pids[1]}\) is stopped \(SIGSTOP; SIGCONT continues it\) at {place}"
    assert re.search(stopped, done.stderr), done.stderr[-2000:]
    wait_for(lambda: not any(lives(int(pid)) for pid in pids), "the workers end with the run", seconds=20)


LEAVES = """
import time
from pipeline.data.loading import worker_processes as stalls
stalls.PATIENCE_SECONDS, stalls.LEAVE_SECONDS = 0.2, 0.5
with stalls.StallWatch(600, str, stopped=lambda: True).waiting():
    time.sleep(100)
"""


def test_a_wait_that_cannot_be_ended_ends_the_process_after_a_stop_signal() -> None:
    done = python("-c", LEAVES)
    assert done.returncode == 75, done.stderr[-2000:]
    assert "Stopped by a signal, in a wait for a batch that could not be ended" in done.stderr


STAYS = """
import threading, time
from pipeline.data.loading import worker_processes as stalls
stalls.PATIENCE_SECONDS, stalls.LEAVE_SECONDS = 0.2, 0.5
def wait():
    with stalls.StallWatch(600, str, stopped=lambda: True).waiting():
        time.sleep(100)
threading.Thread(target=wait, daemon=True).start()
time.sleep(2)  # such as for the last checkpoint
"""


def test_a_wait_in_a_thread_does_not_end_the_process() -> None:
    """Regression test: on a GPU it ended with 75 while it wrote its last checkpoint."""
    done = python("-c", STAYS)
    assert (done.returncode, done.stderr) == (0, "")


FILLS = """
import sys, threading, time
from pathlib import Path
from pipeline.data.data_config import DataConfig
from pipeline.data.loading.loader import build_loader
from pipeline.distributed.world import World
from tests.shards import count_tokens
def fill(until):
    with open("/dev/shm/other", "ab", buffering=0) as file:
        while not until.wait(0.002):
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    Path("/dev/shm/other").unlink()
if __name__ == "__main__":
    minutes = float(sys.argv[2])
    config = DataConfig(sources=sys.argv[1], streams=4, shuffle_buffer=10, workers=2, timeout_minutes=minutes)
    with build_loader(config, world=World(), global_batch=8, seed=0, image_size=128, tokenize=count_tokens) as loader:
        print(next(loader).sample_id.tolist(), flush=True)
        until = threading.Event()
        threading.Thread(target=fill, args=(until,), daemon=True).start()
        time.sleep(1)
        if sys.argv[3] == "moment":
            threading.Timer(4.0, until.set).start()
        for _ in range(20):
            print(next(loader).sample_id.tolist(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounting an own /dev/shm needs root")
@pytest.mark.parametrize("how", ["moment", "for good"])
def test_shared_memory_that_fills_during_a_run_never_loses_a_batch_or_hangs_the_run(tmp_path: Path, how: str) -> None:
    """It has 16 MiB of its own, which another program fills: for four seconds, or for good."""
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    write_shards(tmp_path / "shards", [20, 30, 15])
    script = tmp_path / "fills.py"
    script.write_text(FILLS)
    minutes = {"moment": "3", "for good": "0.1"}[how]
    inside = f'mount -t tmpfs -o size=16m none /dev/shm && exec "$0" {script} {tmp_path / "shards"} {minutes} "{how}"'
    command = ["unshare", "--mount", "sh", "-c", inside, sys.executable]
    own = {**environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=200, check=False)
    assert "/dev/shm is full, so loading worker" in done.stderr
    if how == "for good":
        assert done.returncode == 76, done.stderr[-2000:]
        assert "/dev/shm has 0 MiB free; workers pass images through it." in done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    config = DataConfig(sources=str(tmp_path / "shards"), streams=4, shuffle_buffer=10, workers=0)
    with build_loader(config, world=World(), global_batch=8, seed=0, image_size=16, tokenize=count_tokens) as loader:
        expected = [str(next(loader).sample_id.tolist()) for _ in range(21)]
    assert done.stdout.splitlines() == expected


def test_errors_of_shared_memory_other_than_a_lack_of_space_are_raised() -> None:
    class Broken:
        def share_memory_(self) -> None:
            raise RuntimeError("unable to open shared memory object: Operation not permitted (1)")

    with pytest.raises(RuntimeError, match="not permitted"):
        share(Broken())  # type: ignore[arg-type]


def test_a_worker_is_described_with_its_state_and_shards(tmp_path: Path) -> None:
    write_shards(tmp_path, [2])
    with (tmp_path / "00000.tar").open("rb"):
        own, gone, *_ = describe_workers([os.getpid(), 2**22 + 1])
    assert own.startswith(f"Worker 0 (process {os.getpid()}) is computing, has open ")
    assert str(tmp_path / "00000.tar") in own
    assert gone == f"Worker 1 (process {2**22 + 1}) is gone."


def test_a_too_low_open_file_limit_is_rejected_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, [20])
    monkeypatch.setattr(worker_processes, "allow_open_files", lambda: 40)
    config = DataConfig(sources=str(tmp_path), streams=4, workers=2)
    with pytest.raises(UserError, match=r"40 files open \(ulimit -n\), but 2 loading workers with 4 streams need"):
        build_loader(config, world=World(), global_batch=8, seed=0, image_size=16, tokenize=count_tokens)
