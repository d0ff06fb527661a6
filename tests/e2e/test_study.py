"""`neuclip study` as a user runs it, at the smoke size, in one folder; interrupted and continued.

Two studies run, one for each thing that a study can need: measured normalizers, several ranks.
`tests/unit/test_studies.py` checks the declarations of all studies.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.studies.declare import load_study, units_of
from jobs.studies.schedule import folder_of
from tests.launch import run as launch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalizers", "scaling"])
def test_a_study_runs_and_renders(name: str, place: Path) -> None:
    launch("jobs.study", name, "--size", "smoke", "--output", str(place), timeout=900)
    data = json.loads((place / name / "results.json").read_text())
    units = units_of(name, size="smoke")
    assert [run["key"] for run in data["runs"]] == [unit.key for unit in units]
    page = (place / name / "results.md").read_text()
    assert all(f"`{unit.arm}`" in page for unit in units)
    assert "<svg" in (place / name / "final.svg").read_text()
    for run in data["runs"]:
        measured = run["result"]["normalizers"]
        assert bool(measured) == (load_study(name).measure == "normalizers")
        assert all(m["rows"] == 128 for m in measured)
        last = run["result"]["last"]["samples"]
        assert any(m["samples"] == last for m in measured) == bool(measured)
        if run["result"]["ranks"] > 1:  # [b, d] features of both sides and five numbers per anchor, in fp32
            local, dim = run["result"]["batch_size"] // run["result"]["ranks"], 64
            assert run["result"]["traffic_bytes_per_step"]["all_gather"] == 4 * local * (2 * dim + 5)


@pytest.mark.slow
def test_finished_runs_are_not_repeated(place: Path) -> None:
    unit = units_of("scaling", size="smoke")[0]
    launch("jobs.study", "scaling", "--size", "smoke", "--output", str(place), timeout=900)
    result = folder_of(unit, place) / "result.json"
    before = result.stat().st_mtime_ns
    printed = launch("jobs.study", "scaling", "--size", "smoke", "--output", str(place)).stdout
    assert "1 of them done" in printed
    assert result.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_failed_run_is_reported_and_the_rest_is_rendered(place: Path) -> None:
    # A launcher that fails deliberately: the first word is a program that exits with 1.
    done = launch(
        "jobs.study", "gamma", "--size", "smoke", "--output", str(place), "--launcher", "false", check=False
    )  # fmt: skip
    assert done.returncode == 1
    assert "FAILED: gamma/many-epochs/sogclr/seed0 (exit code 1)" in done.stderr
    assert (place / "gamma" / "results.md").exists()


def test_missing_data_is_reported_before_any_run(tmp_path: Path) -> None:
    done = launch(
        "jobs.study", "npn", "data.sources=none/cc3m", "--size", "paper", "--output", str(tmp_path), check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert "The runs need none/cc3m, which this machine does not have" in done.stderr
