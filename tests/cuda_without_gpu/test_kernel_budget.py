"""Kernels and bytes of a step on a GPU, traced without one as `kernel_trace` does, stay within their budgets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from open_clip.transformer import ResidualAttentionBlock
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from pipeline.distributed.world import World
from pipeline.metrics.mfu import _fused_attention, _storage, activation_bytes, measure_towers
from pipeline.model.attention import PackedAttention, replace_modules
from pipeline.model.image_tower import use_bf16_layer_norms
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.objectives import build_objective
from pipeline.objectives.npn import kernels
from tests.cuda_without_gpu.kernel_trace import Kernel, KernelTrace, fake_gpu

DIM, PROTOTYPES, INNER_STEPS = 512, 4096, 10


@dataclass(frozen=True)
class TracedRanks(World):
    """One of `size` ranks whose collectives return tensors of the right shapes. Parts of the program are marked in the
    trace."""

    trace: KernelTrace = field(default_factory=KernelTrace, compare=False)

    def all_gather(self, x_b):
        if self.size == 1:
            return x_b
        with self._communication("all_gather", x_b):
            return x_b.new_empty((self.size * (x_b.shape[0] if x_b.dim() else 1), *x_b.shape[1:]))

    def all_reduce(self, x, op="sum"):
        if self.size == 1:
            return x.clone()
        with self._communication("all_reduce", x):
            return x.clone()

    def phase(self, name):
        return self.trace.within(self.trace.part if name == "communication" else name)


def objective_step(*, ranks, batch, **settings):
    """One rank's step of an objective on a batch of the whole run's size, without its first step."""
    device, local = torch.device("cuda", 0), batch // ranks
    with fake_gpu() as trace, mock.patch.object(kernels, "_compiled", trace.fused):
        objective = build_objective(
            settings, dim=DIM, batch_size=batch, dataset_size=10**7, steps_per_epoch=1000,
            total_steps=10**4, world=TracedRanks(size=ranks, device=device, trace=trace), device=device,
        )  # fmt: skip
        ids = torch.zeros(local, dtype=torch.int64, device=device)
        for _ in range(2):
            trace.kernels.clear()
            image, text = (torch.empty(local, DIM, device=device) for _ in range(2))
            objective.compute(image, text, sample_ids=ids)
            objective.commit()
    return trace.kernels


def npn_step(*, ranks, batch, update="replicated", compiled=False):
    """The part of NeuCLIP's step that its network takes."""
    step = objective_step(
        ranks=ranks, batch=batch, name="neuclip", prototypes=PROTOTYPES, inner_steps=INNER_STEPS,
        npn_update=update, npn_compile=compiled,
    )  # fmt: skip
    return [kernel for kernel in step if kernel.part == "npn"]


def block_step(*, rows):
    """Forward and backward pass of one block of ViT-B/16's image tower, in bf16."""
    # Autograd asks the CUDA driver for streams, so it runs on the meta device.
    with fake_gpu("meta") as trace, torch.device("meta"), flash_attention():
        block: nn.Module = ResidualAttentionBlock(768, 12).bfloat16()
        replace_modules(block, {block.attn: PackedAttention})
        x = torch.empty(rows, 197, 768, dtype=torch.bfloat16, requires_grad=True)
        trace.kernels.clear()
        with torch.enable_grad():
            out = block(x)
        out.backward(torch.empty_like(out))
    return trace.kernels


@contextmanager
def flash_attention():
    """Choose the attention kernel that a GPU would: on the meta device torch takes attention apart."""

    def attend(q, k, v, attn_mask=None, *_, **settings):
        assert attn_mask is None
        causal = bool(settings.get("is_causal"))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]
        return out

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield


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

    def saved(rows):
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
