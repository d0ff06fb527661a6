"""`neuclip doctor RUN` says how a run ended, what is intact and how to continue."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from jobs.doctor import command
from pipeline.checkpoint.reader import damage
from pipeline.distributed.exit_record import record_exit, start_recording, stop_recording
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import file_lock
from pipeline.planning import diagnosis
from pipeline.planning.diagnosis import Evidence
from pipeline.training.run_folder import Origin
from pipeline.training.run_state import ValidationHistory
from tests.written_checkpoints import write

CONFIG = """
output: {run}
samples: 80
batch_size: 8
data: {{sources: x}}
schedule: {{warmup_steps: 1}}
"""


@pytest.fixture
def run(tmp_path):
    """The folder of a run of 10 steps that has taken 7 and was killed."""
    run = tmp_path / "my run"
    (run / "heartbeats").mkdir(parents=True)
    (run / ".lock").touch()
    (run / "config.yaml").write_text(CONFIG.format(run=run))
    for step in (2, 7):
        say(run, f"Loss is not finite at step {step}.", step=step)
    return run


def beat(run, *, rank=0, size=1, phase="forward"):
    """Leave the heartbeat of a rank that was killed."""
    phases = Phases(torch.device("cpu"))
    phases.mark(phase, step=7)
    world = World(rank=rank, size=size, phases=phases)
    Heartbeat(run / "heartbeats", world=world, lost_after=45.0, limit=60.0)._write()


def end(run, code, reason="", *, rank=0):
    start_recording(run / "heartbeats", rank=rank)
    record_exit(code, reason)
    stop_recording()


def say(run, message, *, step=0):
    """Add an event and a step to the records."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "event", "message": message}) + "\n")
        file.write(json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n")


def edit(run, old, new):
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace(old, new))


def damage_weights(run, step):
    weights = run / f"checkpoints/step-{step:08d}/open_clip_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def early(run):
    say(run, ValidationHistory(best_loss=2.5, best_step=3, since_best=2).describe_end())
    end(run, 0)


def fork(run):
    (run / "origin.json").write_text(json.dumps(asdict(Origin("/other/step-00000004", "abc"))))
    beat(run)


def one_of_two(run):
    for rank in (0, 1):
        beat(run, rank=rank, size=2)
    end(run, 76, "lost contact to another rank")


def fatal(run, name):
    beat(run)
    (run / "heartbeats" / "fatal-00000.txt").write_text(f"host 1\nFatal Python error: {name}\n")


def trained(run):
    say(run, "The last step.", step=10)


def examine(run):
    done = CliRunner().invoke(command, [str(run)], standalone_mode=False, catch_exceptions=False)
    return done.output, done.return_value


def last_line(output):
    return output.strip().splitlines()[-1]


