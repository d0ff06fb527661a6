"""Settings of the normalizer-prediction network (NPN)."""

from __future__ import annotations

from pydantic import Field

from pipeline.config import section
from pipeline.objectives.temperature import TemperatureConfig


@section
class NpnConfig(TemperatureConfig):
    """What NeuCLIP's Algorithm 1 leaves to choose; see `NeuClipConfig` for which default comes from where."""

    prototypes: int = Field(default=4096, ge=1)
    restart_every: int = Field(default=500, ge=0)
    inner_steps: int = Field(default=10, ge=0)
    npn_lr: float = Field(default=0.01, gt=0)
    reset_accumulator: bool = False
