"""Extra time and memory of a NeuCLIP training step over openclip's, on one device.

    python -m jobs.bench.neuclip_overhead                                    one GPU: ViT-B-16, 5,120 pairs, 8 ranks
    python -m jobs.bench.neuclip_overhead --setting gathered --rounds 10 --npn-compile
    python -m jobs.bench.neuclip_overhead --arch scenes-vit-tiny --batch 64 --ranks 4 --prototypes 64 --micro-batch 16

whole: one device processes the whole global batch in micro-batches with GradCache. gathered: one rank out of `--ranks`,
as in the paper's setting (local batch 640 of a gathered 5,120), runs the towers on its own pairs and the objective on
all of them. The features of the other ranks are random tensors on the device, so communication is not measured.
`replicated`, `prototypes` and `sharded` are values of `objective.npn_update`: every rank computes the whole update,
the update of its own prototypes, or the gradient of its own anchors. For the last two, the sizes of the all-reduces
they need are printed.

The contenders take turns in rounds; a ratio is the median of the per-round ratios. Time is wall time on a GPU and CPU
time on a CPU. Memory is a contender's peak, measured on a GPU only.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import statistics
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.train import DATASET, OPTIMIZER, SEED, Data, Rounds, make_data, prototypes_of, seconds
from pipeline.data.loading.decode import normalize
from pipeline.distributed.world import World, start_world
from pipeline.engine.deepspeed_engine import DeepSpeedEngine
from pipeline.engine.engine_config import EngineConfig
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.objectives import build_objective
from pipeline.training.step import TrainStep, micro_batches
from pipeline.versions import versions


@dataclass(frozen=True)
class OneOfMany(World):
    """A world whose other ranks are simulated: gathers return random features and copies of this rank's scalars."""

    def all_gather(self, x_b: Tensor) -> Tensor:
        x_b = x_b.detach()
        if x_b.dim() < 2 or x_b.shape[1] < 16:  # per-anchor scalars
            return x_b.repeat(self.size, *[1] * (x_b.dim() - 1))
        others = _stand_ins(x_b.shape[0] * (self.size - 1), x_b.shape[1], str(x_b.device)).to(x_b.dtype)
        return torch.cat([x_b, others])

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        return x.detach().clone()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def barrier(self) -> None:
        pass


@functools.cache
def _stand_ins(rows: int, dim: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1).to(device)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=("whole", "gathered", "both"), default="both")
    parser.add_argument("--arch", default="ViT-B-16")
    parser.add_argument("--image-size", type=int, help="pixels, for a smaller test of the same architecture")
    parser.add_argument("--batch", type=int, default=5120, help="global batch")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=640, help="samples per forward and backward pass")
    parser.add_argument("--prototypes", type=int, help="prototypes of the network [4096, or the batch size if smaller]")
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--npn-compile", action="store_true", help="objective.npn_compile")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--steps", type=int, default=2, help="steps per contender and round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one warm-up round")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.set_defaults(patch_dropout=None)
    args = parser.parse_args()
    args.prototypes = prototypes_of(args, parser)
    local = args.batch // args.ranks
    if args.batch % args.ranks or args.batch % args.micro_batch or local % min(local, args.micro_batch):
        parser.error(f"--ranks {args.ranks} and --micro-batch {args.micro_batch} must divide --batch {args.batch}")
    return args


def contender(args: argparse.Namespace, data: Data, *, kind: str, ranks: int, world: World) -> Rounds:
    """Full training steps of one rank: towers on its part of the batch, the objective `kind` on the whole batch."""
    towers, architecture = build_towers(ModelConfig(arch=args.arch, image_size=args.image_size), seed=SEED)
    local = args.batch // ranks
    micro = min(args.micro_batch, local)
    settings = {"name": "openclip"}
    if kind != "openclip":
        settings = {"name": "neuclip", "prototypes": args.prototypes, "inner_steps": args.inner_steps}
        settings["npn_compile"] = args.npn_compile
        settings["npn_update"] = "replicated" if kind == "neuclip" else kind
    method = build_objective(
        settings,
        dim=architecture.dim,
        batch_size=args.batch,
        dataset_size=DATASET,
        total_steps=10**6,
        world=OneOfMany(size=ranks, device=world.device) if ranks > 1 else world,
        device=world.device,
    )
    engine = DeepSpeedEngine(
        towers.to(world.device),
        config=EngineConfig(deepspeed=f"zero2_{args.precision}", micro_batch=micro),
        optimizer=OPTIMIZER,
        world=world,
        global_batch=local,
    )
    engine.train()
    take_step = TrainStep(engine, method, world=world, seed=SEED, chunks=micro_batches(local, micro))
    ids, taken = torch.arange(local, device=world.device), 0

    def run(steps: int) -> None:
        nonlocal taken
        for _ in range(steps):
            pixels = data.pixels[:local].to(world.device, non_blocking=True)
            text = data.text[:local].to(world.device, non_blocking=True)
            image = normalize(
                pixels, mean=data.mean, std=data.std, dtype=engine.dtype, memory_format=towers.image_format
            )
            result = take_step((image, text), sample_ids=ids, step=taken, lr_scale=1e-3)
            assert result.applied
            taken += 1

    return run


