"""Kernels, bytes and estimated time of objective, NPN and tower blocks on a GPU, traced without one.

    python -m jobs.bench.roofline
    python -m jobs.bench.roofline --ranks 64 --batch 40960 --top 8

The code runs on fake CUDA tensors, which have shapes but no values; every operator counts as one kernel that reads its
inputs and writes its outputs. Compiled formulas of the NPN count as one kernel each (Inductor makes two of the one that
weighs the anchors). Times are estimates, not measurements: for each kernel the longest of memory traffic at 2.7 TB/s,
arithmetic at 600 (bf16) or 45 (fp32) TFLOP/s, and 2.2 us. Communication takes no time here; its bytes are one rank's
contributions.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jobs.bench.kernel_trace import Gpu, Kernel, KernelTrace, fake_gpu
from pipeline.model.attention import PackedAttention
from pipeline.objectives import build_objective
from pipeline.objectives.npn import kernels
from pipeline.planning.run_costs import SimulatedRanks

DIM, PROTOTYPES, INNER_STEPS = 512, 4096, 10
UPDATES = ("replicated", "prototypes")


@dataclass(frozen=True)
class TracedRanks(SimulatedRanks):
    """Parts of the program are marked in the trace."""

    trace: KernelTrace = field(default_factory=KernelTrace, compare=False)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.trace.within(self.trace.part if name == "communication" else name)


@dataclass(frozen=True)
class Program:
    """What one step of a program runs on the device."""

    name: str
    kernels: list[Kernel]
    communicated: int = 0
    """Bytes that this rank contributes to collectives."""


def objective_step(*, ranks: int, batch: int, **settings: Any) -> Program:
    """One rank's step of an objective on a batch of the whole run's size, without its first step."""
    device, local = torch.device("cuda", 0), batch // ranks
    with fake_gpu() as trace, mock.patch.object(kernels, "_compiled", trace.fused):
        world = TracedRanks(size=ranks, device=device, trace=trace)
        objective = build_objective(
            {"drift_check_every": 0, **settings}, dim=DIM, batch_size=batch, dataset_size=10**7, steps_per_epoch=1000,
            total_steps=10**4, world=world, device=device,
        )  # fmt: skip
        ids = torch.zeros(local, dtype=torch.int64, device=device)
        for _ in range(2):
            trace.kernels.clear()
            world.traffic.clear()
            image, text = (torch.empty(local, DIM, device=device) for _ in range(2))
            objective.compute(image, text, sample_ids=ids)
            objective.commit()
    return Program(str(settings), trace.kernels, sum(v for k, v in world.traffic.items() if k.endswith("bytes")))


def npn_step(*, ranks: int, batch: int, update: str = "replicated", compiled: bool = False) -> Program:
    """The part of NeuCLIP's step that its network takes."""
    step = objective_step(
        ranks=ranks, batch=batch, name="neuclip", prototypes=PROTOTYPES, inner_steps=INNER_STEPS,
        npn_update=update, npn_compile=compiled,
    )  # fmt: skip
    name = f"NPN, {update}, {'compiled' if compiled else 'eager'}"
    return Program(name, [kernel for kernel in step.kernels if kernel.part == "npn"], step.communicated)


def block_step(*, rows: int, packed: bool) -> Program:
    """Forward and backward pass of one block of ViT-B/16's image tower, in bf16."""
    from open_clip.transformer import ResidualAttentionBlock

    # Autograd asks the CUDA driver for streams, so it runs on the meta device.
    with fake_gpu("meta") as trace, torch.device("meta"), flash_attention():
        block: nn.Module = ResidualAttentionBlock(768, 12).bfloat16()
        if packed:
            block.attn.__class__ = PackedAttention
        x = torch.empty(rows, 197, 768, dtype=torch.bfloat16, requires_grad=True)
        trace.kernels.clear()
        with torch.enable_grad():
            out = block(x)
        out.backward(torch.empty_like(out))
    return Program(f"block of ViT-B/16, {rows} images, {'packed' if packed else 'open_clip'} attention", trace.kernels)


@contextmanager
def flash_attention() -> Iterator[None]:
    """Choose the attention kernel that a GPU would: on the meta device torch takes attention apart."""

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, *_: Any, **settings: Any) -> Tensor:
        assert attn_mask is None
        causal = bool(settings.get("is_causal"))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal)[0]
        return out

    with mock.patch.object(F, "scaled_dot_product_attention", attend):
        yield


def programs(*, ranks: int, batch: int) -> Iterator[Program]:
    """The programs of the table."""
    whole = objective_step(ranks=ranks, batch=batch, name="openclip")
    yield Program("objective without NPN (openclip)", whole.kernels, whole.communicated)
    for update in UPDATES:
        for compiled in (False, True):
            yield npn_step(ranks=ranks, batch=batch, update=update, compiled=compiled)
    for packed in (False, True):
        yield block_step(rows=batch // ranks, packed=packed)


def describe(program: Program, *, top: int) -> list[str]:
    """A line of the table, and lines for the kernels that take longest."""
    gpu = Gpu()
    seconds = sum(gpu.seconds(kernel) for kernel in program.kernels)
    moved = sum(kernel.bytes for kernel in program.kernels)
    flops = sum(kernel.flops for kernel in program.kernels)
    counted = f"{len(program.kernels):>8}{moved / 1e9:>9.2f}{flops / 1e12:>9.2f}"
    lines = [f"{program.name:<58}{counted}{1e3 * seconds:>10.2f}{program.communicated / 1e6:>12.2f}"]
    counts, times = Counter[str](), defaultdict[str, float](float)
    for kernel in program.kernels:
        name = f"{kernel.name} {str(kernel.dtype).removeprefix('torch.')} {list(kernel.shapes[:2])}"
        counts[name] += 1
        times[name] += gpu.seconds(kernel)
    longest = sorted(times, key=lambda name: -times[name])[:top]
    lines += [f"    {counts[name]:>5} x {name:<80}{1e3 * times[name]:>8.2f} ms" for name in longest]
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--batch", type=int, default=5120, help="global batch")
    parser.add_argument("--top", type=int, default=0, help="also list this many kernels of each program")
    args = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where torch sees a GPU, it crashes on fake CUDA tensors
    if min(args.ranks, args.batch) < 1:
        parser.error("--ranks and --batch must be at least 1")
    if args.batch % args.ranks:
        parser.error(f"--ranks {args.ranks} does not divide --batch {args.batch}")
    print(f"one of {args.ranks} ranks, {args.batch // args.ranks} of {args.batch} pairs; estimates for an H100")
    print(f"{'':<58}{'kernels':>8}{'GB':>9}{'TFLOP':>9}{'est. ms':>10}{'MB sent':>12}")
    for program in programs(ranks=args.ranks, batch=args.batch):
        print("\n".join(describe(program, top=args.top)))


if __name__ == "__main__":
    main()
