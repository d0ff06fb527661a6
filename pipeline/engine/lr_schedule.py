"""The learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from pipeline.config import section


@section
class ScheduleConfig:
    """The learning rate over time: linear warm-up from 0 to `optimizer.lr`, then a decay."""

    kind: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: "cosine" decays to `final_share` of the peak, "constant" stays at the peak."""
    warmup_steps: int = Field(default=500, ge=0)
    """Steps of linear warm-up."""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Where the cosine ends, as a share of the peak."""


def lr_scale(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) as a share of its peak, in [0, 1]."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.final_share + (1.0 - config.final_share) * cosine
