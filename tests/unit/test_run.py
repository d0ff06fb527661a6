"""What a resumed run reports, and what a start leaves out."""

from __future__ import annotations

import gc

import pytest

from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import _quiet_deepspeed
from pipeline.errors import UserError
from pipeline.training import run
from pipeline.training.continuation import changed_settings
from pipeline.training.recipe import load_recipe


def test_a_setting_that_the_checkpoint_does_not_have_is_reported_also_if_it_is_null() -> None:
    before = {"output": "a", "samples": 10, "model": {"arch": "x"}}
    now = {"output": "b", "samples": 20, "model": {"arch": "x", "lock_text": False}}
    assert changed_settings(before, now) == ["samples 10 -> 20", "model.lock_text absent -> False"]
    assert changed_settings(now, now) == []
    unused = {"selection": {"ratio": None, "chunks": 16}, "ema": {"warmup": True}}
    assert changed_settings({**unused, **now}, now) == []
    used = {"selection": {"ratio": 0.5, "chunks": 16}}
    assert changed_settings({**used, **now}, now) == ["selection.ratio 0.5 -> absent"]


def test_the_full_collections_of_a_start_do_not_look_at_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DeepSpeed they are about ten, of a quarter of a second each."""
    frozen = []

    def start(*_: object, **__: object) -> None:
        frozen.append(gc.get_freeze_count())
        raise UserError("no")

    monkeypatch.setattr(run, "start_world", start)
    with pytest.raises(UserError, match="no"):
        run.train(
            load_recipe(None, ["output=x", "samples=512", "batch_size=64", "data.sources=x", "schedule.warmup_steps=1"])
        )
    assert frozen[0] > 100_000
    assert gc.get_freeze_count() == 0


def test_a_start_loads_no_compiler_for_deepspeeds_own_muon() -> None:
    """DeepSpeed imports its formulas at stages 1 to 3, and compiled them, which took a second."""
    with _quiet_deepspeed(World()):
        from deepspeed.runtime.zero.muon.original_muon import muon_update
    assert not hasattr(muon_update, "_torchdynamo_orig_callable")
