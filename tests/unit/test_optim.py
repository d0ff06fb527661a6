"""Optimizers compared with FastCLIP's Procedure 4, and their bookkeeping."""

import math
from dataclasses import replace

import pytest
import torch
from open_clip_train.scheduler import const_lr_cooldown
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.config import parse
from pipeline.engine.optim import (
    OptimizerConfig,
    ScheduleConfig,
    build_optimizer,
    check_stage,
    decay_in_gradient,
    gradient_in_moment,
    moment_keys,
    parameter_groups,
    step_counter,
)
from pipeline.errors import UserError
from pipeline.training.step import lr_scale

PROCEDURE_4 = ("adamw", "lamb", "lion", "sgd")
NAMES = (*PROCEDURE_4, "muon")
MATRICES = ("resblocks.0.weight", "proj.weight")


def model():
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    return nn.ModuleDict({"resblocks": blocks, "proj": nn.Linear(7, 3)}).double()


def gradients(net, step):
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in net.named_parameters()}


def written(config, value, moments, gradient, *, step):
    """Apply one update of Procedure 4 to one parameter and return the new value."""
    decay = config.weight_decay if value.dim() >= 2 else 0.0
    beta1, beta2 = config.betas
    if config.name == "sgd":
        moments["m"] = config.momentum * moments["m"] + gradient + decay * value
        return value - config.lr * moments["m"]
    if config.name == "lion":
        direction = torch.sign(beta1 * moments["m"] + (1 - beta1) * gradient)
        moments["m"] = beta2 * moments["m"] + (1 - beta2) * gradient
        return value - config.lr * (direction + decay * value)
    moments["m"] = beta1 * moments["m"] + (1 - beta1) * gradient
    moments["v"] = beta2 * moments["v"] + (1 - beta2) * gradient**2
    update = moments["m"] / (1 - beta1**step) / ((moments["v"] / (1 - beta2**step)).sqrt() + config.eps)
    update = update + decay * value
    ratio = value.norm() / update.norm() if config.name == "lamb" and value.dim() >= 2 else 1.0
    return value - config.lr * ratio * update


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("name", PROCEDURE_4)
def test_updates_follow_procedure_4(name, weight_decay):
    """Except for LAMB's gains and biases, which are not scaled."""
    config, net = OptimizerConfig(name=name, lr=0.02, weight_decay=weight_decay), model()
    optimizer = build_optimizer(config, parameter_groups(net, config))
    values = {n: p.detach().clone() for n, p in net.named_parameters()}
    moments = {n: {"m": torch.zeros_like(p), "v": torch.zeros_like(p)} for n, p in values.items()}
    for step in range(1, 6):
        given = gradients(net, step)
        for n, p in net.named_parameters():
            p.grad = given[n].clone()
            values[n] = written(config, values[n], moments[n], given[n], step=step)
        optimizer.step()
    for n, p in net.named_parameters():
        assert torch.allclose(p, values[n], rtol=1e-9, atol=1e-12), n
        assert int(optimizer.state[p]["step"]) == 5


