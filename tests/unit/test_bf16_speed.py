"""Precision: no products in TF32, and what a CPU that is slow in bf16 is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs import doctor
from jobs.demo import RECIPE, in_faster_precision
from pipeline.config import dump
from pipeline.distributed import devices
from pipeline.distributed.devices import keep_fp32, true_fp32
from pipeline.engine.engine_config import EngineConfig, in_fp32
from pipeline.run_files import RUN_CONFIG_NAME
from pipeline.training.recipe import RunConfig, load_recipe
from tests.metrics import metrics
from tests.training import prepare, settings_in, train_here

SLOW = "Matrix products in bf16 take 12 times as long as in fp32 on this CPU."


@pytest.fixture(params=[12.0, 1.7])
def slowdown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(devices, "cpu_bf16_slowdown", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return float(request.param)


def test_the_doctor_notes_a_cpu_that_is_slow_in_bf16(slowdown):
    found = [finding for finding in doctor.check_gpus() if finding.subject == "bf16"]
    assert [(f.status, f.found, f.remedy) for f in found] == (
        [("note", SLOW[:-1], "use engine.deepspeed=zero1_fp32")] if slowdown > 3 else []
    )


def test_a_run_in_bf16_warns_there(slowdown, tmp_path):
    prepare(tmp_path, [16])
    for name in ("zero1_bf16", "zero1_fp32"):
        train_here(*settings_in(tmp_path, name, f"engine.deepspeed={name}", "samples=8", "data.streams=1"))
        records = [record for record in metrics(tmp_path / name, "event") if "in bf16" in record["message"]]
        warnings = [record["message"] for record in records if record["level"] == "warning"]
        expected = [f"{SLOW} Training in fp32 is faster here: engine.deepspeed=zero1_fp32."]
        assert warnings == (expected if slowdown > 3 and name == "zero1_bf16" else [])


def test_the_advice_names_a_file_that_exists():
    assert in_fp32(EngineConfig(deepspeed="zero2_bf16")) == "zero2_fp32"
    assert in_fp32(EngineConfig(deepspeed="/home/me/own_bf16.json")) == "zero1_fp32"


def demo(*overrides: str, output: Path) -> RunConfig:
    return in_faster_precision(load_recipe(RECIPE, [f"output={output}", *overrides]), overrides)


def test_the_demo_trains_in_fp32_there_unless_its_precision_is_given(slowdown, tmp_path, capsys):
    assert demo(output=tmp_path).engine.deepspeed == ("zero1_fp32" if slowdown > 3 else "zero1_bf16")
    assert capsys.readouterr().out.startswith(SLOW) == (slowdown > 3)
    assert demo("engine.deepspeed=zero2_bf16", output=tmp_path).engine.deepspeed == "zero2_bf16"
    for before in ("zero1_bf16", "zero1_fp32"):  # of a demo that is continued
        (tmp_path / RUN_CONFIG_NAME).write_text(dump(load_recipe(RECIPE, [f"engine.deepspeed={before}"])))
        assert demo(output=tmp_path).engine.deepspeed == before


def test_convolutions_on_a_gpu_do_not_use_tf32(monkeypatch):
    """Regression test: fp32 training and scores had TF32 in the patches' convolution."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    keep_fp32(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    keep_fp32(torch.device("cuda"))
    assert not torch.backends.cudnn.allow_tf32
    with true_fp32(torch.device("cpu")):
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
