"""Time of the normalizer network's inner updates against autograd and against its GEMMs alone, interleaved.

    python -m jobs.bench.npn                      # B = 512 and 5,120, d = 512, m = 4,096, T_u = 10, both networks
    python -m jobs.bench.npn --batch 512 --rounds 5 --threads 1

Each round runs, for each batch size, in turn: autograd with torch.optim.Adagrad in fp32; the closed form in fp32, with
bf16 matmuls, and with `npn_compile` on top; and the two matmuls of an update alone, in fp32 and in bf16. The wall time
of small sizes on a GPU is launch time. The least time over the rounds is printed, too, because other processes only
ever add time. Set OMP_WAIT_POLICY=passive on a shared machine; otherwise spinning threads count as CPU time. The last
line compares the cost of bf16 matmuls without `npn_compile`
(mean squared difference of alpha) with the error of alpha itself.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from jobs.bench.harness import alternate, parser, place, ratios, seconds, show
from pipeline.objectives.npn import prototypes
from pipeline.objectives.npn.kernels import COMPILED, FUSED, Passes
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.pairwise import Workspace
from pipeline.objectives.parts import AdaGrad

LR, EPS, TAU = 0.01, 1e-14, 0.03


def make_problem(batch: int, dim: int, m: int, *, device: torch.device) -> tuple[list[Anchors], Tensor]:
    """Anchors of both sides of a batch of clustered pairs, and [2, m, d] prototypes drawn from the same clusters."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(64, dim, generator=generator)

    def pairs(count: int) -> tuple[Tensor, Tensor]:
        base = centres[torch.randint(64, (count,), generator=generator)]
        own = base + torch.randn(count, dim, generator=generator)
        sides = [F.normalize(own + 0.7 * torch.randn(count, dim, generator=generator), dim=1) for _ in range(2)]
        return sides[0].to(device), sides[1].to(device)

    image, text = pairs(batch)
    positive, tau = (image * text).sum(1), torch.tensor(TAU, device=device)
    anchors = []
    for own, other in ((image, text), (text, image)):
        h = ((own @ other.T) - positive[:, None]) / tau
        h.fill_diagonal_(-math.inf)
        log_g = h.logsumexp(1) - math.log(batch - 1)
        anchors.append(Anchors(own, positive, log_g, tau, math.log(EPS)))
    others = pairs(m)
    return anchors, torch.stack([others[1], others[0]])


def closed_form(
    anchors: list[Anchors], weight: Tensor, *, steps: int, workspace: Workspace, passes: Passes = FUSED
) -> Tensor:
    weight = workspace.take("bench_weight", tuple(weight.shape), like=weight).copy_(weight)
    memory = workspace.take("bench_memory", tuple(weight.shape), like=weight).zero_()
    optimizer = AdaGrad(LR)
    for side in (0, 1):
        slots, updated = {"accumulator": memory[side]}, weight[side]
        dtype = None if anchors[side].low is None else torch.bfloat16
        at = passes.prepare(updated, anchors[side].tau, space=workspace, dtype=dtype)
        for step in range(steps):
            gradient, _ = prototypes.unit_gradient(
                anchors[side], at, objective="unified", workspace=workspace, passes=passes
            )
            at = passes.descend(gradient, slots, optimizer=optimizer, number=step + 1, space=workspace)
        updated.copy_(at.weight)  # nothing to do if it was updated in place
    return weight


def autograd(anchors: list[Anchors], weight: Tensor, *, steps: int) -> Tensor:
    updated = []
    for side, start in zip(anchors, weight, strict=True):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.Adagrad([parameter], lr=LR)
        for _ in range(steps):
            optimizer.zero_grad()
            z = (side.features @ F.normalize(parameter, dim=1).T - side.positive[:, None]) / side.tau
            log_mean = z.logsumexp(1) - math.log(len(parameter))
            alpha = torch.logaddexp(log_mean, log_mean.new_full((), side.log_eps))
            (side.tau * (torch.exp(side.log_target - alpha) + alpha).mean()).backward()
            optimizer.step()
        updated.append(parameter.detach())
    return torch.stack(updated)


def gemms(anchors: list[Anchors], weight: Tensor, *, steps: int, dtype: torch.dtype) -> None:
    for side, start in zip(anchors, weight, strict=True):
        features, prototype = side.features.to(dtype), start.to(dtype)
        z = torch.empty(len(features), len(prototype), dtype=dtype, device=features.device)
        gradient = torch.empty_like(prototype)
        for _ in range(steps):
            if features.is_cuda:  # with fp32 results, as in the network
                torch.mm(features, prototype.T, out_dtype=torch.float32)
                torch.mm(z.T, features, out_dtype=torch.float32)
            else:
                torch.mm(features, prototype.T, out=z)
                torch.mm(z.T, features, out=gradient)


def report(batch: int, arguments: argparse.Namespace, device: torch.device) -> None:
    dim, m, steps = arguments.dim, arguments.prototypes, arguments.steps
    anchors, weight = make_problem(batch, dim, m, device=device)
    low = [Anchors(*(a.features, a.positive, a.log_target, a.tau, a.log_eps, a.features.bfloat16())) for a in anchors]
    variants = {"fp32": (anchors, FUSED), "bf16": (low, FUSED), "bf16 compiled": (low, COMPILED)}
    calls: dict[str, Callable[[], object]] = {"autograd fp32": lambda: autograd(anchors, weight, steps=steps)}
    for name, (sides, passes) in variants.items():
        calls[f"closed {name}"] = functools.partial(
            closed_form, sides, weight, steps=steps, workspace=Workspace(), passes=passes
        )
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        calls[f"GEMMs {name}"] = functools.partial(gemms, anchors, weight, steps=steps, dtype=dtype)
    timed = {name: functools.partial(seconds, call, device=device) for name, call in calls.items()}
    times = alternate(timed, rounds=arguments.rounds)
    rows = {
        name: (
            1e3 * min(found),
            1e3 * median(found),
            *ratios(times["autograd fp32"], found),
            ratios(found, times["GEMMs bf16" if "bf16" in name else "GEMMs fp32"])[0],
        )
        for name, found in times.items()
    }
    columns = {"least ms": ".2f", "median": ".2f", "autograd / it": ".2f", "lowest": ".2f", "highest": ".2f"}
    what = f"B = {batch}, d = {dim}, m = {m}, {steps} updates of both networks"
    columns |= {"it / GEMMs": ".2f"}
    show(f"{what}, {place(device, arguments.threads)}", columns, rows, output=arguments.json)
    full = closed_form(anchors, weight, steps=steps, workspace=Workspace())
    rounded = closed_form(low, weight, steps=steps, workspace=Workspace())
    alpha, other = (
        prototypes.log_normalizer(anchors[0], FUSED.prepare(weight[0], anchors[0].tau, space=Workspace()))
        for weight in (full, rounded)
    )
    cost = (other - alpha).square().mean()
    own = (alpha - anchors[0].log_target).square().mean()
    print(f"alpha: bf16 GEMMs cost {cost:.1e} of MSE; its own error is {own:.1e}")


def main() -> None:
    given = parser(__doc__, rounds=3)
    given.add_argument("--batch", type=int, nargs="+", default=[512, 5120])
    given.add_argument("--dim", type=int, default=512)
    given.add_argument("--prototypes", type=int, default=4096)
    given.add_argument("--steps", type=int, default=10)
    arguments = given.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for batch in arguments.batch:
        report(batch, arguments, device)


if __name__ == "__main__":
    main()