RESUME = "neuclip train --recipe '{run}/config.yaml' --resume latest output='{run}'"
REPORT = "neuclip report '{run}'"
AGAIN = "output='{run}-again'"
TWICE = "--resume /other/step-00000004 output='{run}'"
CASES: dict[str, tuple[list[int], Callable[[Path], object], int, list[str], str]] = {
    # The checkpoints, what happened, the exit code, parts of what is said, and the end of the last line.
    "killed while stepping": ([3, 6], beat, 0, [
        "rank 0 ended without a word: killed from outside (SIGKILL), crashed in native code", "or the machine was lost",
        "last heartbeat: rank 0 (", "step 7, forward, for 0 s; no record of its end",
        "intact: step-00000003, step-00000006; 1 logged steps after the newest are trained",
    ], RESUME),
    "one of two ranks killed": ([6], one_of_two, 0, [
        "rank 1 ended without a word: killed from outside", "the other ranks noticed and ended",
    ], "--ranks 2 --resume latest output='{run}'"),
    "killed before the first checkpoint": ([], beat, 0, ["none was finished"], RESUME),
    "a fork killed before its first checkpoint": ([], fork, 0, [], TWICE),
    "a full disk": ([3], lambda run: (say(run, "Checkpoint NOT written"), end(run, 74)), 1, [
        "ended with 74: its last checkpoint could not be written", "last message: Checkpoint NOT written",
    ], RESUME),
    "a stalled worker": ([6], lambda run: (beat(run), end(run, 76, "Rank 0: no batch came. Worker 1 is stopped")), 1, [
        "ended with 76: another rank or a loading worker hung", "Rank 0: no batch came. Worker 1 is stopped"], RESUME),
    "a crash": ([6], lambda run: fatal(run, "Aborted"), 1, [
        "ended with 134: its process aborted (SIGABRT)", "the stacks are in"], "with --resume latest"),
    "stopped": ([3], lambda run: end(run, 75, "Stopped by SIGTERM."), 0, [
        "ended with 75: it was stopped by a signal: Stopped by SIGTERM."], RESUME),
    "finished": ([10], lambda run: end(run, 0), 0, ["finished: 10 steps"], REPORT),
    "stopped early": ([7], early, 0, [
        "finished: Stopped early: 2 validations in a row without a lower loss than 2.5000 at step 3"], REPORT),
    "resumed after that": ([7], lambda run: (early(run), say(run, "Resumed from step-00000007"), end(run, 75)), 0, [],
        RESUME),
    "killed in the last evaluation": ([10], lambda run: (trained(run), beat(run, phase="evaluation")), 0, [
        "ended without a word", "step 7, evaluation"], RESUME),
    "a raised budget": ([10], lambda run: (end(run, 0), edit(run, "samples: 80", "samples: 160")), 0, [
        "which has been raised since"], RESUME),
    "a damaged checkpoint": ([3, 6], lambda run: (damage_weights(run, 6), end(run, 75)), 1, [
        "the contents of open_clip_model.safetensors do not match their SHA-256", "intact: step-00000003; 4 logged"],
        RESUME),
    "no intact checkpoint": ([6], lambda run: (damage_weights(run, 6), end(run, 75)), 1, [
        "no checkpoint is intact"], AGAIN),
    "a damaged last checkpoint": ([6, 10], lambda run: (trained(run), damage_weights(run, 10), end(run, 0)), 1, [
        "trained to its end, but its last checkpoint is damaged or missing"], RESUME),
    "a missing last checkpoint": ([6], lambda run: (trained(run), end(run, 0)), 1, [
        "trained to its end, but its last checkpoint is damaged or missing"], RESUME),
    "consents": ([3], lambda run: (beat(run), edit(run, "sources: x", "sources: x, allow_outside: true")), 0, [
        RESUME + "\n"], "the run had data.allow_outside=true: add that only if you trust the run and its data"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_how_a_run_ended_and_how_it_goes_on(run, towers, case):
    steps, happen, expected, said, last = CASES[case]
    if steps:
        write(run, towers, steps)
    happen(run)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    output, code = examine(run)
    assert code == expected, output
    for part in said:
        assert part.format(run=run) in output
    assert last_line(output).endswith(last.format(run=run))
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}, "the doctor changed the folder"


def test_a_crash_that_would_come_again_is_not_resumed(run, towers):
    """Regression test: `--resume latest` was advised for a step that crashes every process that takes it."""
    for step, name in ((7, "Segmentation fault"), (7, "Aborted"), (7, "Bus error"), (3, "Segmentation fault")):
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        write(run, towers, [step])
        fatal(run, name)
        output = examine(run)[0]
        assert ("would crash again" in output) == (step == 7), name
        assert output.endswith("next           the command that started the run, with --resume latest\n") == (step == 3)


def test_never_started_and_moved(run, towers, tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text(CONFIG.format(run=new))
    assert "every rank ended without a word" in examine(new)[0]
    with pytest.raises(UserError, match="is not the folder of a run"):
        Evidence(tmp_path)
    write(run, towers, [6])
    moved = run.rename(run.with_name("moved"))
    assert last_line(examine(moved)[0]).endswith(f"--recipe {moved}/config.yaml --resume latest output={moved}")


def test_still_running(run, towers, monkeypatch):
    """Its checkpoints are not read: it may remove them meanwhile."""
    write(run, towers, [3])
    beat(run)
    with file_lock(run / ".lock"), monkeypatch.context() as patched:
        patched.setattr(diagnosis, "damage", None)
        output, code = examine(run)
    assert code == 0
    assert f", process {os.getpid()})" in output
    assert last_line(output).endswith("wait for it")
    monkeypatch.setattr(diagnosis, "damage", lambda path: shutil.rmtree(path) or damage(path))
    output, code = examine(run)  # of a run that starts meanwhile
    assert (code, "killed from outside" in output, "none was finished" in output) == (0, True, True)


def test_the_record_of_an_exit_fits_on_a_full_disk(run, tmp_path):
    record_exit(70, "an error of a process that holds no run")
    start_recording(tmp_path / "refused", rank=0)
    record_exit(2, "a refused start, whose folder was removed")
    stop_recording()
    assert not (tmp_path / "refused").exists()
    start_recording(run / "heartbeats", rank=0)
    before = (run / "heartbeats" / "reserved-00000.json").stat()
    assert not Evidence(run).exits
    record_exit(74, "No space left on device \U0001f4be" * 1000)
    stop_recording()
    after = (run / "heartbeats" / "exit-00000.json").stat()
    assert (after.st_blocks, after.st_size, after.st_ino) == (before.st_blocks, before.st_size, before.st_ino)
    assert "ended with 74: its last checkpoint could not be written" in examine(run)[0]
    assert not list((run / "heartbeats").glob("fatal-*"))


@pytest.mark.slow
def test_a_small_file_that_is_cut_off_or_something_else_is_no_bug(run, towers):
    write(run, towers, [3])
    (run / "run_id").write_text("0123456789abcdef")
    end(run, 70, "a reason", rank=1)
    fork(run)
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    assert len(files) == 10
    for path in files:
        whole = path.read_bytes()
        for body in (b"", b"[]", b'{"step": "x", "checkpoint": 5}', b"\xff\xfe\0", whole[: len(whole) // 2]):
            path.write_bytes(body)
            assert examine(run)[1] in (0, 1), (path, body)
        path.write_bytes(whole)
