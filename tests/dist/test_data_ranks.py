"""The loader on two ranks with worker processes, and which processes remain when a trainer is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.distributed.world import World
from tests.dist.data_ranks import BATCH, SCENARIOS, make_loader, steps
from tests.launch import run, wait_for
from tests.shards import write_shards

ROOT = Path(__file__).parents[2]
SIZES = [9, 30, 4, 17, 22, 5, 13]  # 100 samples: 8 steps of 12, 4 dropped


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with the shards of each scenario of `data_ranks`, which has run on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in SCENARIOS:
        write_shards(folder / name, SIZES)
    run("tests.dist.data_ranks", str(folder), ranks=2)
    return folder


def results(out, scenario):
    return [json.loads((out / f"{rank}.json").read_text())[scenario] for rank in range(2)]


def joined(results):
    return [[i for part in step for i in part] for step in zip(*(r["ids"] for r in results), strict=True)]


def test_two_ranks_get_the_batches_of_one_and_can_resume_as_one(out):
    two = results(out, "order")
    alone = make_loader(out / "order", World(), workers=0)
    assert joined(two) == steps(alone, 15)
    assert alone.state_dict() == two[0]["state"] == two[1]["state"]

    # One rank resumes from the state of two ranks.
    resumed = make_loader(out / "order", World(), workers=0)
    resumed.load_state_dict(two[0]["middle"])
    assert steps(resumed, 8) == joined(two)[7:]


def test_the_corruption_limit_stops_both_ranks_at_the_same_step(out):
    """A shard was deleted after the first batch."""
    one, other = results(out, "limit")
    assert one["stopped"] == other["stopped"]
    assert "00001.tar" in one["stopped"]
    assert "data.corrupt_limit = 0.01" in one["stopped"]
    assert all(len(batch) == BATCH for batch in joined([one, other]))


CHILD = """
import signal, sys, time
from pathlib import Path
from pipeline.distributed.world import World
from tests.dist.data_ranks import make_loader
if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    loader = make_loader(Path(sys.argv[1]), World(), workers=3)
    next(loader)
    print("started", flush=True)
    sys.stdin.readline()
    for _ in range(30):
        next(loader)
    print("done", flush=True)
    time.sleep(60)
"""


def test_a_signalled_group_still_gives_batches_and_no_process_outlives_a_killed_trainer(tmp_path):
    """After Ctrl-C, or a launcher's signals, a trainer that handles them still gets batches from its workers."""
    write_shards(tmp_path / "shards", SIZES)
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    command = [sys.executable, str(script), str(tmp_path / "shards")]
    child = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)
    assert child.stdout.readline() == "started\n"
    assert len(group(child.pid)) >= 5, "trainer, fork server and three workers"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        os.killpg(child.pid, number)
    time.sleep(2.5)
    child.stdin.write("go on\n")
    child.stdin.flush()
    assert child.stdout.readline() == "done\n"
    child.kill()
    child.wait()
    wait_for(lambda: not group(child.pid), "the workers end with the trainer", seconds=30)


def group(leader):
    """The live processes of a process group."""
    live = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                live.append(process.pid)
    return live
