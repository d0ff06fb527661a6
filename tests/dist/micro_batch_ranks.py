"""A run of `engine.micro_batch=auto` on ranks of which only the last has memory for two samples at a time."""

from __future__ import annotations

import os
import sys

import torch

from pipeline.distributed.world import leave
from pipeline.model.towers import Towers
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train

ROWS: list[int] = []
"""Rows of every forward pass that was tried."""


def limited(rows):
    """`Towers.forward` on a device with memory for as many rows."""
    forward = Towers.forward

    def run(self, image, text):
        ROWS.append(len(image))
        if len(image) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, image, text)

    return run


if __name__ == "__main__":
    torch.set_num_threads(1)
    if os.environ["RANK"] == "1":
        Towers.forward = limited(2)
    leave(train(load_recipe(None, sys.argv[1:])))
