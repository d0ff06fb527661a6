"""The command that `neuclip pairs` prints for few pairs learns from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.pairs import small_batch
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train
from tests.training import in_this_process, prepare, settings_in, train_here

RECIPE = Path(__file__).parents[2] / "jobs" / "recipes" / "finetune.yaml"


@pytest.mark.parametrize("pairs", [60, 700])
def test_the_printed_fine_tune_learns(tmp_path, pairs):
    folder = prepare(tmp_path, (pairs,))
    train_here(*settings_in(folder, "start", "samples=160", "optimizer.lr=1e-3"))
    printed = small_batch(pairs).split()
    given = [f"output={folder / 'tuned'}", f"data.sources={folder / 'shards'}", "model.arch=pretrained"]
    here = ["engine.device=cpu", "engine.deepspeed=zero1_fp32", "data.workers=0", "telemetry.tensorboard=false",
            "telemetry.progress=quiet"]  # fmt: skip
    with in_this_process():
        run = load_recipe(RECIPE, [*given, f"model.pretrained={folder / 'start'}", *printed, *here])
        assert run.optimizer.lr == 1e-5, "it is not scaled down with the batch"
        assert train(run, resume=None) == 0
    records = [json.loads(line) for line in (folder / "tuned/metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record.get("kind") == "train"]
    assert len(losses) >= 200
    assert sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 - 0.004