def test_muon_is_torchs_for_matrices_of_blocks_and_adamw_for_the_rest():
    config, nets = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.3, momentum=0.95), [model(), model()]
    optimizer = build_optimizer(config, parameter_groups(nets[0], config))
    named = dict(nets[1].named_parameters())
    hidden = [named.pop("resblocks.0.weight")]
    vectors = [p for p in named.values() if p.dim() < 2]
    groups = [{"params": [named["proj.weight"]]}, {"params": vectors, "weight_decay": 0.0}]
    references = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.02, weight_decay=0.3, betas=config.betas, eps=config.eps),
    ]
    for step in range(1, 6):
        given = gradients(nets[0], step)
        for net in nets:
            for n, p in net.named_parameters():
                p.grad = given[n].clone()
        for each in (optimizer, *references):
            each.step()
    for (n, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        # Muon's iteration is in bf16: five updates of about 0.2 * lr each, rounded to 3 digits.
        assert torch.allclose(p, q, rtol=1e-9, atol=1e-4 if n == "resblocks.0.weight" else 1e-12), n
        assert int(optimizer.state[p]["step"]) == 5


def test_gains_and_biases_are_not_decayed_and_muon_takes_matrices_of_blocks():
    net = model()
    groups = parameter_groups(net, OptimizerConfig(weight_decay=0.5))
    by_id = {id(p): n for n, p in net.named_parameters()}
    found = {by_id[id(p)]: g["weight_decay"] for g in groups for p in g["params"]}
    assert found == {n: 0.5 if n in MATRICES else 0.0 for n in by_id.values()}
    assert sum(len(g["params"]) for g in groups) == len(by_id)
    config = OptimizerConfig(name="muon", layer_decay=0.5)
    blocks = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 3))
    net = nn.ModuleDict({"token_embedding": nn.Embedding(9, 4), "resblocks": blocks, "proj": nn.Linear(4, 3)})
    by_id = {id(p): n for n, p in net.named_parameters()}
    found = {by_id[id(p)]: g["name"] for g in parameter_groups(net, config) for p in g["params"]}
    assert {n for n, kind in found.items() if kind == "hidden"} == {"resblocks.0.weight", "resblocks.2.weight"}
    assert found["resblocks.1.weight"] == found["token_embedding.weight"] == found["proj.weight"] == "decay"
    net["resblocks"].requires_grad_(False)
    with pytest.raises(UserError, match="no trained parameter is a matrix of a block"):
        parameter_groups(net, config)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_can_be_recovered_from_the_moment(name):
    config, net = OptimizerConfig(name=name, weight_decay=0.3), model()
    optimizer = build_optimizer(config, parameter_groups(net, config))
    moments = gradient_in_moment(config)
    for step in (1, 2):
        given = gradients(net, step)
        before = {p: dict(optimizer.state.get(p, {})) for p in net.parameters()}
        before = {p: {key: torch.as_tensor(v).clone() for key, v in old.items()} for p, old in before.items()}
        terms = {n: decay_in_gradient(config, p) for n, p in net.named_parameters()}
        for n, p in net.named_parameters():
            p.grad = given[n].clone()
        optimizer.step()
        for n, p in net.named_parameters():
            (key,) = moments.keys() & optimizer.state[p].keys()
            decay, scale = moments[key]
            expected = decay * before[p].get(key, torch.zeros_like(p)) + scale * (given[n] + terms[n])
            assert torch.allclose(optimizer.state[p][key], expected), n
    keys = moment_keys(config, optimizer.param_groups)
    for p in net.parameters():
        assert set(keys(p)) == {key for key, value in optimizer.state[p].items() if torch.is_tensor(value)} - {"step"}


def test_shared_and_scalar_parameters_are_rejected():
    net = model()
    net["twin"] = net["proj"]
    with pytest.raises(UserError, match="twin"):
        parameter_groups(net, OptimizerConfig())
    scalar = nn.Module()
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(UserError, match="scalar"):
        parameter_groups(scalar, OptimizerConfig())


def test_optimizers_by_layer_are_rejected_where_layers_are_flattened():
    """`tests/dist/test_optim_stages.py` has the other optimizers at every stage."""
    for name, reason in (("lamb", "trust ratio"), ("muon", "orthogonalizes")):
        check_stage(OptimizerConfig(name=name), stage=0)
        for stage in (1, 2, 3):
            with pytest.raises(UserError, match=f"'{name}' does not work with ZeRO stage {stage}: .*{reason}"):
                check_stage(OptimizerConfig(name=name), stage=stage)


def test_adamw_is_fused_on_a_gpu_and_its_counters_are_there_those_of_others_on_the_host():
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(4, 5, device="cuda"))
        for name in ("lamb", "lion", "sgd"):
            optimizer = build_optimizer(OptimizerConfig(name=name), [{"params": [parameter], "name": "decay"}])
            assert step_counter(optimizer, parameter, 7).device.type == "cpu"
        parameter.grad = torch.ones_like(parameter)
        optimizer = build_optimizer(OptimizerConfig(), [{"params": [parameter], "weight_decay": 0.0, "name": "decay"}])
        assert optimizer.defaults["fused"]
        loaded = step_counter(optimizer, parameter, 7)
        optimizer.step()
        made = optimizer.state[parameter]["step"]
        assert loaded.device == made.device == parameter.device
        assert loaded.dtype == made.dtype


@pytest.mark.parametrize("stages", [[], [{"until": 0.85, "lr_scale": 0.5}]], ids=["whole", "stage"])
def test_a_constant_rate_cools_down_as_the_root_of_open_clips_linear_share(stages):
    given = {"kind": "constant", "warmup_steps": 10, "cooldown_share": 0.2, "stages": stages}
    config = parse(ScheduleConfig, given, prefix="schedule")
    theirs = const_lr_cooldown(torch.optim.SGD([torch.zeros(1)]), 1.0, 10, 100, 20)
    for step in range(100):
        linear, factor = theirs(step), 0.5 if stages and step < 85 else 1.0
        expected = linear if step < 80 else 1 - math.sqrt(1 - linear)
        assert lr_scale(config, step=step, total_steps=100) == pytest.approx(factor * expected)
    flat = replace(config, cooldown_share=0.0, stages=())
    assert [lr_scale(flat, step=step, total_steps=100) for step in (9, 80, 99)] == [1, 1, 1]
