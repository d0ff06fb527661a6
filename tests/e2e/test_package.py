"""The wheel outside of the repository: its files, the whole demo, and folders with a `pipeline.py` of their own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch import ROOT, environment
from tests.metrics import metrics
from tests.towers import write_tiny

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


def script(installed: Path) -> tuple[str, str]:
    return sys.executable, str(installed / "bin" / "neuclip")


def test_the_wheel_has_every_file_that_is_not_python(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    assert {"neuclip.py", "jobs/recipes/own.yaml", "ds_configs/zero1_bf16.json", "pipeline/report/run.html"} <= held
    assert not expected - held


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_and_can_be_repeated(installed: Path, tmp_path: Path) -> None:
    """From URLs to the report, without mocks, beside a module that has the name of one of our packages."""
    (tmp_path / "pipeline.py").write_text("raise RuntimeError('the module of the working folder was imported')\n")
    assert "Pretrain CLIP models" in outside(installed, tmp_path, *script(installed), "--help").stdout
    output = tmp_path / "demo"
    arguments = [
        *("demo", "--output", "demo", "--pairs", "1000", "--held-out", "60", "engine.device=cpu"),
        *(f"model.arch={write_tiny(tmp_path)}", "samples=640", "batch_size=32", "schedule.warmup_steps=5"),
        *("objective.prototypes=64", "checkpoint.every=10", "checkpoint.keep_every=10"),
    ]
    first = outside(installed, tmp_path, *script(installed), *arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    assert not (ROOT / "demo").exists()
    assert "of 1,000 URLs gave a sample" in first.stdout
    assert "All done" in first.stdout
    stages = re.findall(r"^✓ (\w.*?)  .*\[.* s\]$", first.stdout, re.MULTILINE)
    assert [stage.split()[0] for stage in stages] == ["Corpus", "Evaluation", "Training", "Evaluation"]
    assert not re.search(r"^(Checkpoint|Epoch) ", first.stdout, re.MULTILINE), "events are in metrics.jsonl"
    assert list((output / "tensorboard" / "evaluation").glob("events*")), "scores are written without a further command"

    manifest = json.loads((tmp_path / "demo-data" / "shards" / "manifest.json").read_text())
    assert manifest["attempted"] == 1000
    assert manifest["samples"] == 1000 - sum(manifest["failures"].values())
    assert {"http 404", "hash mismatch", "truncated", "not an image"} <= set(manifest["failures"])

    steps = [record["step"] for record in metrics(output, "train")]
    assert steps[-1] == 20
    results = {path.parent.name: path for path in (output / "evaluation").glob("*/scenes*")}
    assert {"step-00000010", "step-00000020"} <= {path.name for path in (output / "evaluation").iterdir()}
    assert results
    page = (output / "report.html").read_text()
    assert "<img" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", ""), "not self-contained"
    assert "colour" in (output / "report.md").read_text()
    assert set(json.loads((output / "stages.json").read_text())) >= {"corpus and ingestion", "training", "evaluation"}

    again = outside(installed, tmp_path, *script(installed), *arguments)
    assert re.search(r"✓ Corpus and ingestion .* done already", again.stdout)
    assert re.search(r"✓ Training .* done already", again.stdout)
    assert "All done" in again.stdout


def test_python_m_runs_beside_a_pipeline_module(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("raise RuntimeError('the module of the working folder was imported')\n")
    listed = outside(installed, tmp_path, sys.executable, "-m", "jobs.settings", "data.streams")
    assert "data.streams" in listed.stdout, listed.stderr


def test_the_import_names_a_module_that_shadows_the_package(installed: Path, tmp_path: Path) -> None:
    program = "import neuclip; print(neuclip.__file__, neuclip.__version__, callable(neuclip.build_objective))"
    found = outside(installed, tmp_path, sys.executable, "-c", program)
    assert found.stdout.split()[0] == str(installed / "neuclip.py"), found.stderr
    assert found.stdout.split()[2] == "True"
    (tmp_path / "pipeline.py").write_text("")
    refused = outside(installed, tmp_path, sys.executable, "-c", program)
    assert f"Python finds {tmp_path / 'pipeline.py'} under that name: rename your file" in refused.stderr
