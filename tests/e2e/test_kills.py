"""Runs that are killed and resumed on other layouts lose nothing: the short form of `python -m jobs.bench.kills`."""

from __future__ import annotations

import json
import math

import pytest

from jobs.bench.kills import TOLERANCE, is_intact, relative_difference
from tests.launch import Program


def test_losses_near_zero_differ_by_rounding_only():
    """Regression test: of 3 kills of SogCLR, one loss of 1.9e-5 differed by 5e-9, which was taken for a lost step."""
    assert relative_difference(1.93059805e-05, 1.931101e-05) < TOLERANCE
    assert relative_difference(0.0, 0.0) == 0
    assert relative_difference(1e-5, -1e-5) > TOLERANCE
    assert relative_difference(2.0, 2.001) > TOLERANCE
    assert relative_difference(math.nan, 1.0) == math.inf


@pytest.mark.slow
def test_nothing_is_lost_by_kills(tmp_path):
    counts = ("--kills", "2", "--same-layout", "0", "--tables", "0", "--epoch", "10")
    counts += ("--seed", "186")  # the layouts: 2 ranks and ZeRO stage 3, then 1 and 0, then 2 and 1
    with Program("jobs.bench.kills", *counts, "--output", str(tmp_path / "kills.json")) as program:
        done = program.wait(800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "kills.json").read_text())
    assert is_intact(result)
    case = result["changing-layouts"]
    assert case["kills"] == 2
    assert case["evaluations"] > 0
    for key in ("same_samples_in_the_same_order", "same_steps", "same_evaluations", "same_rollbacks"):
        assert not is_intact({"changing-layouts": {**case, key: False}})
    assert not is_intact({"changing-layouts": {**case, "largest_relative_difference_of_a_loss": math.inf}})
    assert is_intact({"same-layout": {**case, "same_bits": True}})
    assert not is_intact({"same-layout": {**case, "same_bits": False}})
