"""Sinks for the metrics of a run: one class per destination.

To add a tracker, register a class with the methods of `Sink` under a name, here or in a package with an entry point of
the group `neuclip.trackers`; `telemetry.trackers` turns it on.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.files import write_text
from pipeline.registries import Registry
from pipeline.run_files import METRICS_NAME, record_of

LINE_SECONDS = 5.0
"""Between plain lines of training."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Of distributions, in metrics.jsonl."""
STEPWISE = ("train", "evaluation", "validation", "distribution")
"""Record kinds that belong to a step. A run that continues from an earlier step writes them again."""


@dataclass(frozen=True)
class SinkContext:
    """The arguments of a sink."""

    run: Path
    """The run's folder."""
    total_steps: int
    first_step: int
    """The step at which this process continues; records of later steps are outdated."""
    project: str = "neuclip"
    """The setting `telemetry.project`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's settings."""


class Sink:
    """A destination of metrics on rank 0, which ignores what it has no method for; steps are those taken so far."""

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        """Metrics of kind "train", or scores of kind "evaluation" or "validation"."""

    def distributions(self, *, step: int, values: Mapping[str, Tensor]) -> None:
        """Distributions over a batch or of the objective's state: finite values, each a CPU tensor [n] with n > 0."""

    def event(self, message: str, *, facts: Mapping[str, Any]) -> None:
        """An event."""

    def close(self) -> None: ...


SINKS: Registry[Callable[[SinkContext], Sink]] = Registry(
    "tracker", setting="telemetry.trackers", package="pipeline.metrics", group="neuclip.trackers"
)
register_sink = SINKS.register


@register_sink("jsonl")
class JsonLines(Sink):
    """RUN/metrics.jsonl: one JSON object per line, read by reports and plots."""

    not_written = "its lines are kept in memory until they can be"
    """What an error means for the records, by default that they are missing."""

    def __init__(self, context: SinkContext) -> None:
        self._file = _continue_at(context.run / METRICS_NAME, context.first_step)
        self._waiting = bytearray()

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        rounded = {name: float(f"{value:.9g}") for name, value in values.items()}
        self._write({"kind": kind, "step": step, "time": round(time.time(), 3), **rounded})

    def distributions(self, *, step: int, values: Mapping[str, Tensor]) -> None:
        quantiles = {name: np.quantile(value.numpy(), QUANTILES) for name, value in values.items()}
        rounded = {name: [float(f"{q:.6g}") for q in each] for name, each in quantiles.items()}
        self._write({"kind": "distribution", "step": step, "quantiles": list(QUANTILES), **rounded})

    def event(self, message: str, *, facts: Mapping[str, Any]) -> None:
        self._write({"kind": "event", "time": round(time.time(), 3), "message": message, **facts})

    def close(self) -> None:
        try:
            self._flush()
        except OSError as error:
            print(f"The last lines of {METRICS_NAME} are missing ({error}).", file=sys.stderr, flush=True)
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._waiting += f"{json.dumps(record)}\n".encode()
        self._flush()

    def _flush(self) -> None:
        while self._waiting:  # a disk that fills up takes a part
            del self._waiting[: self._file.write(self._waiting)]


def _continue_at(path: Path, first_step: int) -> FileIO:
    """Open the records for appending, after removing those of later steps and a line truncated by a crash."""
    if path.exists():
        before, kept = path.read_text(encoding="utf-8", errors="replace"), ""
        for line in before.splitlines():
            record = record_of(line)
            step = record.get("step") if record and record.get("kind") in STEPWISE else 0
            if record is not None and isinstance(step, int) and step <= first_step:
                kept += f"{line}\n"
        if kept != before:
            write_text(path, kept)  # in one step: a kill or a full disk must not cost the records
    return path.open("ab", buffering=0)


@register_sink("progress")
class ProgressLines(Sink):
    """One plain line per record, at most one of training every few seconds."""

    def __init__(self, context: SinkContext) -> None:
        self._total, self._last = context.total_steps, 0.0
        self._first, self._start = context.first_step, time.monotonic()

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        if kind != "train":
            form = "{} {:.3f}" if kind == "evaluation" else "{} {:.4f}"
            shown = [form.format(name, value) for name, value in values.items() if name != "pairs"]
            print(f"{kind.capitalize()} at step {step}: {', '.join(shown) or 'no scores'}", flush=True)
        elif now - self._last >= LINE_SECONDS or step >= self._total:
            self._last = now
            left = (now - self._start) / max(1, step - self._first) * (self._total - step)
            print(f"step {step}/{self._total}  {headline(values)}  ETA {clock(left)}", flush=True)

    def event(self, message: str, *, facts: Mapping[str, Any]) -> None:
        print(message, flush=True)


def headline(scalars: Mapping[str, float]) -> str:
    """The available metrics of the progress line."""
    slow = scalars.get("samples_per_second", 0.0) < 10
    shown = (
        ("samples_per_second", "{:.2g} samples/s" if slow else "{:,.0f} samples/s"),
        ("loss", "loss {:.4f}"),
        ("tau", "tau {:.4f}"),
        ("normalizer_gap", "normalizer gap {:.3f}"),
        ("data_wait", "data wait {:.0%}"),
    )
    return "  ".join(form.format(scalars[name]) for name, form in shown if name in scalars)


def clock(seconds: float) -> str:
    """Seconds as M:SS or H:MM:SS."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
