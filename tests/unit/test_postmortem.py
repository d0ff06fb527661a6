"""`neuclip doctor RUN` says how a run ended, what is intact and how to continue."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from jobs.doctor import command
from pipeline.checkpoint.reader import damage
from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter
from pipeline.config import read_yaml
from pipeline.data.loading.worker_processes import StallWatch
from pipeline.distributed import exit_record
from pipeline.distributed.exit_record import record_exit, reserve_space, start_recording, stop_recording
from pipeline.distributed.heartbeat import Beat, Heartbeat, read_beat
from pipeline.distributed.timing import Phases
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.evaluation.watch.ledger import DONE
from pipeline.evaluation.watch.watcher import LEDGER_FOLDER
from pipeline.metrics.sinks import JsonLines, SinkContext
from pipeline.postmortem import evidence as evidence_module
from pipeline.postmortem.diagnosis import diagnose
from pipeline.postmortem.evidence import read_evidence
from pipeline.run_files import read_run_id, write_run_id
from pipeline.training.recipe import ValidationConfig
from pipeline.training.run_start import Origin
from pipeline.training.validation import Validation, ValidationHistory
from tests.launch import ROOT, wait_for
from tests.written_checkpoints import Towers, snapshot, write

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
fcntl.lockf(lock, fcntl.LOCK_EX)
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


def say(run: Path, message: str) -> None:
    sink = JsonLines(SinkContext(run, total_steps=10, first_step=9))
    sink.event(message, facts={})
    sink.close()


def examine(run: Path) -> tuple[str, int]:
    done = CliRunner().invoke(command, [str(run)], standalone_mode=False, catch_exceptions=False)
    return done.output, done.return_value


def last_line(output: str) -> str:
    return output.strip().splitlines()[-1]


def test_killed_while_stepping(run: Path, towers: Towers) -> None:
    write(run, towers, [3, 6])
    beat(run)
    output, code = examine(run)
    assert code == 0
    assert "rank 0 ended without a word: killed from outside (SIGKILL), crashed in native code" in output
    assert "frozen, or the machine was lost" in " ".join(output.split())
    assert "in step 7, forward" in output
    assert "intact: step-00000003, step-00000006; 1 logged steps after the newest are trained again" in output
    assert last_line(output).endswith(f"neuclip train --recipe '{run}/config.yaml' --resume latest output='{run}'")


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


def test_the_next_command_does_not_consent_for_the_user(run: Path, towers: Towers) -> None:
    write(run, towers, [3])
    beat(run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("sources: x", "sources: x, allow_commands: true"))
    output, _ = examine(run)
    assert f"--resume latest output='{run}'\n" in output
    assert "the run had data.allow_commands=true: add that only if you trust the run" in last_line(output)


def test_one_killed_rank_of_two_is_the_cause_that_is_named(run: Path, towers: Towers) -> None:
    write(run, towers, [6])
    for rank in (0, 1):
        beat(run, rank=rank, size=2)
    end(run, 76, "lost contact to another rank")
    output, _ = examine(run)
    assert "rank 1 ended without a word: killed from outside" in output.splitlines()[0]
    assert "the other ranks noticed and ended" in output
    assert last_line(output).endswith(f"--ranks 2 --resume latest output='{run}'")


def test_killed_while_writing_a_checkpoint(run: Path, towers: Towers) -> None:
    write(run, towers, [3])
    (run / "checkpoints" / "step-00000003").rename(run / "checkpoints" / ".step-00000006")
    write_kept = run / "checkpoints" / ".step-00000006"
    beat(run, phase="checkpoint")
    output, code = examine(run)
    assert code == 0
    assert "while step-00000006 was being written" in output
    assert "was never finished; the next checkpoint removes it" in output
    assert "none was finished" in output
    assert write_kept.is_dir(), "the doctor changed the folder"


def test_a_full_disk(run: Path, towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, towers, [3])
    say(run, "Checkpoint step-00000006 could NOT be written (OSError: No space left).")
    end(run, 74, "")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    output, code = examine(run)
    assert code == 1
    assert "ended with 74: its last checkpoint could not be written" in output
    assert "less than one checkpoint" in output
    assert "1 checkpoints failed; the last: Checkpoint step-00000006 could NOT be written" in output


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


def test_finished(run: Path, towers: Towers) -> None:
    write(run, towers, [10])
    end(run, 0)
    output, code = examine(run)
    assert code == 0
    assert "finished: 10 steps" in output
    assert last_line(output).endswith(f"neuclip report '{run}'")


@pytest.mark.parametrize("evaluation", ["", "evaluation: {suite: somewhere}\n"])
def test_stopped_early_by_the_validation_loss(run: Path, towers: Towers, evaluation: str) -> None:
    write(run, towers, [7])
    with (run / "config.yaml").open("a") as file:
        file.write(evaluation)
    history = ValidationHistory(best_loss=2.5, best_step=3, since_best=2)
    validation = Validation(ValidationConfig(), pairs=None, tau=1.0, history=history, report=print)  # type: ignore[arg-type]
    say(run, validation.describe_end())
    end(run, 0)
    output, code = examine(run)
    assert code == 0
    assert "finished: Stopped early: 2 validations in a row without a lower loss than 2.5000 at step 3" in output
    assert last_line(output).endswith(f"neuclip report '{run}'")
    say(run, "Resumed from step-00000007 (step 7 of 10).")
    end(run, 75)
    assert last_line(examine(run)[0]).endswith(f"--resume latest output='{run}'")


def test_the_size_of_a_checkpoint_includes_its_average(run: Path, towers: Towers) -> None:
    writer = CheckpointWriter(run, config=CheckpointConfig(), world=World(), architecture=towers[1], on_event=print)
    writer.save(replace(snapshot(towers, 3), ema=towers[0]))
    writer.wait()
    path = run / "checkpoints" / "step-00000003"
    parts = [sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) for folder in (path, path / "ema")]
    assert read_evidence(run).checkpoints[0].size == sum(parts)
    assert min(parts) > 0


def test_never_started(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(CONFIG.format(run=run, fallback="null"))
    assert "never took a step" in examine(run)[0]
    (run / "heartbeats").mkdir()
    end(run, 75, "Stopped by SIGTERM while starting.")
    output, code = examine(run)
    assert code == 0
    assert "ended with 75: it was stopped by a signal: Stopped by SIGTERM while starting." in output
    with pytest.raises(UserError, match="is not the folder of a run"):
        read_evidence(tmp_path)


def test_damaged_checkpoints(run: Path, towers: Towers) -> None:
    write(run, towers, [3, 6])
    weights = run / "checkpoints" / "step-00000006" / "open_clip_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    end(run, 75)
    output, code = examine(run)
    assert code == 1
    assert "the contents of open_clip_model.safetensors do not match their SHA-256" in output
    assert "intact: step-00000003; 4 logged steps" in output
    assert read_evidence(run, verify=False).checkpoints[-1].problem == ""
    (run / "checkpoints" / "step-00000003" / "moments.safetensors").unlink()
    output, _ = examine(run)
    assert last_line(output).endswith(f"output='{run}-again'")
    assert "no checkpoint is intact" in last_line(output)


def test_a_finished_run_whose_last_checkpoint_is_damaged(run: Path, towers: Towers) -> None:
    """Regression test: the report said that the budget of samples had been raised."""
    write(run, towers, [6, 10])
    sink = JsonLines(SinkContext(run, total_steps=10, first_step=7))
    sink.scalars("train", step=10, values={"loss": 1.0})
    sink.close()
    end(run, 0)
    (run / "checkpoints/step-00000010/moments.safetensors").unlink()
    output, code = examine(run)
    assert code == 1
    assert "trained to its end, but its last checkpoint is damaged or missing" in output.splitlines()[0]
    assert "--resume latest" in last_line(output)


def test_data_that_is_not_on_this_machine_is_named(run: Path, towers: Towers, tmp_path: Path) -> None:
    write(run, towers, [6])
    end(run, 75)
    config = run / "config.yaml"
    features = "{sources: x, teacher_features: [y]}\nobjective: {name: openclip, distill: 1}"
    config.write_text(config.read_text().replace("{sources: x}", features))
    output, code = examine(run)
    assert code == 0
    assert "not on this machine: data.sources=x data.teacher_features=y" in " ".join(output.split())
    assert "--resume latest" in last_line(output)
    (tmp_path / "x").mkdir()
    config.write_text(config.read_text().replace(features, f"{{sources: {tmp_path / 'x'}}}"))
    assert "not on this machine" not in examine(run)[0]


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

    monkeypatch.setattr(evidence_module, "read_beat", ends)
    monkeypatch.setattr(evidence_module, "damage", prunes)
    evidence = read_evidence(run)
    assert [found.rank for found, _ in evidence.beats] == [0]
    assert [checkpoint.step for checkpoint in evidence.checkpoints] == [6]


def test_still_running(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        last, slept = run / "heartbeats" / "rank-00000.json", list[float]()
        os.utime(last, (0, time.time() - 1000))
        # only the module's own clock: other threads of this process sleep, too
        monkeypatch.setattr(evidence_module, "time", SimpleNamespace(time=time.time, sleep=slept.append))
        assert "a heartbeat is 1000 s old" in examine(run)[0]

        for jump in (-1000, 1000):  # of the clock that the files' times are from

            def next_beat(seconds: float, jump: int = jump) -> None:
                slept.append(seconds)
                last.write_text(json.dumps({**json.loads(last.read_text()), "beat": len(slept)}))
                os.utime(last, (0, time.time() + jump))

            monkeypatch.setattr(evidence_module, "time", SimpleNamespace(time=time.time, sleep=next_beat))
            next_beat(0.0)
            assert "is running (a host, process 7)" in examine(run)[0]
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert "killed from outside" in examine(run)[0]


def test_a_checkpoint_in_the_fallback_folder_is_found(run: Path, towers: Towers) -> None:
    write(run, towers, [3])
    spare = run.parent / "spare" / f"{run.name}-{read_run_id(run)}"
    write(spare, towers, [7])
    end(run, 75)
    output, _ = examine(run)
    assert f"the newest is in {spare}" in output


def test_watchers_that_died_and_abandoned_checkpoints_are_listed(run: Path) -> None:
    ledger = run / "evaluation-ledger" / "suite"
    for name, done in (("step-00000003", None), ("step-00000006", {"outcome": "abandoned"})):
        (ledger / name).mkdir(parents=True)
        if done:
            (ledger / name / "done.json").write_text(json.dumps(done))
    evidence = read_evidence(run)
    assert dict(evidence.evaluations) == {"step-00000003": "unfinished", "step-00000006": "abandoned"}
    shown = {finding.found for finding in diagnose(evidence) if finding.subject == "evaluations"}
    assert shown == {"not finished: step-00000003", "abandoned after several attempts: step-00000006"}


def test_a_process_that_holds_no_run_records_nothing(tmp_path: Path) -> None:
    record_exit(70, "an error elsewhere")
    start_recording(tmp_path / "refused", rank=0)
    record_exit(2, "a refused start, whose folder was removed")
    stop_recording()
    assert not list(tmp_path.iterdir())
    assert exit_record._Recording.run is None


def test_records_that_are_cut_off_are_skipped(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 8')
    (run / "heartbeats" / "rank-00000.json").write_text("{")
    (run / "heartbeats" / "exit-00000.json").write_text("[]")
    evidence = read_evidence(run)
    assert (evidence.steps, evidence.total_steps) == (7, 10)
    assert (list(evidence.beats), list(evidence.exits)) == ([], [])


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


def test_a_fork_that_was_killed_before_its_first_checkpoint(run: Path) -> None:
    origin = Origin(str(run.parent / "other" / "step-00000004"), "abc", new_batch_size=True)
    (run / "origin.json").write_text(json.dumps(asdict(origin)))
    beat(run)
    output, _ = examine(run)
    assert last_line(output).endswith(f"--resume {origin.checkpoint} --new-batch-size output='{run}'")


def test_a_moved_folder_and_settings_that_cannot_be_continued_with(run: Path, towers: Towers) -> None:
    write(run, towers, [6])
    moved = run.rename(run.with_name("moved"))
    assert last_line(examine(moved)[0]).endswith(f"--recipe {moved}/config.yaml --resume latest output={moved}")
    with (moved / "config.yaml").open("a") as file:
        file.write("no_such_setting: 1\n")
    output, code = examine(moved)
    assert code == 1
    assert "cannot be continued with: The configuration is not valid. Unknown key no_such_setting" in output


NOT_EVALUATED = "trained to its end, but its last weights were not evaluated: it was killed in the evaluation"


@pytest.mark.parametrize(
    ("damaged", "suite", "expected"),
    [
        (True, "", "trained to its end, but no checkpoint is intact"),
        (False, "folder", NOT_EVALUATED),
        (False, "{a: 1}", NOT_EVALUATED),
        (False, "", "finished: 10 steps"),
    ],
)
def test_a_run_that_reached_its_last_step(run: Path, towers: Towers, damaged: bool, suite: str, expected: str) -> None:
    write(run, towers, [10])
    sink = JsonLines(SinkContext(run, total_steps=10, first_step=9))
    for step in (8, 9, 10):
        sink.scalars("train", step=step, values={"loss": 1.0})
    sink.close()
    if suite:
        with (run / "config.yaml").open("a") as file:
            file.write(f"evaluation: {{suite: {suite}}}\n")
        beat(run, phase="evaluation")
    if damaged:
        end(run, 0)
        next((run / "checkpoints" / "step-00000010").glob("*.safetensors")).write_bytes(b"")
    output, code = examine(run)
    assert expected in output.splitlines()[0]
    assert code == int(damaged or suite == "{a: 1}")


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
    beat(run)
    end(run, 70, "a reason", rank=1)
    (ledger := run / LEDGER_FOLDER / "all" / "step-00000003" / DONE).parent.mkdir(parents=True)
    ledger.write_text('{"outcome": "finished"}')
    origin = Origin(str(run.parent / "other" / "step-00000004"), "abc")
    (run / "origin.json").write_text(json.dumps(asdict(origin)))
    config = run / "config.yaml"
    config.write_text(json.dumps(read_yaml(config)))  # JSON is YAML
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
    assert len(files) == 11
    for path in files:
        whole = path.read_bytes()
        for body in damaged(whole):
            path.write_bytes(body)
            assert examine(run)[1] in (0, 1), (path, body[:200])
        path.write_bytes(whole)
