"""Runs that are killed and resumed on other layouts lose nothing: the short form of `python -m jobs.bench.kills`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench.kills import is_intact
from tests.launch import run


@pytest.mark.slow
def test_nothing_is_lost_by_kills(tmp_path: Path) -> None:
    output = tmp_path / "kills.json"
    counts = ("--kills", "3", "--same-layout", "1", "--epoch", "5")
    run("jobs.bench.kills", *counts, "--output", str(output), timeout=900)
    result = json.loads(output.read_text())
    assert is_intact(result)
    assert result["changing-layouts"]["epochs"] == 3
    assert result["changing-layouts"]["kills"] >= 1
    for name in ("same_samples_in_the_same_order", "same_steps"):
        changed = {**result, "changing-layouts": {**result["changing-layouts"], name: False}}
        assert not is_intact(changed)
    assert not is_intact({**result, "same-layout": {**result["same-layout"], "same_bits": False}})
