"""A training step with a plain PyTorch engine: random draws, frozen statistics, and what the objective receives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.trimming import TextChunks
from pipeline.objectives import build_objective
from pipeline.training.recipe import parse_recipe
from pipeline.training.step import StepResult, TrainStep, micro_batches, seeded
from tests.metrics import equal

BATCH, IDS = 8, torch.arange(8)


class PlainEngine:
    """The engine methods that `TrainStep` uses; keeps all image features that it has returned."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.EmbeddingBag(20, 16), nn.Linear(16, 8))
        self.module = nn.ModuleList([self.image, self.text])
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.given: list[Tensor] = []
        self.applies = True

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        features = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        self.given.append(features[0].detach().clone())
        return features

    def backward(self, features: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
        torch.autograd.backward(features, gradients)

    def step(self, *, lr_scale: float) -> bool:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        applies = self.applies and all(bool(g.isfinite().all()) for g in gradients)
        if lr_scale and applies:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return applies


def make(*, micro_batch: int | None = None, objective: str = "openclip") -> tuple[TrainStep, Any]:
    engine: Any = PlainEngine()
    given = {"name": objective, "tau_lr": 0.1}
    built = build_objective(given, dim=8, batch_size=BATCH, dataset_size=100, total_steps=9)
    chunks = micro_batches(BATCH, micro_batch)
    step = TrainStep(engine, built, world=World(), seed=0, chunks=chunks)
    return step, engine


def take(
    step: TrainStep,
    number: int,
    *,
    lr_scale: float = 0.0,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    **given: bool,
) -> StepResult:
    generator = torch.Generator().manual_seed(7)
    images = scale * torch.randn(BATCH, 12, generator=generator)
    inputs = images, torch.randint(0, 20, (BATCH, 20), generator=generator)
    texts = TextChunks(inputs[1], step.chunks, lengths=lengths)
    return step((images, texts), sample_ids=IDS, step=number, lr_scale=lr_scale, **given)


def state_of(step: TrainStep, engine: Any) -> dict[str, Tensor]:
    model = engine.module.state_dict()
    rows = {name: torch.cat(list(blocks)) for name, (_, blocks) in step.objective.row_blocks().items()}
    return {name: value.detach().clone() for name, value in (model | step.objective.state_dict() | rows).items()}


def test_dropout_masks_are_those_of_seed_step_rank_and_micro_batch():
    step, engine = make(micro_batch=2)
    take(step, 0)
    first, second = torch.cat(engine.given[:4]), torch.cat(engine.given[4:])
    assert len(engine.given) == 8
    assert torch.equal(first, second), "both passes of a micro-batch"
    step, engine = make()
    state = torch.get_rng_state()
    for number in (0, 1, 0):
        take(step, number)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(engine.given[0], engine.given[1])
    assert torch.equal(engine.given[0], engine.given[2])
    drawn = set()
    for name in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)):
        with seeded(*name):
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 5


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("why", ["no batch", "not finite", "overflow", "loss", "grad_image", "grad_text"])
def test_a_step_that_is_not_taken_leaves_everything_as_it_was(why, micro_batch, monkeypatch):
    """Regression test: one batch with an infinite activation left NaN in the running statistics of batch norms."""
    step, engine = make(micro_batch=micro_batch)
    take(step, 0, lr_scale=1.0)
    before, compute = state_of(step, engine), step.objective.compute
    engine.applies = why != "overflow"
    if why in ("loss", "grad_image", "grad_text"):
        bad = {why: torch.tensor(torch.nan) if why == "loss" else torch.full((BATCH, 8), torch.inf)}
        monkeypatch.setattr(step.objective, "compute", lambda *a, **k: dataclasses.replace(compute(*a, **k), **bad))
    scale = torch.inf if why == "not finite" else 3.0
    result = take(step, 1, lr_scale=1.0, missing=why == "no batch", scale=scale, stop=True)
    assert (result.applied, result.missing, result.stop) == (False, why == "no batch", True)
    assert result.finite == (why in ("no batch", "overflow"))
    assert equal(state_of(step, engine), before)
    monkeypatch.undo()
    engine.applies = True
    result = take(step, 1, lr_scale=1.0)
    assert (result.finite, result.applied, result.stop, step.objective.steps) == (True, True, False, 2)


def test_an_engine_that_applies_a_gradient_of_nan_is_stopped(monkeypatch):
    step, engine = make()
    compute, nan = step.objective.compute, torch.tensor(torch.nan)
    monkeypatch.setattr(step.objective, "compute", lambda *a, **k: dataclasses.replace(compute(*a, **k), loss=nan))
    monkeypatch.setattr(engine, "step", lambda *, lr_scale: True)
    with pytest.raises(
        RuntimeError, match=r"PlainEngine\.step applied a gradient of NaN at step 3 .* weights are lost"
    ):
        take(step, 3, lr_scale=1.0)


def test_running_statistics_are_updated_once_per_step_by_the_first_micro_batch():
    whole, cached = make()[1], make(micro_batch=2)
    take(cached[0], 0)
    norm = cached[1].image[1]
    assert int(norm.num_batches_tracked) == 1
    generator = torch.Generator().manual_seed(7)
    whole.image[:2](torch.randn(BATCH, 12, generator=generator)[:2])
    assert torch.equal(norm.running_mean, whole.image[1].running_mean)


def test_the_schedule_applies_to_the_temperature():
    for lr_scale, change in ((0.0, 0.0), (0.5, 0.05)):
        step, _ = make()
        before = step.objective.logit_parameters()[0]
        take(step, 0, lr_scale=lr_scale)
        assert abs(step.objective.logit_parameters()[0] - before) == pytest.approx(change, rel=1e-3)


def test_micro_batches_divide_the_local_batch():
    schedule, data = {"warmup_steps": 0}, {"sources": "shards", "streams": 8}
    settings = {"output": "run", "samples": 8, "batch_size": 8, "data": data, "schedule": schedule}
    parse_recipe({**settings, "engine": {"micro_batch": 4}})
    parse_recipe({**settings, "engine": {"micro_batch": 16}})  # the whole local batch
    with pytest.raises(UserError, match="micro_batch = 3 does not divide the local batch 8"):
        parse_recipe({**settings, "engine": {"micro_batch": 3}})
