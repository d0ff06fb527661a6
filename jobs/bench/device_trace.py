"""What a GPU does in a training step, from a trace of torch's profiler: time by kind of kernel, and gaps."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

KINDS = {
    "attention": r"flash|fmha|sdpa|attention",
    "convolutions": r"conv|wgrad|dgrad|fprop|nchwToNhwc|nhwcToNchw",
    "products": r"gemm|nvjet|cutlass|cublas|splitK|gemv|tensorop",
    "compiled": r"^triton",
    "layer norms": r"layer_?norm|GammaBeta",
    "optimizer": r"multi_tensor|adam",
    "casts and copies": r"copy|CatArray|LoadWithCast",
    "GELU": r"gelu",
    "reductions": r"reduce|softmax|logsumexp",
    "other elementwise": r"elementwise|vectorized",
}
"""Patterns of the names of kernels, in any case; the first that is found counts."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events in torch's traces."""
LONG_GAP = 10.0
"""Microseconds without work on the device from which a gap is listed."""


def trace_steps(run: Callable[[int], None], steps: int, *, path: Path) -> dict[str, Any]:
    """Take steps in the profiler, keep the trace at `path` (.json.gz, for https://ui.perfetto.dev), and sum it up."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        run(steps)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return summary(json.load(file)["traceEvents"], steps=steps)


def summary(events: Sequence[Mapping[str, Any]], *, steps: int) -> dict[str, Any]:
    """Figures of a step, in milliseconds: the device's busy and idle time between its first and last event, number of
    kernels and time by kind, and the longest gaps with the kernels before and after them."""
    work = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda event: event["ts"])
    times, counts, gaps = defaultdict[str, float](float), defaultdict[str, int](int), list[tuple[float, str, str]]()
    idle, end, last = 0.0, work[0]["ts"] if work else 0.0, ""
    for event in work:
        kind = kind_of(event)
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
        "gaps_above_10_us": sum(gap > LONG_GAP for gap, *_ in gaps) / steps,
        "longest_gaps": [
            {"us": gap, "after": before[:80], "before": after[:80]} for gap, before, after in sorted(gaps)[:-9:-1]
        ],
    }


def kind_of(event: Mapping[str, Any]) -> str:
    """The kind of work of an event on the device."""
    if event["cat"] != "kernel":
        return "transfers"
    kinds = (kind for kind, pattern in KINDS.items() if re.search(pattern, event["name"], re.IGNORECASE))
    return next(kinds, "other")
