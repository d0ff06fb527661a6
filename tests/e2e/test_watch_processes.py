"""Several watchers as real processes, one killed with -9 while working: every checkpoint is evaluated once."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
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
from tests.launch import Program, wait_for

STEPS = tuple(range(100, 900, 100))


def start(run: Path, suite: Path, *, hours: int = 0) -> Program:
    """A watcher whose clock is wrong by `hours`, as on another machine."""
    arguments = [str(run), "--suite", str(suite), "--device", "cpu", "interval=0.2", "ttl=12", "together=2"]
    settings = ("evaluation.workers=0", "evaluation.micro_batch=8")
    return Program("tests.e2e.shifted_watch", str(hours), *arguments, *settings)


def done_in(ledger: Path) -> list[str]:
    return [folder.name for folder in ledger.iterdir() if Ledger(ledger).outcome(folder.name).get("how") == DONE]


@pytest.mark.slow
def test_after_kill_9_nothing_is_lost_or_repeated_whatever_the_clocks_say(tmp_path):
    run, suite = tmp_path / "run", tmp_path / "mini"
    for key in ("cifar10", "wilds/fmow"):
        write_classification(suite, TASKS[key], samples=300)
    for step in STEPS[:-1]:
        save_step(run, step)
    settings = EvaluationConfig(micro_batch=8)
    identity = suite_identity(open_suite(suite), settings, known=tmp_path / "digests.json")
    ledger = run / "evaluation-ledger" / identity
    with ExitStack() as watchers:
        # The victim is killed while it holds a lease, before it has any result for that checkpoint.
        with start(run, suite) as victim:
            leases = "*/lease-*.beat"
            wait_for(lambda: any(ledger.glob(leases)), "a lease is taken", process=victim, seconds=240, pause=0.01)
            victim.kill()
            victim.wait()
        held = sorted({path.parent.name for path in ledger.glob("*/lease-0001.json")} - set(done_in(ledger)))
        assert held
        others = [watchers.enter_context(start(run, suite, hours=hours)) for hours in (1, -1)]
        save_step(run, STEPS[-1])  # training continues
        wait_for(lambda: len(done_in(ledger)) == len(STEPS), "all are done", process=others[0], seconds=240)
        for watcher in others:
            os.kill(watcher.pids[0], signal.SIGTERM)
        ended = [watcher.wait() for watcher in others]
    assert [end.returncode for end in ended] == [130, 130]
    assert set(done_in(ledger)) == {f"step-{step:08d}" for step in STEPS}
    outcomes = {name: Ledger(ledger).outcome(name) for name in done_in(ledger)}
    attempts = {name: len(list((ledger / name).glob("lease-*.json"))) for name in outcomes}
    for name in held:
        assert attempts[name] == 2  # taken over, once
        assert outcomes[name]["pid"] in {watcher.pids[0] for watcher in others}
    hours = {outcome["at"][11:13] for outcome in outcomes.values()}
    assert len(hours) > 1, "the clocks did not differ"
    assert {attempts[name] for name in set(outcomes) - set(held)} == {1}
    messages = "\n".join(end.stdout + end.stderr for end in ended)
    for name, outcome in outcomes.items():
        assert messages.count(f"{name}: 2 tasks done.") == (outcome["pid"] != victim.pids[0])
    for name in (held[0], "step-00000800"):
        alone = tmp_path / "alone" / name
        config = EvaluationConfig(workers=0, micro_batch=8)
        evaluate(str(run / "checkpoints" / name), suite=suite, output=alone, config=config)
        for path in alone.glob("[cw]*.json"):
            assert path.read_bytes() == (run / "evaluation" / name / path.name).read_bytes()
