"""The encoders' optimizer: parameter groups, optimizers by name, and the learning-rate schedule as a pure function."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from pipeline.config import section
from pipeline.errors import UserError


@section
class OptimizerConfig:
    """The encoders' optimizer. Temperature and normalizer network have their own, in the objective's section.

    The four of FastCLIP's Table 5 and Procedure 4. `betas` serve adamw, lamb and lion (whose authors take 0.9, 0.99),
    `eps` adamw and lamb, `momentum` sgd. sgd's weight decay is part of the gradient, the others' is not.
    """

    name: Literal["adamw", "lamb", "lion", "sgd"] = "adamw"
    lr: float = Field(default=1e-3, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = Field(default=1e-8, gt=0.0)
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
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


def check_stage(config: OptimizerConfig, *, stage: int) -> None:
    """Raises: UserError when the optimizer would be wrong under this ZeRO stage."""
    if config.name == "lamb" and stage > 0:
        raise UserError(
            f"optimizer.name = 'lamb' does not work with ZeRO stage {stage}: LAMB scales every layer by its own trust "
            "ratio, and ZeRO hands the optimizer flattened pieces of many layers. Choose a stage-0 file "
            "(engine.deepspeed=zero0_fp32 or zero0_bf16) or another optimizer (adamw, lion, sgd)."
        )


def build_optimizer(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """The named optimizer over `parameter_groups`; its learning rate is set before every step by `set_lr`.

    LAMB scales every matrix by its trust ratio, as FastCLIP's Procedure 4 does, whatever the weight decay; gains and
    biases are left unscaled, which is timm's rule and not the Procedure's. It clips nothing of its own accord.
    """
    groups, lr = list(groups), config.lr
    if config.name == "adamw":
        # On a CPU, temporaries of the engine's flat gigabyte tensors would cost more than the arithmetic.
        fused = all(p.device.type == "cpu" for group in groups for p in group["params"])
        return torch.optim.AdamW(groups, lr=lr, betas=config.betas, eps=config.eps, fused=fused or None)
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=config.momentum)
    elif config.name == "lion":
        from timm.optim import Lion

        optimizer = Lion(groups, lr=lr, betas=config.betas)
    else:
        from timm.optim import Lamb

        adapted = [{**group, "always_adapt": group["name"] == "decay"} for group in groups]
        optimizer = Lamb(adapted, lr=lr, betas=config.betas, eps=config.eps, max_grad_norm=None)
        optimizer.register_step_pre_hook(_restore_group_counter)
    optimizer.register_step_post_hook(_count_steps)
    return optimizer


def _count_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Keep the number of updates in each parameter's state, as torch's AdamW does, so that checkpoints find it.

    ZeRO steps one group after the other: only what was stepped counts. A state that is still empty is left so, since
    that is how timm's optimizers know that they have to fill it.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if state := optimizer.state.get(p):
            state["step"] = state.get("step", torch.tensor(0.0)) + 1


def _restore_group_counter(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """timm's LAMB counts per group; after a checkpoint was loaded, only the parameters' states know the number."""
    for group in optimizer.param_groups:
        counters = [optimizer.state[p]["step"] for p in group["params"] if "step" in optimizer.state.get(p, {})]
        if counters:
            group["step"] = torch.as_tensor(counters[0], dtype=torch.float32).cpu().clone()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_in_moment(config: OptimizerConfig) -> tuple[str, float, float]:
    """How to read a step's gradient g back: `(key, decay, scale)` of state[key] = decay * old + scale * g.

    sgd's g includes `decay_in_gradient`.
    """
    if config.name == "sgd":
        return "momentum_buffer", config.momentum, 1.0
    kept = config.betas[1] if config.name == "lion" else config.betas[0]
    return "exp_avg", kept, 1.0 - kept


def decay_in_gradient(config: OptimizerConfig, parameter: Tensor) -> Tensor:
    """What the optimizer itself adds to this parameter's gradient before its moment: sgd's weight decay, else 0."""
    decays = config.name == "sgd" and parameter.dim() >= 2  # as in `parameter_groups`
    return parameter.detach() * (config.weight_decay if decays else 0.0)
