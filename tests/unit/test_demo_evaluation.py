"""The demo evaluates in the process that trained: workers come from the fork server of the training's loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pipeline.training.run
from jobs import demo
from pipeline.distributed import workers
from pipeline.evaluation.run.images import WORKER_IMPORTS
from pipeline.training.recipe import load_recipe


def test_the_fork_server_starts_with_what_the_evaluation_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every worker of every task imports it, which takes 4 seconds."""
    monkeypatch.setattr(workers, "_preloaded", {})
    when_training: list[str] = []

    def record(*_: Any, **__: Any) -> int:
        when_training.extend(workers._preloaded)
        return 0

    monkeypatch.setattr(pipeline.training.run, "train", record)
    code, _ = demo.train(load_recipe(demo.RECIPE, [f"output={tmp_path}"]))
    assert code == 0
    assert set(WORKER_IMPORTS) <= set(when_training)
