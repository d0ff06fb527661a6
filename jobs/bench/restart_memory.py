"""The AdaGrad accumulator at restarts of NeuCLIP's prototypes: keep it, clear it, or set it to its mean.

    python -m jobs.bench.restart_memory                    # three seeds, restarts every 100 and every 4 steps

Small MLP towers learn hierarchical, long-tailed synthetic pairs, trained with the variant that keeps the accumulator.
All variants see the same features and predict their log-normalizers. The mean squared error against the exact
normalizers over the whole dataset is printed, after the updates on the anchors' own batch (in use) and before them
(cold). `new` clears the slots whose feature was replaced since the last restart.
"""

from __future__ import annotations

import argparse
import math
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.analysis.normalizer_error import exact_log_normalizers
from pipeline.objectives import build_objective
from pipeline.objectives.npn.prototype_network import PrototypeNpn

PAIRS, BATCH, PROTOTYPES, DIM, TAU = 2048, 32, 256, 32, 0.1
VARIANTS = ("keep", "new", "clear", "mean")


def make_pairs(*, inputs: int = 64, latent: int = 32, groups: int = 32, members: int = 16) -> tuple[Tensor, Tensor]:
    """Two noisy nonlinear views of latent vectors whose classes are Zipf-distributed, [n, inputs] each."""
    world, draw = (torch.Generator().manual_seed(seed) for seed in (1234, 7))
    group = F.normalize(torch.randn(groups, latent, generator=world), dim=1)
    member = F.normalize(torch.randn(groups, members, latent, generator=world), dim=2)
    mixing = [torch.randn(2 * latent, inputs, generator=world) / math.sqrt(latent) for _ in range(2)]
    hidden = [torch.randn(latent, 2 * latent, generator=world) for _ in range(2)]
    share = 1 / (torch.arange(groups * members) + 1.0)
    kind = torch.multinomial(share / share.sum(), PAIRS, True, generator=draw)
    kind = torch.randperm(groups * members, generator=world)[kind]
    own = F.normalize(torch.randn(PAIRS, latent, generator=draw), dim=1)
    z = group[kind // members] + 0.8 * member[kind // members, kind % members] + 0.5 * own
    views = [torch.tanh(z @ first) @ second for first, second in zip(hidden, mixing, strict=True)]
    image, text = (view / view.std() + 0.15 * torch.randn(PAIRS, inputs, generator=draw) for view in views)
    return image, text


def treat(npn: PrototypeNpn, variant: str, *, step: int, every: int) -> None:
    """Apply a variant to the accumulator before a step that restarts the prototypes."""
    memory = npn.network.lasting["accumulator"]
    if variant == "clear":
        memory.zero_()
    elif variant == "mean":
        memory.copy_(memory.mean((1, 2), keepdim=True).expand_as(memory))
    elif variant == "new":  # entries of the ring that were written since the last restart, with this step's batch
        entries = torch.arange(step - every + 1, step + 1)[:, None] * BATCH + torch.arange(BATCH)
        memory[:, entries.flatten() % PROTOTYPES] = 0.0


def errors(seed: int, *, every: int, steps: int) -> dict[str, tuple[float, float]]:
    """Mean squared errors (in use, cold) of every variant along one trajectory."""
    pairs = make_pairs()
    torch.manual_seed(seed)
    towers = [nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, DIM)) for _ in range(2)]
    optimizer = torch.optim.AdamW(nn.ModuleList(towers).parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    settings = {
        "name": "neuclip",
        "prototypes": PROTOTYPES,
        "restart_every": every,
        "tau_init": TAU,
        "tau_lr": 0.0,
        "rho": 2.0,
        "drift_check_every": 0,
    }
    objectives = {name: build_objective(settings, dim=DIM, batch_size=BATCH, dataset_size=PAIRS) for name in VARIANTS}
    draw, found = torch.Generator().manual_seed(100 + seed), {name: [] for name in VARIANTS}  # type: ignore[var-annotated]
    tau = torch.full((PAIRS,), TAU)
    for step in range(steps):
        if step % (PAIRS // BATCH) == 0:
            order = torch.randperm(PAIRS, generator=draw)
        ids = order[step * BATCH % PAIRS :][:BATCH]
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        features = [F.normalize(tower(side[ids]), dim=1) for tower, side in zip(towers, pairs, strict=True)]
        if step and step % every == 0:
            for name, objective in objectives.items():
                treat(objective.npn, name, step=step, every=every)  # type: ignore[attr-defined]
        if step >= 100 and step % 16 == 7:
            with torch.no_grad():
                image, text = (F.normalize(tower(side), dim=1) for tower, side in zip(towers, pairs, strict=True))
                exact = [
                    exact_log_normalizers(*sides, tau_b=tau, first=0)[ids] for sides in ((image, text), (text, image))
                ]
            for name, objective in objectives.items():
                seen = objective.log_normalizers(*(f.detach() for f in features), sample_ids=ids)  # type: ignore[attr-defined]
                estimates = (seen.in_use, seen.cold)
                found[name].append(
                    [mean(float((own[s] - exact[s]).square().mean()) for s in (0, 1)) for own in estimates]
                )
        loss = objectives["keep"].loss(*features)
        for name in VARIANTS[1:]:
            objectives[name].compute(*(f.detach() for f in features), sample_ids=ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for objective in objectives.values():
            objective.commit()
    return {name: (mean(v[0] for v in values), mean(v[1] for v in values)) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=640)
    parser.add_argument("--every", type=int, nargs="+", default=[100, 4], help="steps between restarts")
    args = parser.parse_args()
    for every in args.every:
        runs = [errors(seed, every=every, steps=args.steps) for seed in range(args.seeds)]
        for name in VARIANTS:
            in_use, cold = (mean(run[name][i] for run in runs) for i in (0, 1))
            spread = ", ".join(f"{run[name][0]:.3f}" for run in runs)
            print(f"restart every {every:>4}  {name:<6} in use {in_use:.3f} ({spread})  cold {cold:.3f}", flush=True)


if __name__ == "__main__":
    main()
