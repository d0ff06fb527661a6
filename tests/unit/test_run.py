"""What a resumed run reports."""

from __future__ import annotations

from pipeline.training.run_start import changed_settings


def test_a_setting_that_the_checkpoint_does_not_have_is_reported_also_if_it_is_null() -> None:
    before = {"output": "a", "samples": 10, "model": {"arch": "x"}}
    now = {"output": "b", "samples": 20, "model": {"arch": "x", "trim_image": None}}
    assert changed_settings(before, now) == ["model.trim_image absent -> None", "samples 10 -> 20"]
    assert changed_settings(now, now) == []
