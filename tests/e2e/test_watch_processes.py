"""Several watchers as real processes, one killed with -9 while working: every checkpoint is evaluated once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.identity import suite_identity
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.evaluation.watch.ledger import DONE, Ledger
from tests.checkpoints import save_step
from tests.evaluation_suite import write_classification
from tests.launch import ROOT, wait_for

STEPS = tuple(range(100, 900, 100))
CLOCK = """
import os, time
seconds, date, shift = time.time, time.gmtime, float(os.environ["CLOCK_SHIFT"])
time.time = lambda: seconds() + shift
time.time_ns = lambda: int((seconds() + shift) * 1e9)
time.gmtime = lambda at=None: date(time.time() if at is None else at)
"""


def start(run: Path, suite: Path, log: Path, *, hours: int = 0) -> subprocess.Popen[bytes]:
    """A watcher whose clock is wrong by `hours`, as on another machine; the dates of files are not."""
    (clock := log.with_suffix(".clock")).mkdir()
    (clock / "sitecustomize.py").write_text(CLOCK)
    arguments = [str(run), "--suite", str(suite), "--device", "cpu", "interval=0.2", "ttl=12", "together=2"]
    command = [sys.executable, "-m", "jobs.watch", *arguments, "evaluation.workers=0", "evaluation.micro_batch=8"]
    path = os.pathsep.join(filter(None, [str(clock), os.environ.get("PYTHONPATH", str(ROOT))]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CLOCK_SHIFT": str(3600 * hours)}
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT, env=environment)


def done_in(ledger: Path) -> list[str]:
    return [folder.name for folder in ledger.iterdir() if Ledger(ledger).outcome(folder.name).get("how") == DONE]


@pytest.mark.slow
def test_after_kill_9_nothing_is_lost_or_repeated_whatever_the_clocks_say(tmp_path: Path) -> None:
    run, suite = tmp_path / "run", tmp_path / "mini"
    for key in ("cifar10", "wilds/fmow"):
        write_classification(suite, TASKS[key], samples=300)
    for step in STEPS[:-1]:
        save_step(run, step)
    settings = EvaluationConfig(micro_batch=8)
    identity = suite_identity(open_suite(suite), settings, known=tmp_path / "digests.json")
    ledger = run / "evaluation-ledger" / identity
    logs = [tmp_path / f"{name}.log" for name in ("victim", "first", "second")]
    watchers = [start(run, suite, logs[0])]
    try:
        # The victim is killed while it holds a lease, before it has any result for that checkpoint.
        wait_for(lambda: any(ledger.glob("*/lease-*.beat")), "a lease is taken", *logs[:1], seconds=240)
        watchers[0].send_signal(signal.SIGKILL)
        watchers[0].wait()
        held = sorted({path.parent.name for path in ledger.glob("*/lease-0001.json")} - set(done_in(ledger)))
        assert held
        watchers += [start(run, suite, log, hours=hours) for log, hours in zip(logs[1:], (1, -1), strict=True)]
        save_step(run, STEPS[-1])  # training continues
        wait_for(lambda: len(done_in(ledger)) == len(STEPS), "all are done", *logs, seconds=240)
        for watcher in watchers[1:]:
            watcher.send_signal(signal.SIGTERM)
        assert [watcher.wait(timeout=60) for watcher in watchers[1:]] == [130, 130]
    finally:
        for watcher in watchers:
            if watcher.poll() is None:
                watcher.kill()
                watcher.wait()
    assert set(done_in(ledger)) == {f"step-{step:08d}" for step in STEPS}
    outcomes = {name: Ledger(ledger).outcome(name) for name in done_in(ledger)}
    attempts = {name: len(list((ledger / name).glob("lease-*.json"))) for name in outcomes}
    for name in held:
        assert attempts[name] == 2  # taken over, once
        assert outcomes[name]["pid"] in {watcher.pid for watcher in watchers[1:]}
    hours = {outcome["at"][11:13] for outcome in outcomes.values()}
    assert len(hours) > 1, "the clocks did not differ"
    others = set(outcomes) - set(held)
    assert {attempts[name] for name in others} == {1}
    messages = "\n".join(log.read_text() for log in logs[1:])
    for name, outcome in outcomes.items():
        assert messages.count(f"{name}: 2 tasks done.") == (outcome["pid"] != watchers[0].pid)
    for name in (held[0], "step-00000800"):
        alone = tmp_path / "alone" / name
        config = EvaluationConfig(workers=0, micro_batch=8)
        evaluate(str(run / "checkpoints" / name), suite=suite, output=alone, config=config)
        for path in alone.glob("[cw]*.json"):
            assert path.read_bytes() == (run / "evaluation" / name / path.name).read_bytes()
