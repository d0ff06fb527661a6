"""The towers in a DeepSpeed engine. Only this folder imports deepspeed.

All ZeRO stages look the same from outside.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.distributed.world import World
from pipeline.engine.engine_config import BUCKET, EngineConfig, deepspeed_settings, zero_stage
from pipeline.engine.optim import OptimizerConfig, build_optimizer, check_stage, parameter_groups, set_lr
from pipeline.engine.state import DeepSpeedState
from pipeline.errors import UserError
from pipeline.model.towers import Towers

COMPILE_OPTIONS = {"fallback_random": True}
"""Compiled towers draw (dropout, patch dropout) what eager ones draw from the same seed, in forward passes with and
without graph; Inductor's own generator draws differently in each."""


class DeepSpeedEngine:
    """The `Engine` that runs on DeepSpeed.

    Args:
        towers: The model, on this rank's device.
        config: The engine's section of the recipe.
        optimizer: The optimizer's section.
        world: The ranks.
        global_batch: Samples per step over all ranks.
        compile_towers: Compile the towers with torch.compile.

    Raises:
        UserError: The DeepSpeed file is refused, or the optimizer does not work at its ZeRO stage.
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
        if self.stage:  # DeepSpeed allocates a buffer of this many elements, even for a small model
            zero = settings["zero_optimization"]
            zero["reduce_bucket_size"] = min(
                int(zero.get("reduce_bucket_size", BUCKET)), sum(p.numel() for p in towers.parameters())
            )
        self.world = world
        self.dtype = torch.bfloat16 if settings.get("bf16", {}).get("enabled") else torch.float32
        self.bf16 = self.dtype == torch.bfloat16 or bool(settings.get("torch_autocast", {}).get("enabled"))
        self.optimizer_config = optimizer
        check_stage(optimizer, stage=self.stage)
        groups = parameter_groups(towers, optimizer)
        frozen = {name: p.detach().cpu().clone() for name, p in towers.clip.named_parameters() if not p.requires_grad}
        if frozen and self.stage == 3:
            raise UserError(
                f"{config.deepspeed} is ZeRO stage 3, at which towers cannot be locked: take a file of stage 0 to 2."
            )
        self._inner = build_optimizer(optimizer, groups)
        with _quiet_deepspeed(world) as deepspeed:
            self._engine, self._wrapped, _, _ = deepspeed.initialize(
                model=towers, optimizer=self._inner, config=settings, dist_init_required=False
            )
        if self.stage == 0 and world.size == 1:
            # A reduction over one rank changes nothing, but DeepSpeed would copy all gradients to a buffer and back.
            self._engine.enable_backward_allreduce = False
        if compile_towers:
            # Dynamo remembers the towers of an earlier stage: it would take image size and patch dropout for variables,
            # and fail to trace them. As in a new process, they are constants.
            torch.compiler.reset()
            self._engine.compile(compile_kwargs={"options": COMPILE_OPTIONS})
        self.state = DeepSpeedState(self._engine, stage=self.stage, world=world, frozen=frozen)

    @property
    def module(self) -> Towers:
        towers = self._engine.module
        assert isinstance(towers, nn.Module)
        return towers  # type: ignore[return-value]

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """See `Engine.forward`; images of another precision than `dtype` are cast."""
        features: tuple[Tensor, Tensor] = self._engine(image.to(self.dtype), text)
        return features

    def image_output(self, image: Tensor) -> Tensor:
        """See `Engine.image_output`."""
        with torch.no_grad():
            output: Tensor = self._engine(image.to(self.dtype), None)
        return output

    def backward(self, features: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
        """See `Engine.backward`.

        DeepSpeed averages gradients over the K ranks, while the true gradient is the sum of the ranks' parts: hence the
        factor K.
        """
        surrogate = sum((f * g.to(f.dtype)).sum() for f, g in zip(features, gradients, strict=True))
        assert isinstance(surrogate, Tensor)
        self._engine.backward(self.world.size * surrogate)

    def step(self, *, lr_scale: float) -> bool:
        """See `Engine.step`."""
        if self.stage == 0 and self._overflowed():  # in fp32 and under autocast, stage 0 does not check by itself
            self._engine.zero_grad()
            return False
        set_lr(self._wrapped, self.optimizer_config.lr * lr_scale)
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def _overflowed(self) -> bool:
        """Whether any rank's accumulated gradient holds inf or NaN (stage 0: gradients are not partitioned)."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return bool(self.world.all_reduce((~torch.isfinite(norm)).float(), "max"))

    def gradient_norm(self) -> float | None:
        """See `Engine.gradient_norm`; None at ZeRO stage 0 in fp32 and under autocast."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def train(self) -> None:
        self._engine.train()


@contextlib.contextmanager
def _quiet_deepspeed(world: World) -> Iterator[Any]:
    """The deepspeed package, without its banner and the two-minute build of a CPU collective that we do not need."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    if world.device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with contextlib.redirect_stdout(io.StringIO()):  # it prints memory figures at every log level
        yield deepspeed
