"""The encoders' optimizer: parameter groups, optimizers by name, and the schedule of the learning rate."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from pipeline.config import section
from pipeline.errors import UserError

# Numbers of a block: `resblocks.3`, `blocks.3`, `layer.3`, ResNet's `layer2.1`, ConvNeXt's `stages.2.blocks.5`.
_BLOCK = re.compile(r"(?:resblocks|blocks|layers|layer|stages)\.?(\d+)(?:\.(?:blocks\.)?(\d+))?")
# What comes before the first block of any of open_clip's towers.
_BEFORE = re.compile(
    r"(conv[123]|bn[123]|class_embedding|positional_embedding|token_embedding|cls_emb|ln_pre|patch_embed|pos_embed|"
    r"cls_token|reg_token|stem|embeddings|embed_tokens|shared)\b"
)

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


@section
class OptimizerConfig:
    """The encoders' optimizer. Temperature and normalizer network have their own, in the objective's section."""

    name: Literal["adamw", "lamb", "lion", "sgd", "muon"] = "adamw"
    """One of the four optimizers of FastCLIP's Table 5 and Procedure 4, or Muon for the matrices of blocks and AdamW
    for the rest. lamb and muon need ZeRO stage 0, which `engine.deepspeed=auto` takes for them."""
    lr: float = Field(default=1e-3, gt=0.0)
    """Peak learning rate; `schedule` says how it changes over time. muon's updates are scaled to the size of AdamW's
    (2502.16982), so a rate for AdamW is a starting point."""
    betas: tuple[Decay, Decay] = (0.9, 0.98)
    """Decay rates of the moments of adamw (also of muon's AdamW), lamb and lion (lion's authors use 0.9, 0.99), each in
    [0, 1)."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the denominator by adamw (also by muon's AdamW) and lamb."""
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Momentum of sgd and muon (muon's author uses 0.95)."""
    layer_decay: float = Field(default=1.0, gt=0.0, le=1.0)
    """Layer-wise learning-rate decay, for fine-tuning: each block learns at this share of the rate of the block after
    it. 1 is none; 0.65 to 0.9 are usual."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """Applied to matrices only, not to gains and biases. sgd adds it to the gradient; the others decay weights directly
    (decoupled)."""

    @property
    def per_layer(self) -> str:
        """Why it works on whole layers only, not on the flattened pieces of many that ZeRO gives it; else empty."""
        return {
            "lamb": "LAMB scales every layer by its own trust ratio",
            "muon": "Muon orthogonalizes the update of every matrix",
        }.get(self.name, "")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Two groups: "decay", matrices with weight decay, and "no_decay", gains, biases and other vectors without.

    With a layer decay below 1 there are two for each depth, with its share of the learning rate as `lr_share`. For
    Muon, the matrices of blocks are in groups "hidden" of their own, also with weight decay. Not hidden are embeddings,
    the first convolution, the projections to the features, and depthwise convolutions (many matrices of one column).

    Raises:
        UserError: A parameter has two names, so that it would be updated twice, or is a scalar; or Muon has no matrix.
    """
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    seen, kinds = dict[int, str](), dict[str, str]()
    for name, p in named:
        if id(p) in seen:
            raise UserError(f"The parameter {name} is the same tensor as {seen[id(p)]}: it would be updated twice.")
        if p.dim() == 0:
            raise UserError(
                f"The parameter {name} is a scalar, which DeepSpeed cannot train: keep it in the objective."
            )
        seen[id(p)] = name
        hidden = config.name == "muon" and p.dim() >= 2 and p.shape[1] > 1 and isinstance(_place(name), tuple)
        kinds[name] = "hidden" if hidden else "decay" if p.dim() >= 2 else "no_decay"
    if config.name == "muon" and "hidden" not in kinds.values():
        raise UserError(
            "optimizer.name = 'muon', but no trained parameter is a matrix of a block: choose another optimizer, or "
            "lock fewer layers."
        )
    shares = _rate_shares([name for name, _ in named], decay=config.layer_decay)
    groups = []
    for share in sorted(set(shares.values()), reverse=True):
        for kind in ("hidden", "decay", "no_decay"):
            here = [p for name, p in named if shares[name] == share and kinds[name] == kind]
            decay = 0.0 if kind == "no_decay" else config.weight_decay
            groups.append({"params": here, "weight_decay": decay, "name": kind, "lr_share": share})
    return [group for group in groups if group["params"]]


def check_stage(config: OptimizerConfig, *, stage: int) -> None:
    """Raise a `UserError` if the optimizer does not work at a ZeRO stage."""
    if stage > 0 and config.per_layer:
        raise UserError(
            f"optimizer.name = '{config.name}' does not work with ZeRO stage {stage}: {config.per_layer}, and "
            "ZeRO hands the optimizer flattened pieces of many layers. Choose a stage-0 file "
            "(engine.deepspeed=auto, zero0_fp32 or zero0_bf16) or another optimizer (adamw, lion, sgd)."
        )


def build_optimizer(config: OptimizerConfig, groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """The named optimizer over `parameter_groups`. Before every step, a group's rate is set to its `lr_share`.

    LAMB scales every matrix by its trust ratio, with and without weight decay, as FastCLIP's Procedure 4 does. Gains
    and biases are not scaled, which is timm's rule and not the Procedure's. timm's gradient clipping is off.

    Muon (https://kellerjordan.github.io/posts/muon) is timm's, with its author's coefficients, Nesterov momentum, and
    updates scaled by 0.2 sqrt(max(rows, columns)) as in 2502.16982. A convolution's kernel is one matrix with a row per
    output channel, and attention's packed qkv weight is one matrix. Groups that are not "hidden" get AdamW.
    """
    from timm.optim import Lamb, Lion, Muon

    groups, lr, rest = list(groups), config.lr, list[dict[str, Any]]()
    optimizer: torch.optim.Optimizer
    if config.name == "adamw":
        return _adamw(groups, config)
    if config.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=config.momentum)
    elif config.name == "lion":
        optimizer = Lion(groups, lr=lr, betas=config.betas)
    elif config.name == "muon":
        # Without `use_muon`, timm looks at the shape.
        hidden = [{**group, "use_muon": True} for group in groups if group["name"] == "hidden"]
        rest = [group for group in groups if group["name"] != "hidden"]
        fixed: dict[str, Any] = {"nesterov": True, "ns_coefficients": "original", "adjust_lr_fn": "match_rms_adamw"}
        optimizer = Muon(hidden, lr=lr, momentum=config.momentum, **fixed)
    else:
        adapted = [{**group, "always_adapt": group["name"] == "decay"} for group in groups]
        optimizer = Lamb(adapted, lr=lr, betas=config.betas, eps=config.eps, max_grad_norm=None)
        optimizer.register_step_pre_hook(_restore_group_counter)
    optimizer.register_step_post_hook(_count_steps)
    return _Together([optimizer, _adamw(rest, config)]) if rest else optimizer


class _Together(torch.optim.Optimizer):
    """Optimizers of different parameters as one, which has their groups and their state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], parts[-1].defaults)
        self._parts = parts

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of each."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups, part.state = [*itertools.islice(groups, len(part.param_groups))], self.state
            part.step()


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW in one pass: temporaries the size of DeepSpeed's flat tensors would cost more than the arithmetic."""
    fused = all(p.device.type in ("cpu", "cuda") for group in groups for p in group["params"])
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None)


