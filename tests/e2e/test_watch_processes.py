"""Several watchers as real processes, one killed with -9 while working: every checkpoint is evaluated once."""

import os
import signal
from contextlib import ExitStack
from functools import partial

import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.evaluation.identity import suite_identity
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.evaluation.watcher import DONE, STARTED
from pipeline.files import read_tree
from tests.checkpoints import save_step
from tests.evaluation_suite import write_classification
from tests.launch import Program, wait_for

STEPS = tuple(range(100, 900, 100))


def start(run, suite):
    arguments = [str(run), "--suite", str(suite), "--device", "cpu", "interval=0.2"]
    return Program("jobs.watch", *arguments, "evaluation.workers=0", "evaluation.micro_batch=8")


def outcomes(ledger):
    return {folder.name: read_tree(folder / "attempt.json") for folder in ledger.glob("*")}


def with_outcome(ledger, how):
    return {name for name, outcome in outcomes(ledger).items() if outcome.get("how") == how}


@pytest.mark.slow
def test_after_kill_9_nothing_is_lost_or_repeated(tmp_path):
    run, suite = tmp_path / "run", tmp_path / "mini"
    for key in ("cifar10", "wilds/fmow"):
        write_classification(suite, TASKS[key], samples=300)
    for step in STEPS[:-1]:
        save_step(run, step)
    identity = suite_identity(open_suite(suite), EvaluationConfig(micro_batch=8), known=tmp_path / "digests.json")
    ledger = run / "evaluation-ledger" / identity
    with ExitStack() as watchers:
        # The victim is killed while it holds a lease, before it has any result for that checkpoint.
        with start(run, suite) as victim:
            taken = partial(with_outcome, ledger, STARTED)
            wait_for(taken, "a checkpoint is taken", process=victim, seconds=240, pause=0.01)
            victim.kill()
            victim.wait()
        held = sorted(with_outcome(ledger, STARTED))
        assert held
        others = [watchers.enter_context(start(run, suite)) for _ in range(2)]
        save_step(run, STEPS[-1])  # training continues
        done = partial(with_outcome, ledger, DONE)
        wait_for(lambda: len(done()) == len(STEPS), "all are done", process=others[0], seconds=240)
        for watcher in others:
            os.kill(watcher.pids[0], signal.SIGTERM)
        ended = [watcher.wait() for watcher in others]
    assert [end.returncode for end in ended] == [130, 130]
    assert done() == {f"step-{step:08d}" for step in STEPS}
    messages = "\n".join(end.stdout + end.stderr for end in ended)
    for name, outcome in outcomes(ledger).items():
        assert outcome["attempts"] == 1 + (name in held), "taken over, once"
        assert messages.count(f"{name}: 2 tasks done.") == (outcome["pid"] != victim.pids[0])
    for name in (held[0], "step-00000800"):
        alone = tmp_path / "alone" / name
        config = EvaluationConfig(workers=0, micro_batch=8)
        evaluate(str(run / "checkpoints" / name), suite=suite, output=alone, config=config)
        for path in alone.glob("[cw]*.json"):
            assert path.read_bytes() == (run / "evaluation" / name / path.name).read_bytes()
