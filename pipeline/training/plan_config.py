"""The recipe's `plan` section. It belongs to the recipe, which is parsed without the planner."""

from __future__ import annotations

from pydantic import Field

from pipeline.config import section


@section
class PlanConfig:
    """What `neuclip plan` assumes about machine and data. Training does not read it."""

    gpus: int = Field(default=1, ge=1)
    peak_tflops: float = Field(default=989.0, gt=0)
    """Dense bf16 rate of one GPU: H100 and H200 989, A100 312, L40S 362, T4 (fp16) 65."""
    gpu_gib: float = Field(default=80.0, gt=0)
    mfu: float = Field(default=0.3, gt=0, le=1)
    """Share of the peak that executed arithmetic reaches, recomputation included."""
    dataset_size: int | None = Field(default=None, ge=1)
    """Samples to expect as long as the data's manifest is not there."""
    sample_bytes: int = Field(default=30_000, ge=1)
    """Stored bytes of a sample to expect as long as the data's manifest is not there."""
