"""Extra time and memory of a NeuCLIP training step over openclip's, on one device.

    python -m jobs.bench.neuclip_overhead                                    one GPU: ViT-B-16, 5,120 pairs, 8 ranks
    python -m jobs.bench.neuclip_overhead --setting gathered --rounds 10 --npn-compile
    python -m jobs.bench.neuclip_overhead --arch scenes-vit-tiny --batch 64 --ranks 4 --accumulate 4

whole: one device processes the whole global batch, in --accumulate micro-batches with GradCache. gathered: one rank out
of --ranks, as in the paper's setting (local batch 640 of a gathered 5,120), runs the towers on its own pairs and the
objective on all of them. The features of the other ranks are random tensors on the device, so communication is not
measured. `replicated` and `prototypes` are values of `objective.npn_update`: every rank computes the whole update, or
the update of its own prototypes. Memory is a contender's peak, measured on a GPU only.
"""

from __future__ import annotations

import argparse
import functools
import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.harness import Value, alternate, ratios, show
from jobs.bench.train import Contender, Data, bench_trainer, head, make_data, ours, step_parser, take_steps
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.objectives import build_objective


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
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(rows, dim, generator=generator), dim=1).to(device)


def options() -> argparse.ArgumentParser:
    given = step_parser(__doc__, arch="ViT-B-16", batch=5120, rounds=5, steps=2)
    given.add_argument("--setting", choices=("whole", "gathered", "both"), default="both")
    given.add_argument("--ranks", type=int, default=8, help="of which one is measured, with --setting gathered")
    given.add_argument("--npn-compile", action="store_true", help="objective.npn_compile")
    given.set_defaults(accumulate=8, captions="full")
    return given


def gathered(args: argparse.Namespace, data: Data, *, world: World, stack: ExitStack, settings: Sequence[str]) -> Any:
    """`ours` as one of `args.ranks`: the objective sees the batches of all."""
    trainer = stack.enter_context(bench_trainer(args, data, world=world, settings=settings))
    trainer.take_step.objective = build_objective(
        trainer.run.objective,
        dim=data.architecture.dim,
        batch_size=args.batch * args.ranks,
        dataset_size=1_000_000,
        total_steps=trainer.run.total_steps,
        world=OneOfMany(size=args.ranks, device=world.device),
        device=world.device,
    )
    return (lambda steps: take_steps(trainer, steps)), trainer.utilization


def measure(args: argparse.Namespace, *, whole: bool, world: World) -> dict[str, Any]:
    """Build the contenders, run them in turn, and print the table."""
    network = [f"objective.prototypes={args.prototypes or min(4096, args.batch)}", "objective.name=neuclip"]
    network.append(f"objective.npn_compile={str(args.npn_compile).lower()}")
    kinds = {"openclip": ["objective.name=openclip"]}
    for update in ("replicated",) if whole else ("replicated", "prototypes"):
        kinds["neuclip" if whole else update] = [*network, f"objective.npn_update={update}"]
    local = argparse.Namespace(**vars(args))
    if not whole:
        if args.batch % args.ranks:
            raise SystemExit(f"--ranks {args.ranks} does not divide --batch {args.batch}.")
        local.batch, local.accumulate = args.batch // args.ranks, max(1, args.accumulate // args.ranks)
    with ExitStack() as stack:
        data = make_data(local)
        make = functools.partial(ours if whole else gathered, local, data, world=world, stack=stack)
        built = {
            kind: Contender(functools.partial(make, settings=settings), device=world.device)
            for kind, settings in kinds.items()
        }
        takes = {kind: functools.partial(one.take, args.steps, threads=args.threads) for kind, one in built.items()}
        rounds_taken = alternate(takes, rounds=args.rounds)
    times = {kind: [taken for taken, _ in rounds] for kind, rounds in rounds_taken.items()}
    peaks = {kind: max(peak for _, peak in rounds) for kind, rounds in rounds_taken.items()}
    rows = dict[str, tuple[Value, ...]]()
    for kind in kinds:
        extra = (ratio - 1 for ratio in ratios(times[kind], times["openclip"]))
        rows[kind] = (1e3 * median(times[kind]), *extra, peaks[kind] or None)
    columns = {"ms/step": ".1f", "extra time": "+.2%", "lowest": "+.2%", "highest": "+.2%", "peak GiB": ".2f"}
    what = "" if whole else f" of a gathered {args.batch}"
    return show(f"{head(local, world.device)}{what}, {network[0]}", columns, rows, output=args.json)


def main() -> None:
    args = options().parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning)
    with start_world(device=args.device) as world:
        for setting in ("whole", "gathered") if args.setting == "both" else (args.setting,):
            measure(args, whole=setting == "whole", world=world)


if __name__ == "__main__":
    main()
