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
from pipeline.objectives import build_objective
from pipeline.training.step import StepHooks, StepResult, TrainStep, check_micro_batch, micro_batches, seeded

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
        if lr_scale:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.applies


def make(*, micro_batch: int | None = None, hooks: StepHooks | None = None) -> tuple[TrainStep, Any]:
    engine: Any = PlainEngine()
    objective = build_objective({"name": "openclip", "tau_lr": 0.1}, dim=8, batch_size=BATCH)
    chunks = micro_batches(BATCH, micro_batch)
    return TrainStep(engine, objective, world=World(), seed=0, chunks=chunks, hooks=hooks), engine


def take(step: TrainStep, number: int, *, lr_scale: float = 0.0, stop: bool = False) -> StepResult:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(BATCH, 12, generator=generator), torch.randint(0, 20, (BATCH, 5), generator=generator)
    return step(inputs, sample_ids=IDS, step=number, lr_scale=lr_scale, stop=stop)


def test_both_passes_of_a_micro_batch_use_the_same_dropout_mask() -> None:
    step, engine = make(micro_batch=2)
    take(step, 0)
    first, second = torch.cat(engine.given[:4]), torch.cat(engine.given[4:])
    assert len(engine.given) == 8
    assert torch.equal(first, second)


def test_dropout_masks_differ_between_steps_and_the_random_state_is_restored() -> None:
    step, engine = make()
    state = torch.get_rng_state()
    for number in (0, 1, 0):
        take(step, number)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(engine.given[0], engine.given[1])
    assert torch.equal(engine.given[0], engine.given[2])


def test_every_rank_and_micro_batch_draws_its_own_dropout_mask() -> None:
    drawn = set()
    for name in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)):
        with seeded(*name):
            drawn.add(float(torch.rand(())))
    assert len(drawn) == 5


def test_a_step_skipped_by_the_engine_does_not_change_the_objective() -> None:
    step, engine = make()
    before = step.objective.state_dict()
    engine.applies = False
    assert not take(step, 0, lr_scale=1.0).applied
    assert all(torch.equal(value, before[key]) for key, value in step.objective.state_dict().items())
    engine.applies = True
    assert take(step, 1, lr_scale=1.0).applied
    assert step.objective.steps == 1


@pytest.mark.parametrize("part", ["loss", "grad_image", "grad_text"])
def test_a_non_finite_batch_reaches_neither_backward_nor_the_objective(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, engine = make()
    compute = step.objective.compute
    bad = {part: torch.tensor(torch.nan) if part == "loss" else torch.full((BATCH, 8), torch.inf)}
    monkeypatch.setattr(step.objective, "compute", lambda *a, **k: dataclasses.replace(compute(*a, **k), **bad))
    result = take(step, 0, lr_scale=1.0)
    assert (result.finite, result.applied, step.objective.steps) == (False, False, 0)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


@pytest.mark.parametrize("stop", [False, True])
def test_the_next_batch_is_prefetched_before_the_update_unless_the_run_ends(stop: bool) -> None:
    called: list[int] = []
    step, _ = make(hooks=StepHooks(before_update=called.append))
    result = take(step, 3, stop=stop)
    assert (result.stop, result.applied) == (stop, True)
    assert called == ([] if stop else [3])


def test_running_statistics_are_updated_once_per_step_by_the_first_micro_batch() -> None:
    whole, cached = make()[1], make(micro_batch=2)
    take(cached[0], 0)
    norm = cached[1].image[1]
    assert int(norm.num_batches_tracked) == 1
    generator = torch.Generator().manual_seed(7)
    whole.image[:2](torch.randn(BATCH, 12, generator=generator)[:2])
    assert torch.equal(norm.running_mean, whole.image[1].running_mean)


@pytest.mark.parametrize(("lr_scale", "moves"), [(0.0, False), (0.5, True)])
def test_the_schedule_applies_to_the_temperature(lr_scale: float, moves: bool) -> None:
    step, _ = make()
    before = step.objective.logit_parameters()[0]
    take(step, 0, lr_scale=lr_scale)
    assert abs(step.objective.logit_parameters()[0] - before) == pytest.approx(0.05 if moves else 0.0, rel=1e-3)


def test_micro_batches_divide_the_local_batch() -> None:
    assert check_micro_batch(global_batch=16, world_size=2, micro_batch=4) == 8
    assert check_micro_batch(global_batch=8, world_size=2, micro_batch=16) == 4  # the whole local batch
    with pytest.raises(UserError, match="micro_batch = 3 does not divide the local batch 8"):
        check_micro_batch(global_batch=16, world_size=2, micro_batch=3)
