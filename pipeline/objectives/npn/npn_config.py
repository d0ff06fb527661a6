"""Settings of the normalizer-prediction network (NPN)."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import Field

from pipeline.config import section
from pipeline.objectives.temperature import TemperatureConfig


@section
class NpnConfig(TemperatureConfig):
    """What NeuCLIP's Algorithm 1 leaves to choose; `NeuClipConfig` says which default comes from where.

    npn: "prototypes" (equations 10 and 11), "mlp" (section 5.2), or "queue": prototypes that are the newest features,
    without learning, so that `restart_every` and `inner_steps` have no meaning. npn_objective: "unified" (12) or
    "separate" (squared error of the logs, section 5.2). npn_schedule: "alternating" (Algorithm 1) or "simultaneous"
    (the order of Algorithm 3: one update per step, alpha from before it; the rest of that algorithm is restart_every 0,
    npn_optimizer adam, stop_gradient false, ratio_cap 0). npn_update: "replicated" (every rank makes the whole
    update; nothing is communicated) or "sharded" (a rank's GEMMs see its own anchors only, and every inner step sums
    the prototypes' gradient, [m, d], over the ranks: less work per rank, for many ranks on fast links). restart_every:
    steps, 0 = never. restart_with: newest features including the "current" batch, or of "previous" batches only.
    reset_accumulator: a restart also clears the optimizer's memory. renormalize: rows return to unit norm after each
    update. npn_precision: of the inner GEMMs; "auto" is bf16 on a GPU and fp32 on a CPU. The last prediction, which the
    encoders' gradients use, is always fp32. npn_compile: torch.compile fuses what an update does beside its GEMMs.
    """

    npn: Literal["prototypes", "mlp", "queue"] = "prototypes"
    npn_objective: Literal["unified", "separate"] = "unified"
    npn_schedule: Literal["alternating", "simultaneous"] = "alternating"
    npn_update: Literal["replicated", "sharded"] = "replicated"
    npn_optimizer: Literal["adagrad", "adam"] = "adagrad"
    npn_lr: float = Field(default=0.01, gt=0)
    npn_precision: Literal["auto", "fp32", "bf16"] = "auto"
    npn_compile: bool = False
    prototypes: int = Field(default=4096, ge=1)
    restart_every: int = Field(default=500, ge=0)
    restart_with: Literal["current", "previous"] = "current"
    inner_steps: int = Field(default=10, ge=0)
    reset_accumulator: bool = False
    renormalize: bool = False

    @pydantic.model_validator(mode="after")
    def _possible(self) -> NpnConfig:
        if self.npn == "mlp" and self.restart_every:
            raise ValueError("npn = mlp cannot be restarted from features: set restart_every to 0")
        if self.npn == "mlp" and self.renormalize:
            raise ValueError("renormalize is for npn = prototypes")
        if self.npn == "mlp" and (self.npn_update == "sharded" or self.npn_compile):
            raise ValueError("npn_update = sharded and npn_compile are for npn = prototypes or queue")
        if self.npn_schedule == "simultaneous" and self.inner_steps != 1:
            raise ValueError(f"npn_schedule = simultaneous needs inner_steps = 1, not {self.inner_steps}")
        return self
