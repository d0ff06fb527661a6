"""Losses of our training step and of open_clip_train's, step by step: from the same weights, on the same batches.

    python -m jobs.bench.losses --arch ViT-B-32 --batch 256 --device cuda
    python -m jobs.bench.losses --arch scenes-vit-tiny --batch 16 --steps 20 --precision fp32 --device cpu

Both train with AdamW at a constant learning rate, the temperature included. In fp32 the losses agree to a few digits
for dozens of steps; in bf16 both round differently and drift apart, so that means over 50 steps are compared. Exit code
1: the means of the last 50 steps differ by more than --tolerance.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from jobs.bench.harness import make_data, show
from jobs.bench.train import OPTIMIZER, head, open_clip_train, ours, step_parser
from pipeline.distributed.start import start_world

LR_SCALE = 0.2
PART = 50


def losses(args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Losses of every step: open_clip_train's and ours."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    with start_world(device=args.device) as world:
        data = [make_data(args, seed=number) for number in range(args.batches)]
        open_clip_train(args, *data, device=world.device, lr_scale=LR_SCALE, losses=found[0])(args.steps)
        torch.cuda.empty_cache()
        temperature: dict[str, Any] = {
            "tau_init": 0.07, "tau_lr": OPTIMIZER.lr * LR_SCALE, "tau_beta1": OPTIMIZER.betas[0],
            "tau_beta2": OPTIMIZER.betas[1], "tau_eps": OPTIMIZER.eps,
        }  # fmt: skip
        run = ours(args, *data, objective="openclip", world=world, lr_scale=LR_SCALE, losses=found[1], **temperature)
        run(args.steps)
        theirs, own = ([float(loss.detach()) for loss in side] for side in found)
    return theirs, own


def main() -> int:
    given = step_parser(__doc__, arch="ViT-B-32", batch=256, rounds=1, steps=500)
    given.add_argument("--batches", type=int, default=10, help="different batches, which are shown in turn")
    given.add_argument("--tolerance", type=float, default=0.02, help="relative difference of means")
    args = given.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", category=UserWarning)
    theirs, own = losses(args)
    rows, relative = {}, 0.0
    for first in range(0, args.steps, PART):
        a, b = theirs[first : first + PART], own[first : first + PART]
        relative = fmean(b) / fmean(a) - 1
        largest = max(abs(x - y) for x, y in zip(a, b, strict=True))
        rows[f"{first}-{first + len(a) - 1}"] = (fmean(a), fmean(b), relative, largest)
    columns = {"open_clip_train": ".4f", "ours": ".4f", "difference": "+.2%", "largest": ".4f"}
    device = torch.device("cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu")
    show(f"{head(args, device)}: mean loss of the steps", columns, rows, output=args.json)
    return int(abs(relative) > args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
