"""The suite of GPU measurements: its commands are valid, it needs a GPU, and it keeps what it has measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jobs.bench import gpu
from tests.documents import Line, check
from tests.launch import lives, wait_for


@pytest.mark.parametrize("step", gpu.steps(), ids=lambda step: step.name)
def test_every_command_parses(step: gpu.Step) -> None:
    """With the parser of the program that it calls, in both forms."""
    for command in (step.command, step.tiny):
        assert command[0] == sys.executable
        words = [word.replace("{work}", "work") for word in command[1:]]
        if words[:2] == ["-m", "jobs.cli"]:
            check(Line("gpu suite", {}, ("neuclip", *words[2:])))
        elif words[1].startswith("jobs.bench.") and words[1] != "jobs.bench.gpu":
            check(Line("gpu suite", {}, ("python", *words)))


def test_all_steps_fit_into_the_time_although_one_overruns() -> None:
    steps = gpu.steps()
    overrun = max(step.seconds + 30 for step in steps)  # from the expected time to the limit
    assert sum(step.seconds for step in steps) + overrun <= 25 * 60


def test_compiling_for_too_long_costs_no_other_result() -> None:
    """A step that exceeds its limit prints no table."""
    lists = [step.command[step.command.index("--options") + 1 :] for step in gpu.steps() if "--options" in step.command]
    assert [options for options in lists if "compile" in options] == [["trim_image", "compile"]]


def test_a_step_leaves_no_process_behind(tmp_path: Path) -> None:
    """One that a step has started would hold memory of the GPU."""
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    )
    command = [sys.executable, "-c", code]
    assert gpu.take(gpu.Step("s", "?", 60, command, command), work=tmp_path, tiny=True).status == "done"
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not lives(pid), "the step's child ends", seconds=10)


def test_an_interrupted_suite_keeps_what_the_step_has_printed(tmp_path: Path) -> None:
    """Regression test: a machine was given back during a step, and its first table was lost."""
    step = "import os, time; print('a table', os.getpid(), flush=True); time.sleep(300)"
    suite = (
        "import sys; from jobs.bench import gpu; command = [sys.executable, '-c', sys.argv[1]]; gpu.steps = lambda: "
        "[gpu.Step('a step', '?', 60, command, command)]; gpu.main(['--tiny', '--output', sys.argv[2]])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", suite, step, str(tmp_path / "gpu.json")], stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "gpu-a-step.log"
    try:
        wait_for(lambda: log.exists() and "a table" in log.read_text(), "the step prints", process=process)
        process.terminate()
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert log.read_text().startswith("a table")
    pid = int(log.read_text().split()[2])
    wait_for(lambda: not lives(pid), "the step ends", seconds=10)


def test_a_step_does_not_take_itself_for_a_rank_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that a test or a shell has left would let every training step wait for other ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_NUM_TASKS")
    for name in names:
        monkeypatch.setenv(name, "2")
    command = [sys.executable, "-c", f"import os; print([n for n in {names} if n in os.environ])"]
    assert gpu.take(gpu.Step("s", "?", 60, command, command), work=tmp_path, tiny=True).output == ["[]"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sees no GPU on this machine, so nothing was measured.*--tiny"):
        gpu.main(["--output", str(tmp_path / "gpu.json")])
    assert not list(tmp_path.iterdir())


def test_the_dry_run_lists_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(step.name in printed and step.answers in printed for step in gpu.steps())
    assert "All together about 21.8 of 25 minutes." in printed


def test_failures_and_what_there_was_no_time_for_are_recorded(tmp_path: Path) -> None:
    def step(name: str, code: str, seconds: int = 1) -> gpu.Step:
        command = [sys.executable, "-c", code]
        return gpu.Step(name, "?", seconds, command, command)

    steps = [step("good", "print('fine')"), step("bad", "raise SystemExit(3)"), step("long", "", seconds=1000)]
    output = tmp_path / "new" / "gpu.json"
    assert gpu.suite(steps, output=output, seconds=500, tiny=True) == 1
    written = json.loads(output.read_text())
    assert [outcome["status"].split(":")[0] for outcome in written["steps"]] == ["done", "failed", "left out"]
    assert written["steps"][0]["output"] == ["fine"]
    assert "exit code 3" in written["steps"][1]["status"]
    assert written["machine"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "nosuch", "network"], "--only 'nosuch' names no step"),
        (["--only", ""], "--only '' names no step"),
        (["--minutes", "nan"], "--minutes must be above 0, not nan"),
        (["--tiny", "--output", "{folder}"], "exists already: give --output another name"),
        (["--tiny", "--output", "{folder}/file/x.json"], "cannot be written (File exists): give --output another name"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also results of an earlier call, which `--only` would replace."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as refused:
        gpu.main([word.replace("{folder}", str(tmp_path)) for word in words])
    assert message in f"{refused.value} {capsys.readouterr().err}"


def test_minutes_are_a_limit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    assert gpu.suite([gpu.Step("s", "?", 1, command, command)], output=tmp_path / "x.json", seconds=2, tiny=True) == 1
    assert json.loads((tmp_path / "x.json").read_text())["steps"][0]["status"] == "failed: not done after 2 s"


def test_missing_packages_are_named_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("json", "no_such_package"))
    with pytest.raises(SystemExit, match=r"missing here: no_such_package\. docs/benchmarks\.md"):
        gpu.suite(gpu.steps(), output=tmp_path / "gpu.json", seconds=1, tiny=True)


def test_without_shared_memory_nothing_is_loaded_by_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_SHARED", 0)
    assert gpu.workers(8, shared=tmp_path) == "data.workers=8"
    assert gpu.workers(8, shared=tmp_path / "none") == "data.workers=0"
    monkeypatch.setattr(gpu, "LEAST_SHARED", 2**63)
    assert gpu.workers(8, shared=tmp_path) == "data.workers=0"


def test_figures_are_those_of_the_second_half(tmp_path: Path) -> None:
    records = [{"kind": "event"}] + [{"kind": "train", "loss": 1.0, "samples_per_second": rate, "lr": 1.0,
                                      "time_npn": 0.1} for rate in (1, 2, 30, 40, 50)]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert gpu.figures(tmp_path) == {"loss": 1.0, "samples_per_second": 40.0, "time_npn": 0.1}
    assert gpu.figures(tmp_path / "none") == {}


@pytest.mark.daily
@pytest.mark.slow  # minutes: every step as a process of its own
def test_every_step_runs_in_its_tiny_form(tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--output", str(output)]) == 0, output.read_text()