def step_counter(optimizer: torch.optim.Optimizer, parameter: Tensor, value: float = 0.0) -> Tensor:
    """A parameter's number of updates as its optimizer keeps it: fused kernels read it on the parameter's device."""
    fused = bool(optimizer.defaults.get("fused"))
    return torch.tensor(value, dtype=torch.float32, device=parameter.device if fused else "cpu")


def _count_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Keep the number of updates in each parameter's state, as torch's AdamW does, so that checkpoints include it.

    ZeRO steps one group after the other; only the parameters of that group are counted. An empty state stays empty:
    timm's optimizers initialize a state that is empty.
    """
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if state := optimizer.state.get(p):
            state["step"] = state.get("step", torch.tensor(0.0)) + 1


def _restore_group_counter(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """timm's LAMB counts updates per group; after loading a checkpoint only the parameters' states have the count."""
    for group in optimizer.param_groups:
        counters = [optimizer.state[p]["step"] for p in group["params"] if "step" in optimizer.state.get(p, {})]
        if counters:
            group["step"] = torch.as_tensor(counters[0], dtype=torch.float32).cpu().clone()


def gradient_in_moment(config: OptimizerConfig) -> dict[str, tuple[float, float]]:
    """How to recover a step's gradient g: `{key: (decay, scale)}` with state[key] = decay * old + scale * g.

    A parameter has one of the keys in its state. sgd's g includes `decay_in_gradient`.
    """
    if config.name == "sgd":
        return {"momentum_buffer": (config.momentum, 1.0)}
    kept = config.betas[1] if config.name == "lion" else config.betas[0]
    muon = {"momentum_buffer": (config.momentum, 1.0 - config.momentum)} if config.name == "muon" else {}
    return {"exp_avg": (kept, 1.0 - kept), **muon}


def moment_keys(config: OptimizerConfig, groups: Iterable[Mapping[str, Any]]) -> Callable[[Tensor], list[str]]:
    """The entries of the optimizer's state for a parameter of `parameter_groups` that has its shape."""
    hidden = {id(p) for group in groups if group.get("name") == "hidden" for p in group["params"]}

    def keys(parameter: Tensor) -> list[str]:
        if config.name == "sgd" or id(parameter) in hidden:
            return ["momentum_buffer"] if config.momentum or config.name == "muon" else []
        return ["exp_avg"] if config.name == "lion" else ["exp_avg", "exp_avg_sq"]

    return keys


