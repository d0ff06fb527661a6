"""The commands of docs/getting-started.md, run unchanged and in order, at a tiny size, and the wheel.

The demo runs from the wheel, in a folder that has a `pipeline.py` of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.documents import BLOCK, ROOT, Line, blocks, lines
from tests.launch import environment, run, wait_for
from tests.metrics import metrics
from tests.towers import write_tiny

PAGE = ROOT / "docs" / "getting-started.md"
SHRINK = 40
"""The page's budgets are divided by this."""
# The files of a first run that the page lists, except the budget. Commands after the demo use its output.
SMALLER_DEMO = ["--pairs", "1000", "--held-out", "50", "objective.prototypes=64"]
SMALLER_RUN = ["batch_size=32", "schedule.warmup_steps=5", "checkpoint.every=10", "checkpoint.keep_every=10"]
PACKAGES = ("pipeline", "data_prep", "jobs", "ds_configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources without network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "neuclip.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("neuclip-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    target = wheel.parent / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(wheel)], check=True, timeout=300)
    return target


def outside(installed: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a command in `cwd` with the installed wheel instead of the repository."""
    where = {**environment(), "PYTHONPATH": str(installed)}
    return subprocess.run(words, cwd=cwd, env=where, text=True, capture_output=True, timeout=600)


def test_the_wheel_has_every_file_that_is_not_python(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    assert {"neuclip.py", "jobs/recipes/own.yaml", "ds_configs/zero1_bf16.json", "pipeline/report/run.html"} <= held
    assert not expected - held


def here(word: str, tmp: Path) -> str:
    """Return a word of a command with its output folders moved below `tmp`."""
    if word == "source.table=urls.parquet":
        return f"source.table={tmp}/runs/scenes/urls.parquet"
    word = re.sub(r"samples=(\d+)", lambda found: f"samples={int(found[1]) // SHRINK}", word)
    return re.sub(r"^((?:[a-z.]+=)?)(runs|hub|data/mine)(?=/|$)", rf"\1{tmp}/\2", word)


def command(line: Line, tmp: Path, tiny: str) -> list[str]:
    """Return the command to run for a line of the page."""
    words = [here(word, tmp) for word in line.words]
    program, arguments = words[0], words[1:]
    if program == "neuclip":
        start = [sys.executable, "-m", "jobs.cli"]
    elif program == "python":
        start = [sys.executable]
    else:
        assert program == "torchrun", f"the test does not know how to run {program}"
        start = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
        start += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    if arguments[0] == "demo":
        arguments += SMALLER_DEMO
    if arguments[0] in ("demo", "train") or program == "torchrun":
        arguments += [f"model.arch={tiny}", *SMALLER_RUN]
    if f"output={tmp}/data/mine" in arguments:
        arguments += ["guard.allow_addresses=[127.0.0.1]"]
    return [*start, *arguments]


def steps(run: Path) -> list[int]:
    return [record["step"] for record in metrics(run, "train")]


@pytest.mark.slow
def test_every_command_does_what_the_page_says(tmp_path, installed, shadowed):
    tiny = write_tiny(tmp_path)
    outputs: dict[str, str] = {}
    server: subprocess.Popen[str] | None = None
    try:
        for line in lines([PAGE]):
            text = " ".join(line.words)
            if line.words[0] in ("make", "source"):  # this test already runs in that environment
                continue
            call = command(line, tmp_path, tiny)
            if "data_prep.scenes" in call:  # runs in the second terminal of the page
                server = subprocess.Popen(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True)  # fmt: skip
                wait_for(Path(call[call.index("--table") + 1]).exists, "the table", process=server, seconds=120)
                continue
            _, _, module, *arguments = call
            if arguments[0] == "demo":
                done = outside(installed, shadowed, sys.executable, str(installed / "bin" / "neuclip"), *arguments)
                outputs["again"] = run(module, *arguments).stdout
            else:
                done = run(module, *arguments, timeout=500, check=False)
            # Whether this machine is suitable for large runs is not tested here.
            allowed = (0, 1) if line.words[1] == "doctor" else (0,)
            assert done.returncode in allowed, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            outputs[text] = done.stdout + done.stderr
    finally:
        if server is not None:
            server.terminate()
            server.communicate(timeout=30)
    check_files(tmp_path)
    check_outputs(outputs)
    check_demo(outputs, tmp_path / "runs" / "first")
    assert steps(tmp_path / "runs" / "first")[-1] == 25_600 // SHRINK // 32
    assert steps(tmp_path / "runs" / "openclip")[-1] == 32_000 // SHRINK // 32
    for snippet in blocks("python", PAGE):
        scope: dict[str, object] = {}
        exec(snippet.replace("hub/", f"{tmp_path}/hub/"), scope)
        assert scope["features"].shape[0] == 1


def check_files(tmp: Path) -> None:
    """Check the files that the page lists."""
    listed = [row.split()[0] for language, body in BLOCK.findall(PAGE.read_text()) if not language
              for row in body.splitlines()]  # fmt: skip
    assert len(listed) > 5
    for path in listed:
        assert (tmp / path).exists(), path
    assert (tmp / "data" / "mine" / "manifest.json").exists()
    assert (tmp / "runs" / "comparison" / "comparison.html").exists() or list((tmp / "runs" / "comparison").iterdir())


def check_outputs(outputs: dict[str, str]) -> None:
    def output_of(beginning: str) -> str:
        return "\n".join(text for words, text in outputs.items() if words.startswith(beginning))

    assert "All done" in output_of("neuclip demo")
    assert "everything matches" in output_of("neuclip verify runs/first-data")
    assert "name: openclip" in output_of("neuclip train --recipe jobs/recipes/demo.yaml --dry-run")
    resumed = " ".join(output_of("torchrun").split())
    assert "Resumed from step-00000020" in resumed
    assert "Settings that differ from the checkpoint's" in resumed
    assert "samples 640 -> 800" in resumed
    assert "scenes/retrieval" in output_of("neuclip evaluate")
    assert "tasks done" in output_of("neuclip watch")
    assert "URLs gave a sample" in output_of("neuclip download --recipe jobs/recipes/download/scenes.yaml")


def check_demo(outputs: dict[str, str], run: Path) -> None:
    """From URLs to the report, without mocks, and repeated."""
    (printed,) = (text for words, text in outputs.items() if words.startswith("neuclip demo"))
    assert "of 1,000 URLs gave a sample" in printed
    stages = re.findall(r"^✓ (\w.*?)  .*\[.* s\]$", printed, re.MULTILINE)
    assert [stage.split()[0] for stage in stages] == ["Corpus", "Evaluation", "Training", "Evaluation"]
    assert not re.search(r"^(Checkpoint|Epoch) ", printed, re.MULTILINE), "events are in metrics.jsonl"
    assert list((run / "tensorboard" / "evaluation").glob("events*")), "scores are written without a further command"
    manifest = json.loads((run.parent / "first-data" / "shards" / "manifest.json").read_text())
    assert manifest["attempted"] == 1000
    assert manifest["samples"] == 1000 - sum(manifest["failures"].values())
    assert {"http 404", "hash mismatch", "truncated", "not an image"} <= set(manifest["failures"])
    assert list((run / "evaluation" / "step-00000010").glob("scenes*"))
    page = (run / "report.html").read_text()
    assert "<img" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", ""), "not self-contained"
    assert "colour" in (run / "report.md").read_text()
    assert set(json.loads((run / "stages.json").read_text())) >= {"corpus and ingestion", "training", "evaluation"}
    for stage in ("Corpus and ingestion", "Training"):
        assert re.search(rf"✓ {stage} .* done already", outputs["again"])
    assert "All done" in outputs["again"]


@pytest.fixture
def shadowed(tmp_path: Path) -> Path:
    """A working folder with a module that has the name of one of our packages."""
    (folder := tmp_path / "shadowed").mkdir()
    (folder / "pipeline.py").write_text("raise RuntimeError('the module of the working folder was imported')\n")
    return folder


def test_python_m_runs_beside_a_pipeline_module(installed, shadowed):
    listed = outside(installed, shadowed, sys.executable, "-m", "jobs.settings", "data.streams")
    assert "data.streams" in listed.stdout, listed.stderr


def test_the_import_names_a_module_that_shadows_the_package(installed, tmp_path):
    program = "import neuclip; print(neuclip.__file__, neuclip.__version__, callable(neuclip.build_objective))"
    found = outside(installed, tmp_path, sys.executable, "-c", program)
    assert found.stdout.split()[0] == str(installed / "neuclip.py"), found.stderr
    assert found.stdout.split()[2] == "True"
    (tmp_path / "pipeline.py").write_text("")
    refused = outside(installed, tmp_path, sys.executable, "-c", program)
    assert f"Python finds {tmp_path / 'pipeline.py'} under that name: rename your file" in refused.stderr
