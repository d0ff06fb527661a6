"""Synthetic batches of the benchmarks: random pixels, and captions with the lengths of web captions."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.model.towers import ModelConfig, build_towers

SEED = 0
WORDS = (
    "a dog cat man tree house red blue green car boat sun moon sea sky hill road bird fish horse cup book hat door old "
    "new big small two three on in under near with and the of at by"
)
"""One token each."""
CAPTIONS = {"cc3m": (10.3, 4.5), "cc12m": (20.2, 16.3), "datacomp": (10.2, 7.0)}
"""Mean and standard deviation of a caption's length, in words, quoted from memory. CC3M and CC12M: Changpinyo et al.
2021 (arXiv 2102.08981), table 1. DataComp-1B, of whose pool DFN is a selection: the mean is in Li et al. 2024
(2406.08478), the deviation is an assumption: its ratio to the mean is between those of the other two."""
TOKENS_PER_WORD = 1.3
"""Assumed for CLIP's tokenizer, which adds a start and an end token."""


@dataclass(frozen=True)
class Data:
    """One global batch: uint8 pixels [B, 3, S, S] and tokens [B, L], on the host."""

    pixels: Tensor
    text: Tensor
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def make_data(args: argparse.Namespace, *, seed: int = SEED) -> Data:
    """Random pixels and captions, as long as `args` says, from a fixed seed."""
    config = ModelConfig(arch=args.arch, image_size=args.image_size)
    _, architecture = build_towers(config, seed=SEED, device="meta")
    generator = torch.Generator().manual_seed(seed)
    size = architecture.image_size
    pixels = torch.randint(0, 256, (args.batch, 3, size, size), generator=generator, dtype=torch.uint8)
    mean, spread = caption_lengths(args.captions) if args.captions else (args.caption_tokens, 0.6)
    text = architecture.tokenize(captions(args.batch, generator=generator, mean=mean, spread=spread))
    return Data(pinned(pixels), pinned(text), architecture.mean, architecture.std)


def caption_lengths(name: str) -> tuple[float, float]:
    """Mean length of a dataset's captions in tokens, and the standard deviation of its logarithm."""
    mean, deviation = (TOKENS_PER_WORD * value for value in CAPTIONS[name])
    return 2 + mean, math.sqrt(math.log1p((deviation / (2 + mean)) ** 2))


def captions(count: int, *, generator: torch.Generator, mean: float, spread: float) -> list[str]:
    """Random words. Lengths are log-normal, as those of web captions are.

    With a mean of 28 tokens, as in CC12M, and a spread of 0.6, 3% are as long as the context of 77: nearly every batch
    of 256 has one that is not trimmed.
    """
    normal = torch.randn(count, generator=generator)
    lengths = torch.exp(math.log(mean) - spread**2 / 2 + spread * normal).round().clamp(3, 100).int().tolist()
    known = WORDS.split()
    words = [torch.randint(0, len(known), (max(1, length - 2),), generator=generator).tolist() for length in lengths]
    return [" ".join(known[index] for index in indices) for indices in words]  # and the start and end tokens


def pinned(x: Tensor) -> Tensor:
    """The tensor in pinned memory if there is a GPU, as from a data loader."""
    return x.pin_memory() if torch.cuda.is_available() else x
