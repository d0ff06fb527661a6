"""A hanging data loading worker ends the run with a diagnosis; tested in a separate process."""

from __future__ import annotations

import re

import pytest

from pipeline.data.loading import worker
from pipeline.errors import UserError
from tests.launch import lives, python, wait_for
from tests.shards import open_loader, write_shards

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


@pytest.mark.slow
def test_a_worker_that_stays_stopped_is_reported_and_no_process_is_left_running(tmp_path):
    write_shards(tmp_path / "shards", [20, 30, 15])
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    done = python(str(script), str(tmp_path / "shards"), timeout=200)
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
