"""The recipe's `plan` section. It is kept apart from the planner because every program parses recipes."""

from __future__ import annotations

from pydantic import Field

from pipeline.config import section


@section
class PlanConfig:
    """What `neuclip plan` assumes about machine and data. Training does not read it."""

    gpus: int = Field(default=1, ge=1)
    """Number of ranks, unless `--ranks` is given."""
    peak_tflops: float = Field(default=989.0, gt=0)
    """Dense bf16 peak of one GPU: H100 and H200 989, A100 312, L40S 362, T4 (fp16) 65."""
    gpu_gib: float = Field(default=80.0, gt=0)
    """Memory of one GPU, in GiB."""
    mfu: float = Field(default=0.3, gt=0, le=1)
    """Share of the peak that the executed arithmetic reaches, recomputation included."""
    dataset_size: int | None = Field(default=None, ge=1)
    """Number of samples, used while there is no manifest."""
    sample_bytes: int = Field(default=30_000, ge=1)
    """Stored bytes of a sample, used while there is no manifest."""
