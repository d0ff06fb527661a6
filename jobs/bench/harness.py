"""What the benchmarks share: options, contenders that take turns, ratios within rounds, tables and JSON.

Other programs use the machine, too, so contenders alternate in rounds and are compared within a round. Time is wall
time on a GPU; on a CPU it is the CPU time of the process, which other load hardly changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from jobs.cli import use_expandable_segments
from pipeline.versions import versions

T = TypeVar("T")
Value = float | str | None


def parser(about: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: --rounds, --threads and --json."""
    use_expandable_segments()  # as in training
    given = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--rounds", type=int, default=rounds, help="measured rounds, after one warm-up round")
    given.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of every contender")
    given.add_argument("--json", type=Path, metavar="FILE", help="append every table to this file, one JSON a line")
    return given


def alternate(contenders: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """What each contender returns in every round after a warm-up round.

    Rounds begin with another contender each, so that none always runs after the same one.
    """
    names = list(contenders)
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds + 1):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = contenders[name]()
            if number:
                results[name].append(result)
    return results


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
    quotients = [one / other for one, other in zip(values, others, strict=True)]
    return median(quotients), min(quotients), max(quotients)


def show(
    head: str, columns: Mapping[str, str], rows: Mapping[str, Sequence[Value]], *, output: Path | None = None
) -> dict[str, Any]:
    """Print a table, append it to the file `output`, and return its head, and its values by row and column.

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
    table = {"head": head, "rows": {n: dict(zip(columns, values, strict=True)) for n, values in rows.items()}}
    if output:
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"command": sys.argv, "versions": versions(), **table}) + "\n")
    return table


def place(device: torch.device, threads: int) -> str:
    """The name of the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} threads"
