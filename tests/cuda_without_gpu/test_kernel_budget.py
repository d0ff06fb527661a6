"""Kernels and bytes of a step on a GPU, traced without one, stay within their budgets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from pipeline.metrics.mfu import _fused_attention, _storage, activation_bytes, measure_towers
from pipeline.model.image_tower import use_bf16_layer_norms
from pipeline.model.towers import ModelConfig, build_towers
from tests.cuda_without_gpu.kernel_trace import Kernel
from tests.cuda_without_gpu.programs import block_step, npn_step, objective_step

RANKS, BATCH = 8, 5120
# One of 8 ranks, local batch 640 of 5,120, d = 512, 4,096 prototypes, 10 inner steps: kernels, and GB moved.
BUDGETS: dict[str, tuple[Callable[[], list[Kernel]], int, float]] = {
    "openclip": (lambda: objective_step(ranks=RANKS, batch=BATCH, name="openclip"), 118, 0.71),
    "siglip": (lambda: objective_step(ranks=RANKS, batch=BATCH, name="siglip"), 85, 0.415),
    "npn_replicated": (lambda: npn_step(ranks=RANKS, batch=BATCH, update="replicated"), 884, 17.14),
    "npn_prototypes": (lambda: npn_step(ranks=RANKS, batch=BATCH, update="prototypes"), 1034, 3.02),
    "npn_replicated_compiled": (lambda: npn_step(ranks=RANKS, batch=BATCH, compiled=True), 228, 7.26),
    "npn_prototypes_compiled": (
        lambda: npn_step(ranks=RANKS, batch=BATCH, update="prototypes", compiled=True), 294, 1.39),
    "npn_whole_batch_on_one_gpu": (lambda: npn_step(ranks=1, batch=BATCH), 884, 17.14),
    "tower_block": (lambda: block_step(rows=640), 29, 22.72),
}  # fmt: skip


@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_stays_within_its_budget(name):
    """If a change needs more, it needs a reason. If it needs less, lower the budget, so that the gain is kept."""
    run, kernels, gigabytes = BUDGETS[name]
    found = run()
    moved = sum(kernel.bytes for kernel in found) / 1e9
    assert len(found) <= kernels, f"{len(found)} kernels instead of {kernels}"
    assert moved <= 1.01 * gigabytes, f"{moved:.2f} GB instead of {gigabytes}"
    assert len(found) > 0.95 * kernels, f"now {len(found)} kernels: lower the budget of {kernels}"
    assert moved > 0.95 * gigabytes, f"now {moved:.2f} GB: lower the budget of {gigabytes}"


@pytest.mark.parametrize("settings", [{}, {"lock_image": True}, {"grad_checkpointing": True}], ids=str)
def test_plan_counts_what_autograd_saves_under_cudas_autocast(settings):
    """Regression test: layer norms of texts keep their inputs in fp32 there, and those of images did, too."""
    towers, architecture = build_towers(ModelConfig(arch="ViT-B-32", **settings), seed=0, device="meta")
    size, length = architecture.image_size, architecture.context_length
    costs = measure_towers(towers, image_size=size, context_length=length)
    use_bf16_layer_norms(towers.clip.visual)  # as the engine does

    def saved(rows: int) -> int:
        kept: dict[int, Tensor] = {}
        image = torch.zeros(rows, 3, size, size, device="cuda")
        text = torch.zeros(rows, length, dtype=torch.int64, device="cuda")
        with _fused_attention(), saved_tensors_hooks(lambda x: kept.setdefault(_storage(x), x), lambda x: x):
            output = torch.func.functional_call(towers, state, (image, text))
        del output
        return sum(x.untyped_storage().nbytes() for key, x in kept.items() if key not in map(_storage, state.values()))

    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            named = (*towers.named_parameters(), *towers.named_buffers())
            state = {name: torch.empty_like(x, device="cuda", requires_grad=x.requires_grad) for name, x in named}
            found = (saved(4) - saved(2)) / 2
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
        torch.clear_autocast_cache()
    expected = activation_bytes(costs, micro_batch=1, bf16=True, autocast=True)
    assert expected == pytest.approx(found, rel=0.01)
