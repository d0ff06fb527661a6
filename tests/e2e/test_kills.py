"""Runs that are killed and resumed on other layouts lose nothing: the short form of `python -m jobs.bench.kills`."""

from __future__ import annotations

import json
import math

import pytest

from jobs.bench.kills import is_intact
from tests.launch import Program


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
