"""Extra time and memory of a NeuCLIP training step over openclip's, on one device.

    python -m jobs.bench.neuclip_overhead                                    one GPU: ViT-B-16, 5,120 pairs, 8 ranks
    python -m jobs.bench.neuclip_overhead --setting gathered --rounds 10 --npn-compile
    python -m jobs.bench.neuclip_overhead --arch scenes-vit-tiny --batch 64 --ranks 4 --prototypes 64 --micro-batch 16

whole: one device processes the whole global batch in micro-batches with GradCache. gathered: one rank out of `--ranks`,
as in the paper's setting (local batch 640 of a gathered 5,120), runs the towers on its own pairs and the objective on
all of them. The features of the other ranks are random tensors on the device, so communication is not measured.
`replicated` and `prototypes` are values of `objective.npn_update`: every rank computes the whole update, or the update
of its own prototypes. For the latter, the size of its all-reduces is printed.

Texts are whole. Memory is a contender's peak, measured on a GPU only.
"""

from __future__ import annotations

import argparse
import functools
import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.harness import SEED, Value, alternate, make_data, ratios, seconds, show
from jobs.bench.train import Rounds, head, ours, prototypes_of, step_parser
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World


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
    found = step_parser(__doc__, arch="ViT-B-16", batch=5120, rounds=5, steps=2)
    found.add_argument("--setting", choices=("whole", "gathered", "both"), default="both")
    found.add_argument("--ranks", type=int, default=8)
    found.add_argument("--micro-batch", type=int, default=640, help="samples per forward and backward pass")
    found.add_argument("--prototypes", type=int, help="prototypes of the network [4096, or the batch size if smaller]")
    found.add_argument("--inner-steps", type=int, default=10)
    found.add_argument("--npn-compile", action="store_true", help="objective.npn_compile")
    found.set_defaults(trim_text=False)
    args = found.parse_args()
    args.prototypes = prototypes_of(args, found)
    local = args.batch // args.ranks
    if args.batch % args.ranks or args.batch % args.micro_batch or local % min(local, args.micro_batch):
        found.error(f"--ranks {args.ranks} and --micro-batch {args.micro_batch} must divide --batch {args.batch}")
    return args


def contender(args: argparse.Namespace, *, kind: str, ranks: int, world: World) -> Rounds:
    """Full training steps of one rank: towers on its part of the batch, the objective `kind` on the whole batch."""
    local = args.batch // ranks
    own = argparse.Namespace(**{**vars(args), "batch": local, "accumulate": local // min(args.micro_batch, local)})
    seen = OneOfMany(size=ranks, device=world.device) if ranks > 1 else None
    if kind == "openclip":
        return ours(own, make_data(own), objective=kind, world=world, seen=seen)
    update = "replicated" if kind == "neuclip" else kind
    settings = {"npn_update": update, "npn_compile": args.npn_compile}
    return ours(own, make_data(own), objective="neuclip", world=world, seen=seen, **settings)


def measure(args: argparse.Namespace, *, kinds: tuple[str, ...], ranks: int, world: World) -> None:
    """Build the contenders, run them in turn, and print the table."""
    cuda = world.device.type == "cuda"
    allocated = torch.cuda.memory_allocated if cuda else lambda: 0
    if cuda:  # let libraries allocate their permanent buffers before the first contender is measured
        contender(args, kind=kinds[0], ranks=ranks, world=world)(1)
        gc.collect()
        torch.cuda.empty_cache()

    def built(kind: str) -> Callable[[], tuple[float, int]]:
        before = allocated()
        run = contender(args, kind=kind, ranks=ranks, world=world)
        run(1)
        own = allocated() - before

        def take() -> tuple[float, int]:
            """Seconds per step, and the peak of the memory without that of the other contenders."""
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            others = allocated() - own
            taken = seconds(functools.partial(run, args.steps), device=world.device, threads=args.threads)
            return taken / args.steps, torch.cuda.max_memory_allocated() - others if cuda else 0

        return take

    found = alternate({kind: built(kind) for kind in kinds}, rounds=args.rounds)
    times = {kind: [taken for taken, _ in rounds] for kind, rounds in found.items()}
    peaks = {kind: max(peak for _, peak in rounds) / 2**30 for kind, rounds in found.items()}
    base, rows = kinds[0], dict[str, tuple[Value, ...]]()
    for kind in kinds:
        extra = (ratio - 1 for ratio in ratios(times[kind], times[base]))
        memory = (peaks[kind], peaks[kind] / peaks[base] - 1) if cuda else (None, None)
        rows[kind] = (1e3 * median(times[kind]), *extra, *memory)
    what = f"whole batch of {args.batch}" if ranks == 1 else f"local batch {args.batch // ranks} of {args.batch}"
    columns = {"ms/step": ".1f", "extra time": "+.2%", "lowest": "+.2%", "highest": "+.2%"}
    columns |= {"peak GiB": ".2f", "extra memory": "+.2%"}
    what += f", {args.prototypes} prototypes, {args.inner_steps} inner steps, micro-batch {args.micro_batch}"
    show(f"{head(args, world.device)}; {what}", columns, rows, output=args.json)
    if "prototypes" in kinds:
        sums = 2 * (args.inner_steps + 1) * args.batch * 8
        print(f"prototypes: in every step the ranks would also add up {sums / 2**20:,.2f} MiB of sums (fp64)")


def main() -> None:
    args = parse_arguments()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", category=UserWarning)
    with start_world(device=args.device) as world:
        if args.setting in ("whole", "both"):
            measure(args, kinds=("openclip", "neuclip"), ranks=1, world=world)
        if args.setting in ("gathered", "both"):
            measure(args, kinds=("openclip", "replicated", "prototypes"), ranks=args.ranks, world=world)


if __name__ == "__main__":
    main()
