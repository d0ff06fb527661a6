"""`neuclip study` as a user runs it, at the smoke size; `tests/unit/test_studies.py` checks how all are declared."""

import json

import pytest

from jobs.studies.declare import units_of
from tests.launch import run as launch


def study(*words, size="smoke", place):
    return launch("jobs.study", *words, "--size", size, "--output", str(place), timeout=900, check=False)


@pytest.mark.slow
def test_a_study_runs_renders_and_repeats_no_finished_run(tmp_path):
    """One that needs all that a study can need: several ranks, measured normalizers; and one whose runs fail."""
    place = tmp_path / "studies"  # which share a corpus
    done = study("scaling", place=place)
    assert done.returncode == 0, done.stderr[-3000:]
    (unit,) = units_of("scaling", size="smoke")
    (run,) = json.loads((place / "scaling" / "results.json").read_text())["runs"]
    assert run["key"] == unit.key
    assert f"`{unit.arm}`" in (place / "scaling" / "results.md").read_text()
    assert "<svg" in (place / "scaling" / "final.svg").read_text()
    result = run["result"]
    assert {m["rows"] for m in result["normalizers"]} == {128}
    assert any(m["samples"] == result["last"]["samples"] for m in result["normalizers"])
    # [b, d] features of both sides and five numbers per anchor, in fp32
    assert (result["ranks"], result["batch_size"]) == (2, 64)
    assert result["traffic_bytes_per_step"]["all_gather"] == 4 * 32 * (2 * 64 + 5)
    file = unit.folder(place) / "result.json"
    before = file.stat().st_mtime_ns
    assert "1 of them done" in study("scaling", place=place).stdout
    assert file.stat().st_mtime_ns == before
    done = study("gamma", "model.arch=nowhere.json", place=place)
    assert done.returncode == 1
    assert "FAILED: gamma/many-epochs/sogclr/seed0 (exit code 2)" in done.stderr
    assert (place / "gamma" / "results.md").exists()


def test_missing_data_is_reported_before_any_run(tmp_path):
    done = study("npn", "data.sources=none/cc3m", size="paper", place=tmp_path)
    assert done.returncode == 2
    assert "The runs need none/cc3m, which this machine does not have" in done.stderr
