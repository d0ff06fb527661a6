"""A run in stages: same sample order as without stages, and exact resumption within a stage and at its boundary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from pipeline.errors import UserError
from pipeline.training.build import check_stages
from pipeline.training.recipe import load_recipe
from pipeline.training.step import lr_scale
from tests.e2e.test_train import BATCH, STEPS, equal, records, settings, weights
from tests.metrics import metrics
from tests.towers import TINY
from tests.training import prepare, train_here

FIRST = 5
STAGES = "[{until: 0.42, image_size: 16, text_tokens: 4, patch_dropout: 0.5, lr_scale: 0.5}]"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("stages"), [20, 30, 15], image_size=32)


def staged(base: Path, name: str, *more: str) -> None:
    stages = (f"schedule.stages={STAGES}", "telemetry.peak_tflops=0.001", *more)
    train_here(*settings(base, name, *stages), resume="latest")


@pytest.fixture(scope="module")
def whole(base: Path) -> Path:
    staged(base, "whole", "checkpoint.every=1", "checkpoint.keep_last=100")
    return base / "whole"


def lr(step: int) -> float:
    """Return the learning rate of update `step` (from 1): the run's schedule, halved in the first stage."""
    run = load_recipe(None, settings(Path(), "x"))
    share = lr_scale(run.schedule, step=step - 1, total_steps=STEPS)
    return run.optimizer.lr * share * (0.5 if step <= FIRST else 1.0)


def order_hashes(folder: Path) -> list[str]:
    return [record["data"]["order_hash"] for record in metrics(folder) if "data" in record]


@pytest.mark.slow
def test_image_and_text_sizes_grow_and_the_order_is_unchanged(whole, base):
    rows = records(whole)
    assert sorted(rows) == list(range(1, STEPS + 1))
    flops = {step: row["mfu"] / row["samples_per_second"] for step, row in rows.items()}
    early = [value for step, value in flops.items() if step <= FIRST]
    late = [value for step, value in flops.items() if step > FIRST]
    assert max(early) < 0.5 * min(late)  # a quarter of the patches, of which half are dropped
    assert [row["lr"] for row in rows.values()] == pytest.approx([lr(step) for step in rows])
    boundary, last = weights(whole, FIRST), weights(whole)
    assert boundary["visual.positional_embedding"].shape[0] == 5
    assert last["visual.positional_embedding"].shape[0] == 17
    train_here(*settings(base, "plain"))
    assert order_hashes(whole) == order_hashes(base / "plain")
    assert len(order_hashes(whole)) == STEPS * BATCH // 64


@pytest.mark.slow
@pytest.mark.parametrize("stop", [FIRST - 2, FIRST])
def test_interrupted_runs_end_with_the_same_weights(stop, whole, base):
    name = f"stopped-{stop}"
    shutil.copytree(whole, base / name)
    folder = base / name / "checkpoints"
    for path in folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) > stop:
            shutil.rmtree(path)
    (folder / "latest").write_text(f"step-{stop:08d}\n")
    staged(base, name, "checkpoint.every=1", "checkpoint.keep_last=100")
    assert equal(weights(base / name), weights(whole))
    told = [record["message"] for record in metrics(base / name, "event")]
    assert any(message.startswith("Resumed from") for message in told)
    assert not any("Settings that differ" in message for message in told), "stages are no changes of settings"


@pytest.mark.slow
def test_a_compiled_run_with_every_saving_equals_one_without_compilation_and_resumes(base):
    """Towers and normalizer network; stages, patch dropout, checkpointed activations, GradCache, gradient probe."""
    savings = ("model.patch_dropout=0.25", "model.grad_checkpointing=true", "engine.micro_batch=4")
    staged(base, "eager", *savings)
    compiled = (*savings, "model.compile=true", "objective.npn_compile=true")
    staged(base, "compiled", *compiled)
    found, expected = records(base / "compiled"), records(base / "eager")
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    assert "Gradient probe" in (base / "compiled" / "metrics.jsonl").read_text()
    for step, record in expected.items():
        for key in ("loss", "tau", "normalizer_gap"):
            assert found[step][key] == pytest.approx(record[key], rel=1e-5, abs=1e-6), (step, key)
    for step in (FIRST, STEPS):
        wanted = weights(base / "eager", step)
        for name, value in weights(base / "compiled", step).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
    once = weights(base / "compiled")
    shutil.rmtree(base / "compiled" / "checkpoints" / f"step-{STEPS:08d}")
    staged(base, "compiled", *compiled)
    assert equal(weights(base / "compiled"), once)


def test_an_architecture_that_cannot_be_resized_is_rejected(base):
    vision = {"timm_model_name": "vit_tiny_patch16_224", "timm_model_pretrained": False, "timm_pool": "",
              "image_size": 224}  # fmt: skip
    (base / "timm.json").write_text(json.dumps({**TINY, "vision_cfg": vision}))
    more = (f"schedule.stages={STAGES}", f"model.arch={base / 'timm.json'}")
    with pytest.raises(UserError, match="Only position embeddings of open_clip's own vision towers"):
        check_stages(load_recipe(None, settings(base, "refused", *more)))
