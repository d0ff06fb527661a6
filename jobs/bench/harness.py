"""What the benchmarks share: options, contenders that take turns, ratios within rounds, tables and traces.

Other programs use the machine, too, so contenders alternate in rounds and are compared within a round. Time is wall
time on a GPU; on a CPU it is the CPU time of the process, which other load hardly changes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from jobs.cli import use_expandable_segments

T = TypeVar("T")
Value = float | str | None
KINDS = {
    "compiled": r"^triton",  # names list the operators that a kernel fuses
    "attention": r"flash|fmha|sdpa|attention",
    "convolutions": r"conv|wgrad|dgrad|fprop|nchwToNhwc|nhwcToNchw",
    "products": r"gemm|nvjet|cutlass|cublas|splitK|gemv|tensorop",
    "layer norms": r"layer_?norm|GammaBeta",
    "optimizer": r"multi_tensor|adam",
    "casts and copies": r"copy|CatArray|LoadWithCast",
    "GELU": r"gelu",
    "reductions": r"reduce|softmax|logsumexp",
    "other elementwise": r"elementwise|vectorized",
}
"""Patterns of the names of kernels, in any case; the first that is found counts."""


def parser(about: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark: --rounds and --threads."""
    use_expandable_segments()  # as in training
    given = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--rounds", type=int, default=rounds, help="measured rounds, after one warm-up round")
    given.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of every contender")
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


def show(head: str, columns: Mapping[str, str], rows: Mapping[str, Sequence[Value]]) -> dict[str, Any]:
    """Print a table, and return its head, and its values by row and column.

    Args:
        head: Its first line: what was measured, and where.
        columns: Format specifications of the values by title.
        rows: Values by the name of the row; None prints as "?".
    """
    wide = max(map(len, rows)) + 2
    widths = [max(len(title), 7) + 2 for title in columns]
    print(f"\n{head}\n" + " " * wide + "".join(f"{title:>{w}}" for title, w in zip(columns, widths, strict=True)))
    for name, values in rows.items():
        cells = ["?" if v is None else v if isinstance(v, str) else format(v, form)
                 for v, form in zip(values, columns.values(), strict=True)]  # fmt: skip
        print(f"{name:<{wide}}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True)), flush=True)
    return {"head": head, "rows": {n: dict(zip(columns, values, strict=True)) for n, values in rows.items()}}


def trace_steps(run: Callable[[int], None], steps: int, *, path: Path) -> dict[str, Any]:
    """Take steps in the profiler after one that warms it up, keep the trace at `path` (.json.gz, for
    https://ui.perfetto.dev), and sum it up."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities, schedule=torch.profiler.schedule(wait=0, warmup=1, active=1)
    ) as profile:
        run(1)
        profile.step()
        run(steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return summary(json.load(file)["traceEvents"], steps=steps)


def summary(events: Sequence[Mapping[str, Any]], *, steps: int) -> dict[str, Any]:
    """Figures of a step, in milliseconds: the device's busy and idle time between its first and last event, number of
    kernels and time by kind, and the longest gaps with the kernels before and after them."""
    on_device = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted((e for e in events if e.get("cat") in on_device), key=lambda event: event["ts"])
    times, counts, gaps = defaultdict[str, float](float), defaultdict[str, int](int), list[tuple[float, str, str]]()
    idle, end, last = 0.0, work[0]["ts"] if work else 0.0, ""
    for event in work:
        matching = (kind for kind, pattern in KINDS.items() if re.search(pattern, event["name"], re.IGNORECASE))
        kind = "transfers" if event["cat"] != "kernel" else next(matching, "other")
        times[kind] += event["dur"]
        counts[kind] += 1
        if event["ts"] > end:
            idle += event["ts"] - end
            gaps.append((event["ts"] - end, last, event["name"]))
        if event["ts"] + event["dur"] > end:
            end, last = event["ts"] + event["dur"], event["name"]
    scale = 1e-3 / steps
    return {
        "ms": scale * (end - work[0]["ts"]) if work else 0.0,
        "idle_ms": scale * idle,
        "kernels": sum(counts.values()) / steps,
        "by_kind": {
            kind: {"ms": scale * times[kind], "kernels": counts[kind] / steps}
            for kind in sorted(times, key=lambda kind: -times[kind])
        },
        "longest_gaps": [
            {"us": gap, "after": before[:80], "before": after[:80]} for gap, before, after in sorted(gaps)[:-9:-1]
        ],
    }
