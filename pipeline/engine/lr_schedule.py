"""The learning-rate schedule as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from pipeline.config import section


@section
class StageConfig:
    """A cheaper stage at the start of a run; what is None stays as in the `model` section."""

    until: float = Field(gt=0.0, lt=1.0)
    """Share of the run's steps at which the stage ends."""
    image_size: int | None = Field(default=None, ge=8)
    """Side of the images. Position embeddings and their optimizer state are interpolated when the stage ends."""
    text_tokens: int | None = Field(default=None, ge=2)
    """Longest text: longer ones are cut before their end-of-text token."""
    patch_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the image patches that each step leaves out."""
    lr_scale: float = Field(default=1.0, gt=0.0)
    """Factor on the learning rates of the schedule during the stage."""


@section
class ScheduleConfig:
    """The learning rate over time: linear warm-up from 0 to `optimizer.lr`, then a decay."""

    kind: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: "cosine" decays to `final_share` of the peak, "constant" stays at the peak."""
    warmup_steps: int = Field(default=500, ge=0)
    """Steps of linear warm-up."""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Where the cosine ends, as a share of the peak."""
    stages: tuple[StageConfig, ...] = ()
    """Cheaper stages at the start of the run, in order; after the last, training goes on with the `model` section. A
    checkpoint is written at the end of each."""


def stage_steps(config: ScheduleConfig, *, total_steps: int) -> list[tuple[StageConfig | None, int]]:
    """The stages with the steps at which they end; None: the rest of the run, after the last stage."""
    return [*((stage, round(stage.until * total_steps)) for stage in config.stages), (None, total_steps)]


def lr_scale(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) as a share of its peak, stages included."""
    stages = stage_steps(config, total_steps=total_steps)
    stage = next((stage for stage, end in stages if step < end), None)
    return (stage.lr_scale if stage else 1.0) * _schedule(config, step=step, total_steps=total_steps)


def _schedule(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """Warm-up and decay, in [0, 1]."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.final_share + (1.0 - config.final_share) * cosine
