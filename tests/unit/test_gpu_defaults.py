"""What a run on one GPU gets by default, decided with a device that is not there, and equal to what it replaces."""

import copy
import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import TorchDynamoException

from pipeline.distributed.devices import wait_for
from pipeline.distributed.world import World
from pipeline.engine import deepspeed_engine
from pipeline.engine.deepspeed_engine import DeepSpeedEngine, fuse_gradients
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.optim import OptimizerConfig
from pipeline.errors import UserError
from pipeline.model.attention import has_packed_kernel, replace_modules
from pipeline.model.image_tower import Bf16LayerNorm, PatchProduct
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.objectives import ObjectiveContext
from pipeline.objectives.npn import prototype_network
from pipeline.objectives.npn.neuclip import NeuClipConfig
from pipeline.training.build import compiled_towers
from pipeline.training.recipe import parse_recipe
from tests.towers import TINY
from tests.training import prepare, settings_in, train_here

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device", "ranks", "optimizer", "stage"),
    [("cuda", 1, "adamw", 1), ("cuda", 8, "adamw", 1), ("cuda", 1, "muon", 0), ("cpu", 1, "adamw", 0),
     ("auto", 1, "adamw", 0), ("cpu", 2, "adamw", 1), ("cpu", 2, "lamb", 0)],
)  # fmt: skip
def test_bf16_weights_where_the_optimizer_allows_them(device, ranks, optimizer, stage):
    config = EngineConfig(device=device)
    given = OptimizerConfig(name=optimizer, lr=1e-3)
    facts = DeepSpeedEngine.facts(config, optimizer=given, global_batch=8, world_size=ranks)
    assert (facts.stage, facts.dtype) == (stage, torch.bfloat16 if stage else torch.float32)