def measure(args: argparse.Namespace, *, kinds: tuple[str, ...], ranks: int, world: World) -> None:
    """Build the contenders, run them in turn, and print the table."""
    cuda = world.device.type == "cuda"
    allocated = torch.cuda.memory_allocated if cuda else lambda: 0
    data = make_data(args)
    runs: dict[str, Rounds] = {}
    own: dict[str, int] = {}
    if cuda:  # let libraries allocate their permanent buffers before the first contender is measured
        contender(args, data, kind=kinds[0], ranks=ranks, world=world)(1)
        gc.collect()
        torch.cuda.empty_cache()
    for kind in kinds:
        before = allocated()
        runs[kind] = contender(args, data, kind=kind, ranks=ranks, world=world)
        runs[kind](1)
        own[kind] = allocated() - before
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    peaks = dict.fromkeys(kinds, 0)
    for number in range(args.rounds + 1):
        turn = number % len(kinds)
        for kind in kinds[turn:] + kinds[:turn]:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            others = allocated() - own[kind]
            taken = seconds(runs[kind], args.steps, world.device, threads=args.threads)
            if number:
                times[kind].append(taken / args.steps)
                peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated() - others if cuda else 0)
    local = args.batch // ranks
    what = f"whole batch of {args.batch}" if ranks == 1 else f"local batch {local} of a gathered {args.batch}"
    print(f"\n{what}, {args.prototypes} prototypes, {args.inner_steps} inner steps, micro-batch {args.micro_batch}")
    base, *others_ = kinds
    peak = f", peak {peaks[base] / 2**30:.2f} GiB" if cuda else ""
    print(f"openclip {1e3 * statistics.median(times[base]):.1f} ms/step{peak}")
    for kind in others_:
        extra = [b / a - 1 for a, b in zip(times[base], times[kind], strict=True)]
        memory = f"  memory {peaks[kind] / peaks[base] - 1:+.2%}" if cuda else ""
        print(
            f"{kind:<12}{1e3 * statistics.median(times[kind]):>8.1f} ms/step{memory}  lowest {min(extra):+.2%}  "
            f"highest {max(extra):+.2%}  extra time {statistics.median(extra):+.2%}"
        )
    if "sharded" in kinds:
        _, architecture = build_towers(ModelConfig(arch=args.arch), seed=SEED, device="meta")
        size = 2 * args.inner_steps * args.prototypes * architecture.dim * 4
        sums = 2 * (args.inner_steps + 1) * args.batch * 8
        print(
            f"in every step the ranks would also add up: sharded {size / 2**20:,.1f} MiB of gradients (fp32), "
            f"prototypes {sums / 2**20:,.2f} MiB of the anchors' sums (fp64)"
        )


def main() -> None:
    args = parse_arguments()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", category=UserWarning)
    with start_world(device=args.device) as world:
        cuda = world.device.type == "cuda"
        where = torch.cuda.get_device_name(world.device) if cuda else f"CPU, {args.threads} threads"
        packages = ", ".join(f"{name} {version}" for name, version in versions(("torch", "deepspeed")).items())
        print(f"{args.arch}, {args.precision}, ZeRO-2, {where}; {packages}")
        if args.setting in ("whole", "both"):
            measure(args, kinds=("openclip", "neuclip"), ranks=1, world=world)
        if args.setting in ("gathered", "both"):
            measure(args, kinds=("openclip", "replicated", "prototypes", "sharded"), ranks=args.ranks, world=world)


if __name__ == "__main__":
    main()
