"""Towers inside a DeepSpeed engine: the only importer of deepspeed.

The engine turns a gradient with respect to features into an applied step. It knows no objective: the trainer hands it
features' gradients. All ZeRO stages look the same from outside, and their state leaves and enters as full fp32
tensors by parameter name, independent of stage and number of ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.config import section, suggest
from pipeline.distributed.world import World
from pipeline.engine.optim import OptimizerConfig, build_optimizer, check_stage, parameter_groups, set_lr
from pipeline.engine.state import EngineState
from pipeline.errors import UserError
from pipeline.model.towers import Towers

DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
# Keys of a DeepSpeed file that the recipe decides: given in both, they must agree.
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
RECIPE_KEYS = (*BATCH_KEYS, "gradient_clipping")
FORBIDDEN_KEYS = ("optimizer", "scheduler", "fp16")
COMPILE_OPTIONS = {"fallback_random": True}
"""Compiled towers draw (dropout, patch dropout) what eager ones draw from the same seed, in forward passes with and
without graph; Inductor's own generator draws differently in each."""
BUCKET = 500_000_000
"""DeepSpeed's default `reduce_bucket_size`: the number of elements reduced at once, and the size of their buffer.
The engine never takes more than the model has."""


@section
class EngineConfig:
    """How a step is run. `deepspeed` names a file of ds_configs/ (without .json) or any DeepSpeed JSON file."""

    deepspeed: str = "zero1_bf16"
    micro_batch: int | None = Field(default=None, ge=1)
    """Samples of one rank that are in memory with their graph at once; None: the whole local batch."""
    gradient_clipping: float = Field(default=0.0, ge=0.0)
    """Largest gradient norm; 0 turns clipping off."""
    probe: bool = True
    """Compare the engine's first gradient with plain autograd, and refuse to train on a mismatch."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_minutes: float = Field(default=30.0, gt=0.0)
    """Limit of one phase of a step, collectives included, before the ranks tell who is behind and give up."""


def deepspeed_settings(config: EngineConfig, *, global_batch: int, world_size: int) -> dict[str, Any]:
    """The DeepSpeed file with the recipe's batch sizes filled in.

    Raises: UserError when the file is missing, sets what is not its business, or contradicts the recipe.
    """
    path = Path(config.deepspeed)
    if path.suffix != ".json":
        path = DS_CONFIGS / f"{config.deepspeed}.json"
    if not path.is_file():
        names = tuple(sorted(p.stem for p in DS_CONFIGS.glob("*.json")))
        raise UserError(f"engine.deepspeed = {config.deepspeed!r}: no such file. {suggest(config.deepspeed, names)}")
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in FORBIDDEN_KEYS:
        if key in settings:
            raise UserError(f"{path} sets {key!r}, which the recipe decides (see optimizer.*, schedule.*): remove it.")
    filled = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": global_batch // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.gradient_clipping,
    }
    for key in RECIPE_KEYS:
        if key in settings and settings[key] not in ("auto", filled[key]):
            raise UserError(
                f"{path} says {key} = {settings[key]}, but the recipe makes it {filled[key]} (global batch "
                f"{global_batch}, {world_size} ranks): remove it from the file or change the recipe."
            )
    if settings.get("managed_gradient_accumulation", True):
        raise UserError(
            f"{path} must set managed_gradient_accumulation to false: the trainer owns the step's boundary."
        )
    if zero_stage(settings) == 0 and settings.get("bf16", {}).get("enabled"):
        raise UserError(
            f"{path} sets bf16.enabled at ZeRO stage 0, where DeepSpeed (0.19) takes an optimizer step on zero "
            "gradients while it starts: use torch_autocast, as ds_configs/zero0_bf16.json does, or a higher stage."
        )
    # DeepSpeed's own timer would make the host wait for the device in every forward pass.
    quiet = {"steps_per_print": 2**62, "wall_clock_breakdown": False, "timers": {"throughput": {"enabled": False}}}
    return {**settings, **filled, **quiet}


def zero_stage(settings: Mapping[str, Any]) -> int:
    """The ZeRO stage that a DeepSpeed configuration asks for."""
    return int(settings.get("zero_optimization", {}).get("stage", 0))


class DeepSpeedEngine:
    """One DeepSpeed engine around the towers.

    Per step: `forward` (features with graph), `backward` (their gradients), `step` (reduce, clip, update).
    """

    def __init__(
        self,
        towers: Towers,
        *,
        config: EngineConfig,
        optimizer: OptimizerConfig,
        world: World,
        global_batch: int,
        compile_towers: bool = False,
    ) -> None:
        settings = deepspeed_settings(config, global_batch=global_batch, world_size=world.size)
        self.stage = zero_stage(settings)
        if self.stage:  # a buffer of that many elements is allocated, whatever the size of the model
            zero = settings["zero_optimization"]
            zero["reduce_bucket_size"] = min(
                int(zero.get("reduce_bucket_size", BUCKET)), sum(p.numel() for p in towers.parameters())
            )
        self.world = world
        self.dtype = torch.bfloat16 if settings.get("bf16", {}).get("enabled") else torch.float32
        self.bf16 = self.dtype == torch.bfloat16 or bool(settings.get("torch_autocast", {}).get("enabled"))
        self.optimizer_config = optimizer
        check_stage(optimizer, stage=self.stage)
        groups = parameter_groups(towers, weight_decay=optimizer.weight_decay)
        self._inner = build_optimizer(optimizer, groups)
        with _quiet_deepspeed(world) as deepspeed:
            self._engine, self._wrapped, _, _ = deepspeed.initialize(
                model=towers, optimizer=self._inner, config=settings, dist_init_required=False
            )
        if compile_towers:
            self._engine.compile(compile_kwargs={"options": COMPILE_OPTIONS})
        self.state = EngineState(self._engine, stage=self.stage, world=world)

    @property
    def module(self) -> Towers:
        towers = self._engine.module
        assert isinstance(towers, nn.Module)
        return towers  # type: ignore[return-value]

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[b, 3, H, W] normalised images and [b, L] tokens -> two [b, d] unit-norm fp32 features."""
        with self._attention():
            features: tuple[Tensor, Tensor] = self._engine(image.to(self.dtype), text)
        return features

    def _attention(self) -> contextlib.AbstractContextManager[None]:
        """torch's fused attention is slow backward in bf16 on CPUs; the plain one is faster there."""
        if self.bf16 and self.world.device.type == "cpu":
            return sdpa_kernel(SDPBackend.MATH)
        return contextlib.nullcontext()

    def backward(self, features: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
        """Accumulate d(global loss)/d(parameters), given d(global loss)/d(this rank's features).

        The engine averages over the ranks while the true gradient is the sum of their parts: hence the factor K.
        """
        surrogate = sum((f * g.to(f.dtype)).sum() for f, g in zip(features, gradients, strict=True))
        assert isinstance(surrogate, Tensor)
        with self._attention():  # activation checkpointing computes again what the forward pass computed
            self._engine.backward(self.world.size * surrogate)

    def step(self, *, lr_scale: float) -> bool:
        """Reduce, clip and apply the accumulated gradient; False when the engine skipped it (inf or NaN)."""
        if self.stage == 0 and self._overflowed():  # stage 0 has no check of its own in fp32 and under autocast
            self._engine.zero_grad()
            return False
        set_lr(self._wrapped, self.optimizer_config.lr * lr_scale)
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def _overflowed(self) -> bool:
        """Whether any rank's accumulated gradient holds inf or NaN (stage 0, where every rank has all of its own)."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return bool(self.world.all_reduce((~torch.isfinite(norm)).float(), "max"))

    def gradient_norm(self) -> float | None:
        """Norm of the last step's gradient over all ranks, before clipping; None where the engine does not tell."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def train(self) -> None:
        self._engine.train()


@contextlib.contextmanager
def _quiet_deepspeed(world: World) -> Iterator[Any]:
    """deepspeed, without its banner and without the two-minute build of a CPU collective that we do not need."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    if world.device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with contextlib.redirect_stdout(io.StringIO()):  # memory readings, printed whatever the log level
        yield deepspeed
