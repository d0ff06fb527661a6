"""A training step with a plain PyTorch engine: random draws, frozen statistics, and what the objective receives."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeline.distributed.world import World
from pipeline.engine.optim import OptimizerConfig
from pipeline.errors import UserError
from pipeline.model.trimming import TextChunks
from pipeline.objectives import build_objective
from pipeline.training.recipe import parse_recipe
from pipeline.training.step import TrainStep, micro_batches, seeded
from tests.metrics import equal
from tests.unit.test_own_engine import PlainEngine

BATCH = 8


class Towers(nn.Module):
    """Keeps all image features that it has returned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.EmbeddingBag(20, 16), nn.Linear(16, 8))
        self.given = []

    def forward(self, image, text):
        features = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
        self.given.append(features[0].detach().clone())
        return features


def make(*, micro_batch=None):
    towers, optimizer = Towers(), OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0, momentum=0.0)
    engine = PlainEngine(towers, optimizer=optimizer, world=World())
    built = build_objective({"name": "openclip", "tau_lr": 0.1}, dim=8, batch_size=BATCH, dataset_size=9, total_steps=9)
    return TrainStep(engine, built, world=World(), seed=0, chunks=micro_batches(BATCH, micro_batch)), towers


def take(step, number, *, lr_scale=0.0, scale=1.0, **given):
    generator = torch.Generator().manual_seed(7)
    images = scale * torch.randn(BATCH, 12, generator=generator)
    texts = TextChunks(torch.randint(0, 20, (BATCH, 20), generator=generator), step.chunks)
    return step((images, texts), sample_ids=torch.arange(BATCH), step=number, lr_scale=lr_scale, **given)


def state_of(step):
    model = step.engine.module.state_dict()
    rows = {name: torch.cat(list(blocks)) for name, (_, blocks) in step.objective.row_blocks().items()}
    return {name: value.detach().clone() for name, value in (model | step.objective.state_dict() | rows).items()}


def test_dropout_masks_are_those_of_seed_step_rank_and_micro_batch():
    step, towers = make(micro_batch=2)
    take(step, 0)
    first, second = torch.cat(towers.given[:4]), torch.cat(towers.given[4:])
    assert len(towers.given) == 8
    assert torch.equal(first, second), "both passes of a micro-batch"
    step, towers = make()
    state = torch.get_rng_state()
    for number in (0, 1, 0):
        take(step, number)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(towers.given[0], towers.given[1])
    assert torch.equal(towers.given[0], towers.given[2])
    drawn = set()
    for name in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)):
        with seeded(*name):
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 5


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("why", ["no batch", "not finite", "overflow", "loss", "grad_image", "grad_text"])
def test_a_step_that_is_not_taken_leaves_everything_as_it_was(why, micro_batch, monkeypatch):
    """Regression test: one batch with an infinite activation left NaN in the running statistics of batch norms."""
    step, _ = make(micro_batch=micro_batch)
    take(step, 0, lr_scale=1.0)
    before, compute = state_of(step), step.objective.compute
    if why == "overflow":
        monkeypatch.setattr(step.engine, "step", lambda *, lr_scale: bool(step.engine.module.zero_grad()))
    if why in ("loss", "grad_image", "grad_text"):
        bad = {why: torch.tensor(torch.nan) if why == "loss" else torch.full((BATCH, 8), torch.inf)}
        monkeypatch.setattr(step.objective, "compute", lambda *a, **k: dataclasses.replace(compute(*a, **k), **bad))
    scale = torch.inf if why == "not finite" else 3.0
    result = take(step, 1, lr_scale=1.0, missing=why == "no batch", scale=scale, stop=True)
    assert (result.applied, result.missing, result.stop) == (False, why == "no batch", True)
    assert result.finite == (why in ("no batch", "overflow"))
    assert equal(state_of(step), before)
    monkeypatch.undo()
    result = take(step, 1, lr_scale=1.0)
    assert (result.finite, result.applied, result.stop, step.objective.steps) == (True, True, False, 2)


def test_an_engine_that_applies_a_gradient_of_nan_is_stopped(monkeypatch):
    step, _ = make()
    compute, nan = step.objective.compute, torch.tensor(torch.nan)
    monkeypatch.setattr(step.objective, "compute", lambda *a, **k: dataclasses.replace(compute(*a, **k), loss=nan))
    monkeypatch.setattr(step.engine, "step", lambda *, lr_scale: True)
    with pytest.raises(
        RuntimeError, match=r"PlainEngine\.step applied a gradient of NaN at step 3 .* weights are lost"
    ):
        take(step, 3, lr_scale=1.0)


def test_running_statistics_are_updated_once_per_step_by_the_first_micro_batch():
    (_, whole), (step, cached) = make(), make(micro_batch=2)
    take(step, 0)
    norm = cached.image[1]
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
