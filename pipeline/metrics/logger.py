"""Logging of a run's metrics and events on rank 0; every sink gets the same records."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from pipeline.config import section
from pipeline.metrics.sinks import SINKS, Sink, SinkContext


def _names(value: Any) -> Any:
    """`wandb` or `wandb,trackio` as a list."""
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


@section
class TelemetryConfig:
    """What is reported, how often, and where. Every record makes the host wait for the device once."""

    every: int = Field(default=10, ge=1)
    """Steps between records of training."""
    tensorboard: bool = True
    """Write RUN/tensorboard/ beside RUN/metrics.jsonl."""
    trackers: Annotated[tuple[str, ...], BeforeValidator(_names)] = ()
    """Trackers beside TensorBoard: `wandb` (Weights & Biases), `mlflow`, `trackio`, `aim`, `clearml`, `comet_ml`,
    `dvclive`, `swanlab`, or names that code of your own registers with `pipeline.metrics.sinks.register_sink`.
    The scores of `evaluation.suite` and the validation loss are included."""
    project: str = "neuclip"
    """The project in trackers; a run has the name of its folder there."""
    progress: Literal["auto", "quiet"] = "auto"
    """`auto` prints a line every few seconds."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one device, for the MFU. None: from the GPU's data sheet where it is known, else no MFU is reported."""


def sink_names(config: TelemetryConfig) -> list[str]:
    """The sinks that a configuration turns on.

    Raises:
        UserError: `trackers` has a name that no sink is registered under.
    """
    for name in config.trackers:
        SINKS[name]  # raises
    built_in = {"jsonl": True, "tensorboard": config.tensorboard, "progress": config.progress == "auto"}
    return list(dict.fromkeys([*filter(built_in.get, built_in), *config.trackers]))


class Telemetry:
    """Reports metrics and events of a run to the sinks; on ranks other than 0 there are none. Errors as `sink_names`.

    Sinks write to the run's folder, and drop the records of steps after `first_step`, which will be repeated: they are
    opened by `begin`, when the run is certain to start. What is reported before is kept until then.

    A sink that cannot write, for example because the disk is full, does not end the run, nor does a tracker that
    raises: the first error is printed. metrics.jsonl gets its lines later. Trackers show the `settings`.
    """

    def __init__(
        self,
        run: Path,
        *,
        config: TelemetryConfig,
        total_steps: int,
        first_step: int,
        is_main: bool,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        names = sink_names(config)
        self._names = names if is_main else []
        self._context = SinkContext(
            run, total_steps=total_steps, first_step=first_step, project=config.project, settings=settings or {}
        )
        self._sinks: list[Sink] = []
        self._kept: list[Callable[[Sink], None]] | None = [] if is_main else None
        self._failed: set[int] = set()
        self._lock = threading.RLock()  # uploads and checkpoints are reported by threads

    def begin(self) -> None:
        """Open the sinks, and send them what was reported before. Call it on rank 0.

        Raises:
            UserError: A tracker cannot be opened.
        """
        # Trackers first: one that cannot be opened must not cost the records of metrics.jsonl.
        opened = {name: SINKS[name](self._context) for name in reversed(self._names)}
        self._sinks = [opened[name] for name in self._names]
        kept, self._kept = self._kept or [], None
        for call in kept:
            self._each(call)

    def _each(self, call: Callable[[Sink], None]) -> None:
        with self._lock:
            if self._kept is not None:
                self._kept.append(call)
            for number, sink in enumerate(self._sinks):
                try:
                    call(sink)
                except Exception as error:  # a tracker of a user's own may raise anything
                    if number not in self._failed:
                        self._failed.add(number)
                        name = getattr(sink, "name", type(sink).__name__)
                        lost = getattr(sink, "not_written", "metrics are missing there")
                        why = error if isinstance(error, OSError) else repr(error)
                        print(f"{name} cannot be written ({why}): {lost}.", file=sys.stderr, flush=True)

    def scalars(self, kind: str, *, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of kind "train", or scores of kind "evaluation" or "validation", of the weights after a step."""
        self._each(lambda sink: sink.scalars(kind, step=step, values=values))

    def distributions(self, *, step: int, values: Mapping[str, Tensor]) -> None:
        """Log the distributions of the finite values of CPU tensors; tensors without finite values are skipped."""
        if self._sinks:
            finite = {name: value[torch.isfinite(value)].flatten() for name, value in values.items()}
            known = {name: value for name, value in finite.items() if value.numel()}
            self._each(lambda sink: sink.distributions(step=step, values=known))

    def event(self, message: str, **facts: Any) -> None:
        """Log an event; `facts` are added to its record."""
        self._each(lambda sink: sink.event(message, facts=facts))

    def warning(self, message: str, **facts: Any) -> None:
        """Log an event whose record has the level "warning"."""
        self.event(message, level="warning", **facts)

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []  # a thread may still report an upload that nobody waits for
