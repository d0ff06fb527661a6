"""The training benchmark's contenders and texts; `test_bench_gpu.py` runs it at a small size."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch

from jobs.bench import train
from jobs.bench.train import COMPILED, THEIRS
from pipeline.distributed.world import World
from pipeline.model.towers import ModelConfig, build_towers

NO_DATA: Any = None
"""Contenders are named before they are built."""


@pytest.mark.parametrize(
    ("device", "words", "expected"),
    [
        ("cpu", [], [THEIRS, "ours, openclip", "ours, neuclip"]),
        ("cpu", ["--torchcompile"], [THEIRS, COMPILED, "ours, openclip", "ours, neuclip"]),
        ("cuda", ["--objectives", "siglip"], [THEIRS, COMPILED, "ours, siglip"]),
        ("cuda", ["--no-torchcompile", "--variant", "a=1 b=2"],
         [THEIRS, "ours, openclip", "ours, neuclip", "ours, openclip, a=1, b=2"]),
        ("cuda", ["--ranks", "2", "--objectives", "openclip", "--variant", "objective.name=neuclip objective.rho=3"],
         ["ours, openclip", "ours, neuclip, objective.rho=3"]),
    ],
)  # fmt: skip
def test_open_clip_is_compiled_on_gpus_and_where_it_is_asked_for(device, words, expected):
    args = train.options().parse_args(words)
    with ExitStack() as stack:
        assert list(train.contenders(args, NO_DATA, world=World(device=torch.device(device)), stack=stack)) == expected


def test_texts_have_the_lengths_of_web_captions_or_the_full_one():
    tokenize = build_towers(ModelConfig(arch="ViT-B-32"), seed=0, device="meta")[1].tokenize
    for name, (low, high) in {"cc12m": (25, 31), "full": (77, 77)}.items():
        generator = torch.Generator().manual_seed(0)
        first, second = (tokenize(train.captions(name, 1024, generator)) for _ in range(2))
        assert low <= (first.argmax(1) + 1).float().mean() <= high, name
        assert not torch.equal(first, second)
