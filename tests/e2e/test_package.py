"""The wheel outside of the repository: its files, `neuclip demo`, and folders with a `pipeline.py` of their own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch import ROOT, environment

PACKAGES = ("pipeline", "data_prep", "jobs", "ds_configs")
DEMO = ("demo", "--output", "demo", "--pairs", "1000", "--held-out", "60", "samples=1280", "batch_size=64",
        "schedule.warmup_steps=2", "data.streams=16", "data.workers=0", "checkpoint.every=20", "engine.device=cpu",
        "model.arch=scenes-vit-micro")  # fmt: skip


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
def test_the_demo_runs_from_the_wheel_beside_a_pipeline_module(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("raise RuntimeError('the module of the working folder was imported')\n")
    assert "Pretrain CLIP models" in outside(installed, tmp_path, *script(installed), "--help").stdout
    done = outside(installed, tmp_path, *script(installed), *DEMO)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All done" in done.stdout
    assert (tmp_path / "demo" / "checkpoints" / "step-00000020").is_dir()
    assert not (ROOT / "demo").exists()


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
