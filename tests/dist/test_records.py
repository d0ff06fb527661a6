"""The records of several ranks have means over all of them."""

from __future__ import annotations

import pytest

from tests.launch import run
from tests.metrics import metrics
from tests.training import SMALL, prepare, settings_in, train_here


@pytest.mark.slow
def test_the_tokens_of_two_ranks_are_those_of_one(tmp_path):
    settings = settings_in(prepare(tmp_path, [16, 16]), "run", "samples=48", "model.text_batching=packed")
    run("jobs.train", *SMALL, *settings, ranks=2)
    train_here(*settings, f"output={tmp_path / 'one-rank'}")
    tokens = [record["text_tokens"] for record in metrics(tmp_path / "one-rank", "train")]
    assert len(set(tokens)) > 1
    assert [record["text_tokens"] for record in metrics(tmp_path / "run", "train")] == pytest.approx(tokens)
