"""A two-rank run that crashes loses nothing; ranks that sleep or are lost are reported."""

import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pipeline.evaluation.datasets.datacomp import TASKS
from tests.e2e.test_train import BATCH, STEPS, base, equal, records, settings, two_ranks  # noqa: F401 (fixtures)
from tests.evaluation_suite import write_classification
from tests.launch import python, run
from tests.metrics import metrics
from tests.shards import write_shards

FORWARD = "pipeline.engine.deepspeed_engine:DeepSpeedEngine.forward"
CRASHES = [
    ("pipeline.objectives.base:Objective.commit", 5, "1"),
    ("pipeline.engine.state:DeepSpeedState.moments", 2, "1"),
    ("pipeline.checkpoint.writer:CheckpointWriter._write_part", 2, "0"),
    ("pipeline.checkpoint.writer:flush", 7, "0"),
]
"""The function, its call counted from the start, and the rank. test_kills.py has random moments."""


@pytest.mark.slow
def test_a_run_with_four_crashes_is_bit_identical(base, two_ranks):  # noqa: F811
    arguments = settings(base, "mortal", "checkpoint.every=1", "checkpoint.keep_last=2", "engine.probe=false")
    for place, count, rank in CRASHES:
        given = (place, str(count), rank, *arguments, "--resume", "latest")
        assert run("tests.e2e.doomed_run", *given, ranks=2, check=False).returncode, f"it never reached {place}"
    run("jobs.train", *arguments, "--resume", "latest", ranks=2)
    last = Path("checkpoints", f"step-{STEPS:08d}")
    for name in ("open_clip_model", "objective", "moments"):
        ends = (load_file(folder / last / f"{name}.safetensors") for folder in (base / "mortal", two_ranks))
        assert equal(*ends), name
    assert list(records(base / "mortal")) == list(range(1, STEPS + 1)), "records of repeated steps replace the old ones"
    assert not list((base / "mortal" / "checkpoints").glob(".*")), f"leftovers of {STEPS} steps"


@pytest.mark.slow
def test_a_sleeping_rank_is_reported_with_its_step_and_phase(base):  # noqa: F811
    arguments = settings(base, "asleep", "engine.probe=false", "engine.timeout_minutes=0.1")
    done = run("tests.e2e.doomed_run", FORWARD, "3", "1:25", *arguments, ranks=2, check=False)
    printed = done.stderr
    assert done.returncode == 76, printed[-3000:]
    assert "The others wait for rank 1." in printed, printed[-3000:]
    assert re.search(r"rank 0 \(.*\): step 2, communication, for \d+ s$", printed, re.MULTILINE), printed[-3000:]
    assert re.search(r"rank 1 \(.*\): step 2, forward, for \d+ s; BEHIND$", printed, re.MULTILINE), printed[-3000:]
    assert "doomed_run.py" in (base / "asleep" / "heartbeats" / "stacks-00001.txt").read_text()


def test_the_launcher_has_the_exit_code_of_a_killed_rank():
    """As of one that the kernel kills for its memory; `timeit` runs what it is given."""
    ranks = "launch('timeit', ['import os; os.kill(os.getpid(), 9)'], ranks=2)"
    program = f"import sys; from pipeline.distributed.processes import launch; sys.exit({ranks})"
    assert python("-c", program).returncode == 128 + signal.SIGKILL


@pytest.mark.slow
def test_a_long_evaluation_is_no_hang(base):  # noqa: F811
    """Regression test: healthy ranks ended with 76 when an evaluation took longer than `engine.timeout_minutes`."""
    suite, validated = base / "suite", base / "held-out"
    write_classification(suite, TASKS["mnist"], samples=384)  # six micro-batches, three of them of rank 0
    write_shards(validated, [192], first=1000)  # three batches
    slow = ("engine.probe=false", "engine.timeout_minutes=0.1", f"samples={2 * BATCH}", "schedule.warmup_steps=1")
    tests = (f"evaluation.suite={suite}", "evaluation.workers=0", f"validation.sources={validated}")
    arguments = settings(base, "patient", *slow, *tests)
    encode = "pipeline.model.evaluation_model:EvaluationModel.encode_image"
    run("tests.e2e.doomed_run", encode, "each", "0:4", *arguments, ranks=2)  # a limit of 6 s, and 12 s of work
    assert [len(metrics(base / "patient", kind)) for kind in ("evaluation", "validation")] == [1, 1]
