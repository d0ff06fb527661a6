"""What the benchmarks share: options, contenders that take turns, ratios within rounds, tables, JSON, and batches.

Other programs use the machine, too, so contenders alternate in rounds and are compared within a round. Time is wall
time on a GPU; on a CPU it is the CPU time of the process, which other load hardly changes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from jobs.cli import use_expandable_segments
from pipeline.versions import versions

T = TypeVar("T")
Value = float | str | None
SEED = 0
WORDS = (
    "a dog cat man tree house red blue green car boat sun moon sea sky hill road bird fish horse cup book hat door old "
    "new big small two three on in under near with and the of at by"
)
"""One token each."""
CAPTIONS = {"cc3m": (10.3, 4.5), "cc12m": (20.2, 16.3), "datacomp": (10.2, 7.0)}
"""Mean and standard deviation of a caption's length, in words. **Not checked**: quoted from memory, because the papers
could not be looked up. CC3M and CC12M: Changpinyo et al. 2021 (arXiv 2102.08981), table 1. DataComp-1B, of whose pool
DFN is a selection: the mean is in Li et al. 2024 (2406.08478; "about ten" in a summary, paperium.net/article/en/9921),
the deviation is an assumption: its ratio to the mean is between those of the other two."""
TOKENS_PER_WORD = 1.3
"""Assumed for CLIP's tokenizer, which adds a start and an end token."""


def parser(about: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: --rounds, --threads and --json."""
    use_expandable_segments()  # as in training
    found = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--rounds", type=int, default=rounds, help="measured rounds, after one warm-up round")
    found.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of every contender")
    found.add_argument("--json", type=Path, metavar="FILE", help="append every table to this file, one JSON a line")
    return found


def alternate(contenders: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """What each contender returns in every round after a warm-up round.

    Rounds begin with another contender each, so that none always runs after the same one.
    """
    names = list(contenders)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = contenders[name]()
            if number:
                found[name].append(result)
    return found


def seconds(run: Callable[[], object], *, device: torch.device | None = None, threads: int | None = None) -> float:
    """Seconds that `run` takes until the device is done: wall time on a GPU, CPU time of all threads on a CPU.

    Waiting threads may spin, so every contender gets the same number of `threads` and must not change it.
    """
    threads = threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    if device is None or device.type == "cpu":
        start = time.process_time()
        run()
        taken = time.process_time() - start
        assert torch.get_num_threads() == threads, "a contender changed its number of threads"
        return taken
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ratios(values: Sequence[float], others: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest and highest of values / others within the rounds."""
    found = [one / other for one, other in zip(values, others, strict=True)]
    return median(found), min(found), max(found)


def show(head: str, columns: Mapping[str, str], rows: Mapping[str, Sequence[Value]], *, output: Path | None) -> None:
    """Print a table, and append it to the file `output`.

    Args:
        head: Its first line: what was measured, and where.
        columns: Format specifications of the values by title.
        rows: Values by the name of the row; None prints as "?".
        output: The file of `--json`.
    """
    wide = max(map(len, rows)) + 2
    widths = [max(len(title), 7) + 2 for title in columns]
    print(f"\n{head}\n" + " " * wide + "".join(f"{title:>{w}}" for title, w in zip(columns, widths, strict=True)))
    for name, values in rows.items():
        cells = ["?" if v is None else v if isinstance(v, str) else format(v, form)
                 for v, form in zip(values, columns.values(), strict=True)]  # fmt: skip
        print(f"{name:<{wide}}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)), flush=True)
    if output:
        named = {name: dict(zip(columns, values, strict=True)) for name, values in rows.items()}
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"command": sys.argv, "versions": versions(), "head": head, "rows": named}) + "\n")


def place(device: torch.device, threads: int) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} threads"


@dataclass(frozen=True)
class Data:
    """One global batch: uint8 pixels [B, 3, S, S] and tokens [B, L], on the host."""

    pixels: Tensor
    text: Tensor
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def make_data(args: argparse.Namespace, *, seed: int = SEED) -> Data:
    """Random pixels and captions, as long as `args` says, from a fixed seed."""
    from pipeline.model.towers import ModelConfig, build_towers

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
