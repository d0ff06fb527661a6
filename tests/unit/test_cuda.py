"""Checks that need a GPU; skipped without one."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from pipeline.distributed.world import World
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.model.attention import pack
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.objectives import build_objective
from pipeline.objectives.npn import prototypes
from tests.unit.objectives_reference import context, relative_error, unit_features

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BATCH, DIM, STEPS = 128, 64, 4
NEUCLIP = {"name": "neuclip", "prototypes": BATCH, "restart_every": 3}
NEUCLIP_TOLERANCE = 1e-3
"""AdaGrad's first updates divide a gradient by its own size, so that rounding decides the sign of those near zero. On a
CPU, features changed by a relative 1e-7 move NeuCLIP's feature gradients by up to 6e-5, other methods' by 3e-6."""


def run(settings, device, *, strict=False):
    """Return losses and image gradients of a few steps.

    With `strict`, synchronizing with the device is an error from the second step on.
    """
    where = torch.device(device)
    facts = {"world": World(device=where), "device": where, "dtype": torch.float32}
    objective = build_objective(settings, context=context(BATCH, DIM, **facts))
    ids, found = torch.arange(BATCH, device=where), []
    batches = [
        [side.to(where) for side in unit_features(BATCH, DIM, seed=t, dtype=torch.float32)] for t in range(STEPS)
    ]
    for step, (image, text) in enumerate(batches):
        if strict and step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            output = objective.compute(image, text, sample_ids=ids)
            objective.commit()
        finally:
            if strict:
                torch.cuda.set_sync_debug_mode("default")
        found += [output.loss, output.grad_image]
    return [value.cpu() for value in found]


SYNC_FREE = {
    "openclip": {"name": "openclip"},
    "siglip": {"name": "siglip"},
    "neuclip": NEUCLIP,
    "neuclip_restarts": {**NEUCLIP, "prototypes": BATCH // 2, "restart_every": 1},
    "neuclip_compiled": {**NEUCLIP, "npn_compile": True},
}


@pytest.mark.parametrize("settings", SYNC_FREE.values(), ids=SYNC_FREE)
def test_steps_do_not_synchronize_with_the_device(settings):
    run(settings, "cuda", strict=True)


@pytest.mark.parametrize("name", ["openclip", "siglip", "fastclip_v3", "amorlip", "neuclip"])
def test_gpu_matches_cpu(name):
    settings = {**NEUCLIP, "npn_precision": "fp32"} if name == "neuclip" else {"name": name}
    for here, there in zip(run(settings, "cpu"), run(settings, "cuda"), strict=True):
        assert relative_error(there, here) < (NEUCLIP_TOLERANCE if name == "neuclip" else 1e-4)


def test_compiled_passes_make_the_same_updates():
    plain = {**NEUCLIP, "npn_precision": "fp32"}
    for fused, compiled in zip(run(plain, "cuda"), run({**plain, "npn_compile": True}, "cuda"), strict=True):
        assert relative_error(compiled, fused) < NEUCLIP_TOLERANCE


def test_compiled_passes_in_bf16_are_as_close_to_fp32_as_the_others():
    exact, plain, compiled = (
        run({**NEUCLIP, "npn_precision": precision, "npn_compile": compile_}, "cuda")
        for precision, compile_ in (("fp32", False), ("bf16", False), ("bf16", True))
    )
    errors = [max(map(relative_error, values, exact)) for values in (plain, compiled)]
    assert errors[1] < 1.5 * errors[0], errors


def test_anchor_block_size_does_not_change_results(monkeypatch):
    whole = run(NEUCLIP, "cuda")
    monkeypatch.setattr(prototypes, "_GPU_BLOCK", BATCH * 40)  # 40 anchors at a time
    for all_at_once, in_blocks in zip(whole, run(NEUCLIP, "cuda"), strict=True):
        assert relative_error(in_blocks, all_at_once) < 1e-2


def test_step_leaves_only_state_in_device_memory():
    run(NEUCLIP, "cuda")
    facts = {"world": World(device=torch.device("cuda")), "device": torch.device("cuda"), "dtype": torch.float32}
    objective = build_objective(NEUCLIP, context=context(BATCH, DIM, **facts))
    ids = torch.arange(BATCH, device="cuda")
    image, text = (side.cuda() for side in unit_features(BATCH, DIM, dtype=torch.float32))
    held = torch.cuda.memory_allocated()
    objective.compute(image, text, sample_ids=ids)
    objective.commit()
    assert torch.cuda.memory_allocated() - held < 4 * BATCH * BATCH  # less than one fp32 similarity matrix


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_texts_equal_whole_ones(compiled):
    """By the kernel for variable lengths in bf16, against whole texts in fp32; one program for all lengths."""
    towers, architecture = build_towers(ModelConfig(arch="scenes-vit-micro"), seed=0)
    whole, towers = copy.deepcopy(towers).cuda(), towers.to("cuda", torch.bfloat16)
    programs = CompileCounterWithBackend("inductor")
    engine = DeepSpeedEngine.__new__(DeepSpeedEngine)
    engine.dtype, engine._compiled, engine._may_fail = torch.bfloat16, compiled, False
    engine._engine = torch.compile(towers, backend=programs) if compiled else towers
    image = torch.randn(16, 3, architecture.image_size, architecture.image_size, device="cuda")

    def results(forward, module, texts):
        module.zero_grad()
        features = forward(image, texts)
        (features[0] * features[1]).sum().backward()
        return *features, torch.cat([p.grad.float().flatten() for p in module.parameters()])

    for longest in (8, architecture.context_length, 12):
        lengths = torch.randint(2, longest + 1, (16,))
        text = torch.randint(1, 40_000, (16, architecture.context_length))
        text[torch.arange(16), lengths - 1] = architecture.tokenize([""]).max()
        text[torch.arange(text.shape[1]) >= lengths[:, None]] = 0
        packed = pack(text, lengths, device=image.device, by_kernel=True)
        exact = results(whole, whole, text.to(image.device))
        for expected, found in zip(exact, results(engine.forward, towers, packed), strict=True):
            assert relative_error(found.float(), expected) < 0.05
    assert programs.frame_count == compiled
