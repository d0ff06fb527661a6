"""`epochs` and `schedule.warmup_share` are converted to samples and steps; contradictory settings are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.data.order.canonical_order import make_layout
from pipeline.errors import UserError
from pipeline.training.recipe import load_recipe
from pipeline.training.recipe_file import resolve_budget
from tests.shards import write_shards


@pytest.mark.parametrize(("batch", "streams"), [(8, 4), (16, 16), (10, 1)])
def test_epochs_match_the_loader(tmp_path: Path, batch: int, streams: int) -> None:
    write_shards(tmp_path, [30, 27])
    data = {"sources": str(tmp_path), "streams": streams}
    tree = resolve_budget({"epochs": 3, "batch_size": batch, "data": data}, {})
    layout = make_layout(samples=57, global_batch=batch, streams=streams)
    assert tree["samples"] == 3 * layout.steps * batch
    assert "epochs" not in tree


def test_source_weights_change_the_epoch_length(tmp_path: Path) -> None:
    write_shards(tmp_path, [32])
    data = {"sources": [{"manifest": str(tmp_path), "weight": 2}], "streams": 4}
    assert resolve_budget({"epochs": 0.5, "batch_size": 8, "data": data}, {})["samples"] == 32


def test_warmup_is_a_share_of_the_run(tmp_path: Path) -> None:
    write_shards(tmp_path, [64])
    common = [f"output={tmp_path}", "batch_size=8", f"data.sources={tmp_path}", "data.streams=4"]
    run = load_recipe(None, [*common, "epochs=5", "schedule.warmup_share=0.1"])
    assert (run.total_steps, run.schedule.warmup_steps) == (40, 4)
    assert load_recipe(None, [*common, "samples=800", "schedule.warmup_share=0.25"]).schedule.warmup_steps == 25


def test_override_replaces_the_equivalent_recipe_setting() -> None:
    recipe = {"epochs": 3, "batch_size": 4, "schedule": {"warmup_share": 0.1}, "data": {"sources": "nowhere"}}
    tree = resolve_budget(recipe, {"samples": 400, "schedule": {"warmup_steps": 7}})
    assert (tree["samples"], tree["schedule"]) == (400, {"warmup_steps": 7})
    no_share = {"samples": 400, "schedule": {"warmup_steps": 7, "warmup_share": None}}
    assert resolve_budget(recipe, no_share)["schedule"] == {"warmup_steps": 7}
    data = {"sources": "nowhere", "streams": 2}
    other = {"samples": 400, "batch_size": 4, "data": data}
    assert resolve_budget(other, {"epochs": 2}, dataset_size=40)["samples"] == 80


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"epochs": 1, "samples": 5}, "Both epochs and samples are given"),
        ({"schedule": {"warmup_share": 0.1, "warmup_steps": 5}}, "Both warmup_share and warmup_steps"),
        ({"epochs": "x", "batch_size": 4}, "epochs = 'x' must be a number above 0"),
        ({"epochs": 1}, "batch_size is required"),
        ({"epochs": 1, "batch_size": 8, "data": {"sources": "no"}}, "epochs = 1: the size of an epoch.*neuclip pairs"),
        ({"epochs": 1, "batch_size": 64, "data": {"sources": "x"}}, "does not fill one"),
        ({"samples": 8, "batch_size": 8, "schedule": {"warmup_share": 2}}, "warmup_share = 2 must be a number"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_budget(tree, {}, dataset_size=None if "the size" in message else 9)
