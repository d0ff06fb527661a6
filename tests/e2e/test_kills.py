"""Runs that are killed and resumed on other layouts lose nothing: the short form of `python -m jobs.bench.kills`."""

import json
import math

import pytest

from jobs.bench.kills import TOLERANCE, is_intact, relative_difference
from tests.launch import Program


def test_losses_near_zero_differ_by_rounding_only():
    """Regression test: SogCLR's loss of 1.9e-5 differed by 5e-9, which was taken for a lost step."""
    for a, b, differ in ((1.93059805e-05, 1.931101e-05, False), (1e-5, -1e-5, True), (2.0, 2.001, True)):
        assert (relative_difference(a, b) > TOLERANCE) == differ, (a, b)
    assert relative_difference(math.nan, 1.0) == math.inf


@pytest.mark.slow
def test_nothing_is_lost_by_kills(tmp_path):
    # The layouts of this seed: 2 ranks and ZeRO stage 3, then 1 and 0, then 2 and 1.
    words = ("--kills", "2", "--epoch", "10", "--seed", "186", "--output", str(tmp_path / "kills.json"))
    with Program("jobs.bench.kills", *words) as program:
        done = program.wait(800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "kills.json").read_text())
    assert is_intact(result)
    assert result["kills"] == 2
    for wrong in (
        *({key: False} for key in ("same_samples_in_the_same_order", "same_steps", "same_evaluations")),
        {"same_rollbacks": False}, {"evaluations": 0}, {"rollbacks": 0},
        {"largest_relative_difference_of_a_loss": math.inf}, {"same_layout": True, "same_bits": False},
    ):  # fmt: skip
        assert not is_intact({**result, **wrong}), wrong
    assert is_intact({**result, "same_layout": True, "same_bits": True})
