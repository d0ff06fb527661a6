"""`neuclip doctor RUN` says how a run ended, what is intact and how to continue."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from jobs.doctor import command
from pipeline.checkpoint.reader import damage
from pipeline.config import read_yaml
from pipeline.data.loading.worker_processes import StallWatch
from pipeline.distributed import exit_record
from pipeline.distributed.exit_record import record_exit, reserve_space, start_recording, stop_recording
from pipeline.distributed.heartbeat import Beat, Heartbeat, read_beat
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.metrics.sinks import JsonLines, SinkContext
from pipeline.postmortem import diagnosis
from pipeline.postmortem.diagnosis import read_evidence
from pipeline.run_files import read_run_id, write_run_id
from pipeline.training.run_start import Origin
from pipeline.training.validation import ValidationHistory
from tests.launch import ROOT, wait_for
from tests.written_checkpoints import Towers, write

CONFIG = """
output: {run}
samples: 80
batch_size: 8
data: {{sources: x}}
schedule: {{warmup_steps: 1}}
checkpoint: {{fallback: {fallback}}}
"""
HOLDS = """
import fcntl, sys, time
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write("a host, process 7"); lock.flush()
print("locked", flush=True)
time.sleep(100)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of 10 steps that has taken 7 and was killed."""
    run = tmp_path / "my run"
    (run / "heartbeats").mkdir(parents=True)
    (run / ".lock").touch()
    (run / "config.yaml").write_text(CONFIG.format(run=run, fallback=tmp_path / "spare"))
    sink = JsonLines(SinkContext(run, total_steps=10, first_step=0))
    sink.event("Loss is not finite at step 2.", facts={})
    for step in range(1, 8):
        sink.scalars("train", step=step, values={"loss": 1.0})
    sink.close()
    return run


def beat(run: Path, *, rank: int = 0, size: int = 1, phase: str = "forward") -> None:
    """Leave the heartbeat of a rank that was killed."""
    heartbeat = Heartbeat(run, world=World(rank=rank, size=size), phases=Phases(torch.device("cpu")), timeout_seconds=9)
    heartbeat._phases.mark(phase, step=7)
    heartbeat._write()


def end(run: Path, code: int, reason: str = "", *, rank: int = 0) -> None:
    start_recording(run, rank=rank)
    record_exit(code, reason)
    stop_recording()


def say(run: Path, message: str = "", *, step: int = 0) -> None:
    sink = JsonLines(SinkContext(run, total_steps=10, first_step=9))
    if message:
        sink.event(message, facts={})
    if step:
        sink.scalars("train", step=step, values={"loss": 1.0})
    sink.close()


def edit(run: Path, old: str, new: str) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(old, new) if old else text + new)


def damage_weights(run: Path, step: int) -> None:
    weights = run / f"checkpoints/step-{step:08d}/open_clip_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def early(run: Path) -> None:
    history = ValidationHistory(best_loss=2.5, best_step=3, since_best=2)
    say(run, history.describe_end())
    end(run, 0)


def fork(run: Path) -> None:
    origin = Origin("/other/step-00000004", "abc", new_batch_size=True)
    (run / "origin.json").write_text(json.dumps(asdict(origin)))
    beat(run)


def in_fallback(run: Path) -> None:
    spare = run.parent / "spare" / f"{run.name}-{read_run_id(run)}" / "checkpoints"
    spare.mkdir(parents=True)
    (run / "checkpoints/step-00000006").rename(spare / "step-00000006")
    end(run, 75)


def one_of_two(run: Path) -> None:
    for rank in (0, 1):
        beat(run, rank=rank, size=2)
    end(run, 76, "lost contact to another rank")


def trained(run: Path) -> None:
    say(run, step=10)


def examine(run: Path) -> tuple[str, int]:
    done = CliRunner().invoke(command, [str(run)], standalone_mode=False, catch_exceptions=False)
    return done.output, done.return_value


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


RESUME = "neuclip train --recipe '{run}/config.yaml' --resume latest output='{run}'"
REPORT = "neuclip report '{run}'"
AGAIN = "output='{run}-again'"
TWICE = "--resume /other/step-00000004 --new-batch-size output='{run}'"
CASES: dict[str, tuple[list[int], Callable[[Path], object], int, list[str], str]] = {
    # The checkpoints, what happened, the exit code, parts of what is said, and the end of the last line.
    "killed while stepping": ([3, 6], beat, 0, [
        "rank 0 ended without a word: killed from outside (SIGKILL), crashed in native code", "in step 7, forward",
        "or the machine was lost", "intact: step-00000003, step-00000006; 1 logged steps after the newest are trained",
    ], RESUME),
    "one of two ranks killed": ([6], one_of_two, 0, [
        "rank 1 ended without a word: killed from outside", "the other ranks noticed and ended",
    ], "--ranks 2 --resume latest output='{run}'"),
    "killed before the first checkpoint": ([], beat, 0, ["none was finished"], RESUME),
    "a fork killed before its first checkpoint": ([], fork, 0, [], TWICE),
    "a full disk": ([3], lambda run: (say(run, "Checkpoint NOT written"), end(run, 74)), 1, [
        "ended with 74: its last checkpoint could not be written", "last message: Checkpoint NOT written",
    ], RESUME),
    "stopped": ([3], lambda run: end(run, 75, "Stopped by SIGTERM."), 0, [
        "ended with 75: it was stopped by a signal: Stopped by SIGTERM."], RESUME),
    "finished": ([10], lambda run: end(run, 0), 0, ["finished: 10 steps"], REPORT),
    "stopped early": ([7], early, 0, [
        "finished: Stopped early: 2 validations in a row without a lower loss than 2.5000 at step 3"], REPORT),
    "resumed after that": ([7], lambda run: (early(run), say(run, "Resumed from step-00000007"), end(run, 75)), 0, [],
        RESUME),
    "killed in the last evaluation": ([10], lambda run: (trained(run), beat(run, phase="evaluation")), 0, [
        "ended without a word", "in step 7, evaluation"], RESUME),
    "a raised budget": ([10], lambda run: (end(run, 0), edit(run, "samples: 80", "samples: 160")), 0, [
        "which has been raised since"], RESUME),
    "a damaged checkpoint": ([3, 6], lambda run: (damage_weights(run, 6), end(run, 75)), 1, [
        "the contents of open_clip_model.safetensors do not match their SHA-256", "intact: step-00000003; 4 logged"],
        RESUME),
    "no intact checkpoint": ([6], lambda run: (damage_weights(run, 6), end(run, 75)), 1, [
        "no checkpoint is intact"], AGAIN),
    "a damaged last checkpoint": ([6, 10], lambda run: (trained(run), damage_weights(run, 10), end(run, 0)), 1, [
        "trained to its end, but its last checkpoint is damaged or missing"], RESUME),
    "a checkpoint in the fallback folder": ([3, 6], in_fallback, 0, ["the newest is in"], RESUME),
    "consents": ([3], lambda run: (beat(run), edit(run, "sources: x", "sources: x, allow_commands: true")), 0, [
        RESUME + "\n"], "the run had data.allow_commands=true: add that only if you trust the run and its data"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_how_a_run_ended_and_how_it_goes_on(run: Path, towers: Towers, case: str) -> None:
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


def test_a_crash_that_would_come_again_is_not_resumed(run: Path, towers: Towers) -> None:
    """Regression test: `--resume latest` was advised for a step that crashes every process that takes it."""
    write(run, towers, [7])
    beat(run)
    fatal = run / "heartbeats" / "fatal-00000.txt"
    for name, advised in (("Segmentation fault", False), ("Aborted", False), ("Bus error", False), ("", True)):
        fatal.write_text(f"host 1\nFatal Python error: {name}\n" if name else "host 1\n")
        output = " ".join(examine(run)[0].split())
        assert ("would crash again" in output) != advised, name
        assert ("neuclip train --recipe" in output) == advised, name
    fatal.write_text("host 1\nFatal Python error: Segmentation fault\n")
    shutil.rmtree(run / "checkpoints")
    write(run, towers, [3])
    output = examine(run)[0]
    assert "--resume latest" in output
    assert "would crash again" not in output


def test_a_stalled_loading_worker_is_reported_in_its_own_words(
    run: Path, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, towers, [6])
    beat(run)
    monkeypatch.setattr(os, "_exit", lambda code: threading.Event().wait())
    start_recording(run, rank=0)
    with StallWatch(0.05, lambda: "Rank 0: no batch came. Worker 1 is stopped, has open 00007.tar.").waiting():
        wait_for((run / "heartbeats" / "exit-00000.json").exists, "the end is recorded", seconds=20)
    stop_recording()
    output, code = examine(run)
    assert code == 1
    assert "ended with 76: another rank or a loading worker hung" in output
    assert "Worker 1 is stopped, has open 00007.tar." in output


def test_never_started_moved_and_short_of_space(
    run: Path, towers: Towers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_text(CONFIG.format(run=new, fallback="null"))
    assert "never took a step" in examine(new)[0]
    with pytest.raises(UserError, match="is not the folder of a run"):
        read_evidence(tmp_path)
    write(run, towers, [6])
    moved = run.rename(run.with_name("moved"))
    assert last_line(examine(moved)[0]).endswith(f"--recipe {moved}/config.yaml --resume latest output={moved}")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    output, code = examine(moved)
    assert code == 1
    assert "less than one checkpoint" in output
    damage_weights(moved, 6)
    assert [len(read_evidence(moved, verify=verify).intact) for verify in (True, False)] == [0, 1]


def test_what_a_running_run_removes_meanwhile_is_skipped(
    run: Path, towers: Towers, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(run, towers, [3, 6])
    for rank in (0, 1):
        beat(run, rank=rank, size=2)

    def ends(path: Path) -> Beat | None:
        found = read_beat(path)
        if "00001" in path.name:
            path.unlink()
        return found

    def prunes(path: Path, **how: bool) -> str | None:
        if path.name == "step-00000003":
            shutil.rmtree(path)
            raise FileNotFoundError(path)
        return damage(path, **how)

    monkeypatch.setattr(diagnosis, "read_beat", ends)
    monkeypatch.setattr(diagnosis, "damage", prunes)
    evidence = read_evidence(run)
    assert [found.rank for found, _ in evidence.beats] == [0]
    assert [path.name for path in evidence.intact] == ["step-00000006"]


def test_still_running(run: Path) -> None:
    beat(run)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(run / ".lock")], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        output, code = examine(run)
        assert code == 0
        assert "is running (a host, process 7)" in output
        assert last_line(output).endswith("wait for it")
    finally:
        holder.kill()
        holder.wait()
    assert "killed from outside" in examine(run)[0]


def test_a_process_that_holds_no_run_records_nothing(tmp_path: Path) -> None:
    record_exit(70, "an error elsewhere")
    start_recording(tmp_path / "refused", rank=0)
    record_exit(2, "a refused start, whose folder was removed")
    stop_recording()
    assert not list(tmp_path.iterdir())
    assert exit_record._Recording.run is None


def test_the_record_of_an_exit_fits_on_a_full_disk(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_recording(run, rank=0)
    reserve_space()
    (reserved,) = (run / "heartbeats").glob("exit-00000.*.tmp")
    guessed = run / "heartbeats" / "exit-00000.tmp"
    guessed.symlink_to(run.parent / "precious")  # by somebody else: it is neither followed nor used
    size, inode = reserved.stat().st_size, reserved.stat().st_ino
    record_exit(74, "No space left on device " * 1000)
    stop_recording()
    written = run / "heartbeats" / "exit-00000.json"
    assert guessed.is_symlink()
    assert not (run.parent / "precious").exists()
    assert (written.stat().st_size, written.stat().st_ino) == (size, inode)
    assert "ended with 74: its last checkpoint could not be written" in examine(run)[0]


DAMAGED = (b"", b"[]", b"null", b"5", b'"x"', b"\xff\xfe\0", b"{}", b"[" * 100_000, b'{"a": ' * 100_000)
WRONG = (None, 5, -1, 0.5, 10**400, float("nan"), True, "x", "../../x", "\ud800", [], [[]], {}, {"a": {}})


def damaged(body: bytes) -> Iterator[bytes]:
    """A small file's content with every kind of damage; of a JSON object, also with each field wrong or missing."""
    yield from (*DAMAGED, body[: len(body) // 2])
    with suppress(ValueError, AttributeError):
        tree = json.loads(body)
        for key in tree:
            yield from (json.dumps({**tree, key: value}).encode() for value in WRONG)
            yield json.dumps({name: value for name, value in tree.items() if name != key}).encode()


@pytest.mark.slow
def test_no_damaged_small_file_is_taken_for_a_bug(run: Path, towers: Towers) -> None:
    """Regression test: an origin.json whose checkpoint is a number, and any nested too deeply, ended with 70."""
    write(run, towers, [3])
    write_run_id(run, "0123456789abcdef")
    end(run, 70, "a reason", rank=1)
    fork(run)
    config = run / "config.yaml"
    config.write_text(json.dumps(read_yaml(config)))  # JSON is YAML
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    assert len(files) == 10
    for path in files:
        whole = path.read_bytes()
        for body in damaged(whole):
            path.write_bytes(body)
            assert examine(run)[1] in (0, 1), (path, body[:200])
        path.write_bytes(whole)
