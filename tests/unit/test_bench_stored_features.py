"""The benchmark of stored features, on a few pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jobs.bench import stored_features as bench
from pipeline.objectives.selection import View

SMALL = replace(bench.SETTING, pairs=256, batch=32, epochs=2, held_out=128)


def test_every_arm_has_a_score_and_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SETTING", SMALL)
    monkeypatch.setattr(bench, "STRONG", replace(SMALL, hidden=256, epochs=4))
    found = bench.one_seed(0, wrong=0.3)
    assert found["plain"][1] == 1
    assert found["selection, reference own"][1] == pytest.approx(5 / 3)
    assert all(0 < score <= 100 for score, _ in found.values())
    assert len({score for score, _ in found.values()}) > 6  # the arms differ


def test_wrong_texts_are_those_of_other_pairs_and_the_better_half_has_few_of_them() -> None:
    right, wrong = (bench.noisy_course(SMALL, seed=1, wrong=share) for share in (0.0, 0.25))
    moved = (right.pairs[1] != wrong.pairs[1]).any(1)
    assert int(moved.sum()) == 64
    assert torch.equal(right.pairs[0], wrong.pairs[0])
    own = torch.nn.functional.normalize(right.pairs[1], dim=1)
    other = torch.nn.functional.normalize(wrong.pairs[1], dim=1)
    kept = bench.better_half(View(own, other, tau=0.05))
    assert len(kept) == 128
    assert not moved[kept].any()
