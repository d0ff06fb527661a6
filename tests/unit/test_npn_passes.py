"""Prototypes: the passes of an update, fused and compiled, and Algorithm 1 as a reference."""

import math

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from pipeline.errors import UserError
from pipeline.objectives import build_objective
from pipeline.objectives.npn import kernels
from pipeline.objectives.npn.kernels import Prototypes
from pipeline.objectives.npn.reference import ReferenceNeuClip
from tests.unit.objectives_reference import context, relative_error, unit_features


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("make", [kernels.Passes, kernels.CompiledPasses])
def test_exponentials_and_their_sums(make, scaled, monkeypatch):
    monkeypatch.setattr(kernels, "_CPU_PIECE", 40 * 3)  # pieces of a few rows
    generator = torch.Generator().manual_seed(9)
    z = torch.randn(7, 40, generator=generator, dtype=torch.float64) * 340
    scale = torch.rand(40, generator=generator, dtype=torch.float64) * 2 if scaled else None
    weight = torch.zeros(40, 3, dtype=torch.float64)
    at = Prototypes(weight, weight, scale, weight[:, :1], torch.ones(()))
    exponents = z if scale is None else z * scale
    powers, shift, total = make().exponentials(z.clone(), at)
    assert torch.allclose(powers.sum(1), total, rtol=1e-12)
    assert torch.allclose(powers, (exponents - shift[:, None]).exp(), rtol=1e-9)
    assert torch.allclose(shift + total.log(), exponents.logsumexp(1), rtol=1e-12)
    shift, total = make().sums(z.clone(), at)
    assert torch.allclose(shift + total.log(), exponents.logsumexp(1), rtol=1e-12)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_compiled_passes_give_the_same_updates(optimizer):
    settings = {"name": "neuclip", "prototypes": 20, "restart_every": 3, "inner_steps": 3, "npn_optimizer": optimizer}
    states = []
    for compiled in (False, True):
        objective, losses = build_objective({**settings, "npn_compile": compiled}, context=context(8)), []
        for step in range(5):  # prototypes grow from 8 to 20, and are restarted
            image, text = unit_features(8, 16, seed=step, dtype=torch.float64)
            output = objective.compute(image, text, sample_ids=torch.arange(8))
            objective.commit()
            losses.append(output.loss)
        states.append({"losses": torch.stack(losses), **objective.state_dict()})
    for name, value in states[0].items():
        assert torch.allclose(states[1][name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.slow  # compiles
def test_compiled_passes_with_bf16_products_have_the_same_error():
    updated = {}
    for precision, compiled in (("fp32", False), ("bf16", False), ("bf16", True)):
        settings = {"name": "neuclip", "prototypes": 64, "npn_precision": precision, "npn_compile": compiled}
        objective = build_objective(settings, context=context(96, dim=32, dtype=torch.float32))
        image, text = unit_features(96, 32, seed=1, dtype=torch.float32)
        objective.compute(image, text, sample_ids=torch.arange(96))
        objective.commit()
        updated[precision, compiled] = objective.state_dict()["npn.weight"]
    full = updated["fp32", False]
    assert 1e-5 < relative_error(updated["bf16", True], full) < 2 * relative_error(updated["bf16", False], full)


def test_a_missing_compiler_gets_a_clear_error(monkeypatch):
    def fail(*arguments):
        raise TorchDynamoException("no C++ compiler here\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr(torch, "compile", lambda formula, **options: fail)
    monkeypatch.setattr(kernels, "_programs", {})
    objective = build_objective({"name": "neuclip", "prototypes": 4, "npn_compile": True}, context=context(8))
    image, text = unit_features(8, 16, seed=0, dtype=torch.float64)
    with pytest.raises(UserError, match=r"no C\+\+ compiler here.*npn_compile=false"):
        objective.compute(image, text, sample_ids=torch.arange(8))


BATCH = 8


@pytest.mark.parametrize("seed", [0, 1])
def test_the_objective_is_algorithm_1(seed):
    """Features, temperature and prototypes are all trained; m = B, with the full gradient of (12) as in the paper."""
    shared = {"rho": 2.0, "eps": 1e-10, "restart_every": 3, "inner_steps": 4}
    settings = {"name": "neuclip", "prototypes": BATCH, "npn_lr": 0.05, "ratio_cap": 0, "stop_gradient": False}
    objective = build_objective(settings | shared, context=context(BATCH, seed=seed))
    reference = ReferenceNeuClip(**shared, lr=0.05)
    log_scale = torch.tensor(math.log(1 / 0.07), dtype=torch.float64, requires_grad=True)
    c = objective.config
    peer = torch.optim.Adam([log_scale], lr=c.tau_lr, betas=(0.9, 0.98), eps=1e-8)
    for step in range(8):
        image, text = (f.requires_grad_() for f in unit_features(BATCH, seed=10 * seed + step))
        loss = reference.step(image, text, torch.exp(-log_scale))
        peer.zero_grad()
        loss.backward()
        peer.step()
        output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(BATCH))
        assert relative_error(output.loss, loss) < 1e-9, step
        assert relative_error(output.grad_image, image.grad) < 1e-8, step
        assert relative_error(output.grad_text, text.grad) < 1e-8, step
        for side in (0, 1):
            assert relative_error(objective.npn.weight(side), reference.weights[side]) < 1e-8, step
        objective.commit()
        assert objective.logit_parameters()[0] == pytest.approx(float(log_scale), rel=1e-7)  # the rate is fp32
