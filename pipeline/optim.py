"""The encoders' optimizer: parameter groups, optimizers by name, and the learning-rate schedule as a pure function."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from pipeline.config import section
from pipeline.errors import UserError


@section
class OptimizerConfig:
    """The encoders' optimizer. Temperature and normalizer network have their own, in the objective's section."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-3, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.1, ge=0.0)


@section
class ScheduleConfig:
    """Linear warm-up from 0, then `cosine` down to `final_share` of the peak, or `constant`."""

    kind: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = Field(default=500, ge=0)
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)


def lr_scale(config: ScheduleConfig, *, step: int, total_steps: int) -> float:
    """The learning rate of step `step` (from 0) as a share of its peak, in [0, 1]."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.kind == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.final_share + (1.0 - config.final_share) * cosine


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices with weight decay; gains, biases and other vectors without.

    Raises: UserError when a trainable parameter is in no group or in two (a shared parameter under two names).
    """
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    seen: dict[int, str] = {}
    for name, p in named:
        if id(p) in seen:
            raise UserError(f"The parameter {name} is the same tensor as {seen[id(p)]}: it would be stepped twice.")
        if p.dim() == 0:
            raise UserError(
                f"The parameter {name} is a scalar, which the engine cannot hold: keep it in the objective."
            )
        seen[id(p)] = name
    decayed = [p for _, p in named if p.dim() >= 2]
    others = [p for _, p in named if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "name": "decay"},
        {"params": others, "weight_decay": 0.0, "name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """The named optimizer over `parameter_groups`; its learning rate is set before every step by `set_lr`."""
    return torch.optim.AdamW(list(groups), lr=config.lr, betas=config.betas, eps=config.eps)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_in_moment(config: OptimizerConfig) -> tuple[str, float, float]:
    """How to read a step's gradient g back: `(key, decay, scale)` of state[key] = decay * old + scale * g."""
    return "exp_avg", config.betas[0], 1.0 - config.betas[0]