def decay_in_gradient(config: OptimizerConfig, parameter: Tensor) -> Tensor:
    """The term added to a parameter's gradient before its moment is updated: weight decay for sgd, else 0."""
    decays = config.name == "sgd" and parameter.dim() >= 2  # as in `parameter_groups`
    return parameter.detach() * (config.weight_decay if decays else 0.0)


def _rate_shares(names: Iterable[str], *, decay: float) -> dict[str, float]:
    """The learning-rate factor of each parameter for layer-wise decay (BEiT, 2106.08254).

    In both towers the last layers (projection, final norm) have 1, the last block `decay`, the one before it `decay`^2,
    and so on down to the embeddings. Parameters have open_clip's names; those of the image tower begin with `visual.`.
    """
    places = {name: _place(name) for name in names}
    shares = {}
    for image in (True, False):
        # Below `clip.` where the towers' own names are used.
        tower = {name: place for name, place in places.items() if ("visual" in name.split(".")[:2]) == image}
        blocks = sorted({place for place in tower.values() if isinstance(place, tuple)})
        depth = {place: number for number, place in enumerate(blocks, start=1)}
        for name, place in tower.items():
            number = depth[place] if isinstance(place, tuple) else (0 if place == "before" else len(blocks) + 1)
            shares[name] = decay ** (len(blocks) + 1 - number)
    return shares


def _place(name: str) -> tuple[int, int] | str:
    """The numbers of a parameter's block in its tower; "before" or "after" for one that is in none."""
    match = _BLOCK.search(name)
    if match:
        return int(match.group(1)), int(match.group(2) or 0)
    return "before" if _BEFORE.search(name) else "after"


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
    """After the warm-up: `cosine` decays to 0, `constant` stays at the peak until the cool-down."""
    warmup_steps: int = Field(default=500, ge=0)
    """Steps of linear warm-up."""
    cooldown_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the run at its end in which a `constant` rate falls to 0, as 1 - sqrt of the share of the cool-down that
    has passed (2405.18392)."""
    stages: tuple[StageConfig, ...] = ()
    """Cheaper stages at the start of the run, in order; after the last, training goes on with the `model` section. A
    checkpoint is written at the end of each."""

    @model_validator(mode="after")
    def _falls_once(self) -> ScheduleConfig:
        if self.cooldown_share and self.kind != "constant":
            raise ValueError(f"cooldown_share is for kind=constant: {self.kind} decays from the warm-up on")
        return self

    def cooldown_steps(self, *, total_steps: int) -> int:
        """Steps of the cool-down."""
        return round(self.cooldown_share * total_steps)


def stage_steps(config: ScheduleConfig, *, total_steps: int) -> list[tuple[StageConfig | None, int]]:
    """The stages with the steps at which they end; None: the rest of the run, after the last stage."""
    return [*((stage, round(stage.until * total_steps)) for stage in config.stages), (None, total_steps)]