def test_towers_are_compiled_on_gpus_in_runs_that_are_long_enough(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    shared = {"output": "run", "data": {"sources": "shards"}, "batch_size": 1024, "samples": 10**9}
    run = parse_recipe({**shared, "optimizer": {"lr": 1e-3}, "objective": {"name": "openclip"}})
    on_gpu = World(device=GPU)
    lora = replace(run.model, lora=replace(run.model.lora, rank=8))
    for model, world, stage, steps, expected in (
        (run.model, on_gpu, 1, 100_000, "auto"),
        (run.model, on_gpu, 1, 1_000, False),  # two minutes
        (run.model, World(), 1, 100_000, False),
        (run.model, on_gpu, 3, 100_000, False),
        (lora, on_gpu, 1, 100_000, False),
        (replace(run.model, compile=True), World(), 1, 1, True),
        (replace(run.model, compile=False), on_gpu, 1, 100_000, False),
    ):
        facts = SimpleNamespace(stage=stage, bf16=True)
        assert compiled_towers(replace(run, model=model), facts, world=world, steps=steps) == expected
    in_fp32 = SimpleNamespace(stage=1, bf16=False)
    assert compiled_towers(run, in_fp32, world=on_gpu, steps=100_000) is False, "packed texts would be compiled anew"


@pytest.mark.parametrize("file", ["zero0_bf16", "zero1_bf16"])
def test_the_host_sleeps_until_the_gradients_norm_is_known(file, tmp_path, monkeypatch):
    """Where torch reads it from a GPU, CUDA spins, and a step's CPU time is at least its whole time."""
    prepare(tmp_path, image_size=32)
    waited = []
    monkeypatch.setattr(deepspeed_engine, "wait_for", waited.append)
    train_here(*settings_in(tmp_path, "run", "samples=16", f"engine.deepspeed={file}", "engine.probe=false"))
    assert waited == [torch.device("cpu")] * 2


def test_a_wait_is_for_a_blocking_event_of_the_current_stream(monkeypatch):
    calls = []
    event = SimpleNamespace(synchronize=lambda: calls.append("sleeps"))
    stream = SimpleNamespace(record_event=lambda given: calls.append(given) or event)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: f"event, blocking={blocking}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    wait_for(torch.device("cpu"))
    assert calls == []
    wait_for(GPU)
    assert calls == ["event, blocking=True", "sleeps"]


def test_towers_that_cannot_be_compiled_train_uncompiled(caplog):
    """With the same random draws, and one warning; an error that has nothing to do with compiling comes again."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    engine.world, engine.dtype, engine.module = World(), torch.float32, nn.Module()
    engine.module._compiled_call_impl, engine._compiled = "compiled", "auto"

    def forward(image, text):
        drawn = torch.rand(2)
        if engine.module._compiled_call_impl is not None:
            raise RuntimeError("no kernel for this tower\nmore")
        return image + drawn, text + drawn

    engine._engine, engine._may_fail = forward, True
    torch.manual_seed(1)
    with caplog.at_level(logging.WARNING):
        found = engine.forward(torch.zeros(2), torch.zeros(2))
        engine.forward(torch.zeros(2), torch.zeros(2))
    torch.manual_seed(1)
    assert torch.equal(found[0], torch.rand(2))
    assert [record.getMessage() for record in caplog.records] == [
        "The towers cannot be compiled, and train uncompiled (no kernel for this tower). model.compile=false says so."
    ]
    engine._may_fail, engine.module._compiled_call_impl = False, "compiled"
    with pytest.raises(RuntimeError, match="no kernel"):
        engine.forward(torch.zeros(2), torch.zeros(2))


def test_towers_that_must_be_compiled_and_cannot_end_the_run_with_a_message():
    """Regression test: without a compiler, `model.compile=true` ended as a bug; other errors stay what they are."""
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    engine.world, engine.dtype, engine._compiled = World(), torch.float32, True
    for error, kind in ((TorchDynamoException("no compiler"), UserError), (KeyError("x"), KeyError)):

        def forward(image, text, error=error):
            raise error

        engine._engine, engine._may_fail = forward, True
        with pytest.raises(kind, match=r"model.compile = true, .*no compiler" if kind is UserError else "x"):
            engine.forward(torch.zeros(2), torch.zeros(2))


def test_a_backward_pass_that_cannot_be_compiled_is_found_before_it_is_due(caplog):
    """Also with GradCache, whose first passes have no graph."""

    class Tower(nn.Linear):
        def forward(self, image):
            compiled.append(torch.compiler.is_compiling())
            return super().forward(image)

    def fail(*_):
        raise RuntimeError("no kernel for this gradient")

    engine, module, compiled = DeepSpeedEngine.__new__(DeepSpeedEngine), Tower(2, 2), []
    module.compile(backend=aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=fail))
    engine.world, engine.dtype, engine.module = World(), torch.float32, module
    engine._engine, engine._compiled, engine._may_fail = lambda image, text: (module(image), text), "auto", True
    image = torch.ones(2, 2)
    with torch.no_grad():
        engine.forward(image, image)
    assert compiled == [True]
    assert "uncompiled" not in caplog.text
    engine.forward(image, image)[0].sum().backward()
    assert "no kernel for this gradient" in caplog.text
    assert torch.equal(module.weight.grad, torch.full((2, 2), 2.0))


def test_packed_texts_need_heads_that_the_kernel_takes(tmp_path):
    for width, expected in ((16, True), (12, False)):
        arch = {"embed_dim": 8, "vision_cfg": TINY["vision_cfg"], "text_cfg": {**TINY["text_cfg"], "width": width}}
        (tmp_path / "arch.json").write_text(json.dumps(arch))
        towers, _ = build_towers(ModelConfig(arch=str(tmp_path / "arch.json")), seed=0, device="meta")
        assert has_packed_kernel(towers.clip, GPU) is expected
        assert not has_packed_kernel(towers.clip, torch.device("cpu"))


@pytest.mark.parametrize(
    ("steps", "works", "expected"), [(2000, True, True), (1999, True, False), (2000, False, False)]
)
def test_the_network_is_compiled_where_that_works(steps, works, expected, monkeypatch):
    monkeypatch.setattr(prototype_network, "why_not_compiled", lambda device: "" if works else "no compiler")
    context = ObjectiveContext(
        dim=8, batch_size=8, dataset_size=100, steps_per_epoch=9, total_steps=steps, world=World(), device=GPU
    )
    config = NeuClipConfig(name="neuclip")
    assert prototype_network.is_compiled(config, context) is expected
    assert not prototype_network.is_compiled(config, replace(context, device=torch.device("cpu")))
    assert prototype_network.is_compiled(replace(config, npn_compile=True), context)


@pytest.mark.parametrize(
    ("arch", "replaced"), [("ViT-B-32", 1), ("PE-Core-T-16-384", 1), ("RN50", 0), ("convnext_base", 0)]
)
def test_only_patch_embeddings_are_computed_as_products(arch, replaced):
    """And none where open_clip's own modules are asked for, as in evaluation while training, whose scores must be those
    of `neuclip evaluate`."""
    for packed, expected in ((True, replaced), (False, 0)):
        towers, _ = build_towers(ModelConfig(arch=arch, packed_attention=packed), seed=0, device="meta")
        assert sum(isinstance(module, PatchProduct) for module in towers.modules()) == expected


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(16, 24), (19, 25)])  # the second has pixels that fill no whole patch
def test_the_patch_embedding_as_a_product_equals_the_convolution(bias, size):
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 5, 8, 8, bias=bias, dtype=torch.float64)
    tower = nn.Sequential(copy.deepcopy(convolution))
    replace_modules(tower, {tower[0]: PatchProduct})
    product = tower[0]
    assert product.state_dict().keys() == convolution.state_dict().keys()
    image = torch.randn(2, 3, *size, dtype=torch.float64).to(memory_format=torch.channels_last)
    outputs = convolution(image), product.product(image)
    assert (outputs[0] - outputs[1]).abs().max() < 1e-14
    upstream = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(upstream)
    for expected, found in zip(convolution.parameters(), product.parameters(), strict=True):
        assert (expected.grad - found.grad).abs().max() < 1e-13


def test_layer_norms_under_autocast_equal_those_of_bf16_weights():
    torch.manual_seed(0)
    plain = nn.LayerNorm(24)
    nn.init.normal_(plain.weight)
    kept, bf16 = Bf16LayerNorm(24), copy.deepcopy(plain).bfloat16()
    kept.load_state_dict(plain.state_dict())
    x = torch.randn(5, 7, 24).bfloat16()
    outputs = kept.in_bf16(x), bf16(x)
    assert torch.equal(*outputs)
    for output in outputs:
        output.float().square().sum().backward()
    for ours, theirs in zip(kept.parameters(), bf16.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.float())
    assert torch.equal(kept(x.float()), plain(x.float()))


def test_fused_bookkeeping_of_gradients_equals_deepspeeds_own():
    """Accumulated over micro-batches and without a gradient for some parameter, to the bit; the norm up to rounding."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    def optimizer():
        torch.manual_seed(0)
        made = BF16_Optimizer.__new__(BF16_Optimizer)
        made.immediate_grad_update, made.has_moe_layers, made.mpu = False, False, None
        made.autoep_folding_tp_group = None
        shapes = [[(3, 4), (5,)], [(7,)]]
        groups = [[nn.Parameter(torch.randn(*shape).bfloat16()) for shape in group] for group in shapes]
        made.bf16_groups, made.optimizer = groups, SimpleNamespace(param_groups=[{}, {}])
        made.fp32_groups_gradients = [[torch.zeros(p.numel()) for p in group] for group in groups]
        made.fp32_groups_has_gradients = [[False] * len(group) for group in groups]
        return made

    plain, fused = optimizer(), optimizer()
    fuse_gradients(fused)
    for made in (plain, fused):
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            for parameter in (p for group in made.bf16_groups for p in group):
                gradient = torch.randn(parameter.shape, generator=generator).bfloat16()
                parameter.grad = gradient if number or parameter.dim() == 2 else None
            made.update_hp_grads(clear_lp_grads=number == 2)
    for ours, theirs in zip(fused.fp32_groups_gradients, plain.fp32_groups_gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert fused.fp32_groups_has_gradients == plain.fp32_groups_has_gradients
    assert not any(p.grad.any() for group in fused.bf16_groups for p in group)
    norms = [torch.cat([x.flatten() for x in made.get_grads_for_norm()[0]]).norm() for made in (plain, fused)]
    assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
    assert len(fused.get_grads_for_norm()[0]) == 1
    assert len(fused.get_grads_for_norm(for_clipping=True)) == 3
