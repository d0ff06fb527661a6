"""What a run tells: metrics.jsonl, TensorBoard and the terminal, all from the same records, on rank 0 only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import section

METRICS_NAME = "metrics.jsonl"
STEPWISE = ("train", "evaluation", "distribution")
"""Kinds of records that belong to a step, and go when the run goes back before it."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@section
class TelemetryConfig:
    """How often to tell. Counted in steps; every record is one host synchronisation."""

    every: int = Field(default=10, ge=1)
    tensorboard: bool = True
    progress: Literal["auto", "bar", "lines", "quiet"] = "auto"
    """"auto": a bar on a terminal, plain lines elsewhere."""
    histograms_every: int | None = Field(default=1000, ge=1)
    """Distributions over the batch (log-normalizers, feature gradients) and of the objective's state; None: never."""
    images_every: int | None = Field(default=1000, ge=1)
    """A grid of the batch's first images with their captions, in TensorBoard; None: never."""
    images: int = Field(default=16, ge=1)
    profile: tuple[int, int] | None = None
    """torch's profiler from the first to the last of these steps (counted from 0): RUN/profile/, on rank 0."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one device, for the MFU; None: of the GPU's data sheet where it is known, else there is no MFU."""


class Telemetry:
    """Writes records of training and events. On ranks other than 0 every call is free and does nothing."""

    def __init__(self, run: Path, *, config: TelemetryConfig, total_steps: int, first_step: int, is_main: bool) -> None:
        self._is_main, self._run = is_main, run
        self._total, self._progress = total_steps, None
        if not is_main:
            return
        self._file: TextIO = _open_at(run / METRICS_NAME, first_step)
        self._board = _tensorboard(run, first_step) if config.tensorboard else None
        self._progress = _progress(config.progress, total=total_steps, first=first_step)

    def train(self, *, step: int, scalars: Mapping[str, float]) -> None:
        """One record of training after `step` steps."""
        if not self._is_main:
            return
        self._write({"kind": "train", "step": step, "time": round(time.time(), 3), **_rounded(scalars)})
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(f"train/{name}", value, step)
        if self._progress is not None:
            self._progress.update(step, scalars)

    def evaluation(self, *, step: int, scores: Mapping[str, float]) -> None:
        """Scores of the weights after `step` steps."""
        if not self._is_main:
            return
        self._write({"kind": "evaluation", "step": step, "time": round(time.time(), 3), **_rounded(scores)})
        if self._board is not None:
            for name, value in scores.items():
                self._board.add_scalar(f"evaluation/{name}", value, step)
        if self._progress is not None:
            self._progress.say(f"Evaluation at step {step}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()))

    def distributions(self, *, step: int, values: Mapping[str, Tensor]) -> None:
        """Histograms in TensorBoard, quantiles (of the finite values) in the records. values: tensors on the CPU."""
        if not self._is_main:
            return
        quantiles = {}
        for name, value in values.items():
            finite = value[torch.isfinite(value)].flatten()
            if finite.numel():
                found = np.quantile(finite.numpy(), QUANTILES)
                quantiles[name] = [float(f"{q:.6g}") for q in found]
                if self._board is not None:
                    self._board.add_histogram(f"distribution/{name}", finite, step)
        self._write({"kind": "distribution", "step": step, "quantiles": list(QUANTILES), **quantiles})

    def pictures(self, *, step: int, grid: np.ndarray, captions: Sequence[str]) -> None:
        """One uint8 [H, W, 3] picture of some of the batch, and its captions."""
        if not self._is_main or self._board is None:
            return
        self._board.add_image("batch/images", grid, step, dataformats="HWC")
        self._board.add_text("batch/captions", "\n".join(f"{i}. {text}" for i, text in enumerate(captions, 1)), step)

    def event(self, message: str, **facts: Any) -> None:
        """Something that happened, for the terminal and the record."""
        if not self._is_main:
            return
        self._write({"kind": "event", "time": round(time.time(), 3), "message": message, **facts})
        if self._progress is not None:
            self._progress.say(message)

    def rewind(self, step: int) -> None:
        """The run went back to `step`: forget the figures of later steps, keep the events."""
        if not self._is_main:
            return
        self._file.close()
        self._file = _open_at(self._run / METRICS_NAME, step)
        if self._board is not None:
            self._board.close()
            self._board = _tensorboard(self._run, step)

    def close(self) -> None:
        if not self._is_main:
            return
        if self._progress is not None:
            self._progress.close()
        if self._board is not None:
            self._board.close()
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class BarProgress:
    """A rich progress bar with the figures that matter."""

    def __init__(self, *, total: int, first: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("train"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, refresh_per_second=4)
        self._task = self._bar.add_task("train", total=total, completed=first, figures="")
        self._bar.start()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=step, figures=figures(scalars))

    def say(self, message: str) -> None:
        self._bar.console.print(message, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class LineProgress:
    """One plain line a record, at most one every few seconds: for logs."""

    def __init__(self, *, total: int, first: int, seconds: float = 5.0) -> None:
        self._total, self._seconds, self._last = total, seconds, 0.0
        self._first, self._start = first, time.monotonic()

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._last < self._seconds and step < self._total:
            return
        self._last = now
        left = (now - self._start) / max(1, step - self._first) * (self._total - step)
        print(f"step {step}/{self._total}  {figures(scalars)}  ETA {_clock(left)}", flush=True)

    def say(self, message: str) -> None:
        print(message, flush=True)

    def close(self) -> None:
        pass


def figures(scalars: Mapping[str, float]) -> str:
    """The figures of the progress line, those that are there."""
    shown = (
        ("samples_per_second", "{:,.0f} samples/s"),
        ("loss", "loss {:.4f}"),
        ("tau", "tau {:.4f}"),
        ("normalizer_gap", "gap {:.3f}"),
        ("data_wait", "data wait {:.0%}"),
    )
    return "  ".join(form.format(scalars[name]) for name, form in shown if name in scalars)


def _progress(kind: str, *, total: int, first: int) -> BarProgress | LineProgress | None:
    if kind == "quiet":
        return None
    if kind == "bar" or (kind == "auto" and sys.stdout.isatty()):
        return BarProgress(total=total, first=first)
    return LineProgress(total=total, first=first)


def _tensorboard(run: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run / "tensorboard"), purge_step=first_step + 1 if first_step else None)


def _open_at(path: Path, first_step: int) -> TextIO:
    """Append to the records, without those of steps that a resumed run takes again (and a line cut by a crash)."""
    kept: list[str] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if record.get("kind") not in STEPWISE or record["step"] <= first_step:
                kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")


def _rounded(scalars: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.9g}") for name, value in scalars.items()}


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
