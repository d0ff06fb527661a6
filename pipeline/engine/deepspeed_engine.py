"""The towers in a DeepSpeed engine. Only this folder imports deepspeed.

All ZeRO stages look the same from outside.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from pipeline.distributed.devices import wait_for
from pipeline.distributed.start import environment
from pipeline.distributed.world import World
from pipeline.engine.engine_config import BATCH_KEYS, BUCKET, EngineConfig, deepspeed_settings, zero_stage
from pipeline.engine.engine_protocol import EngineFacts, register_engine
from pipeline.engine.optim import OptimizerConfig, build_optimizer, check_stage, parameter_groups
from pipeline.engine.state import DeepSpeedState
from pipeline.errors import UserError, in_a_line, is_out_of_memory
from pipeline.model.attention import PackedText
from pipeline.model.towers import Towers

log = logging.getLogger(__name__)
COMPILE_OPTIONS = {"fallback_random": True}
"""Compiled towers draw (dropout, patch dropout) what eager ones draw from the same seed, in forward passes with and
without graph; Inductor's own generator draws differently in each."""


@register_engine("deepspeed")
class DeepSpeedEngine:
    """The `Engine` that runs on DeepSpeed; its arguments are those of `EngineClass`.

    Raises:
        UserError: The DeepSpeed file is refused, or the optimizer does not work at its ZeRO stage.
    """

    @staticmethod
    def facts(config: EngineConfig, *, optimizer: OptimizerConfig, global_batch: int, world_size: int) -> EngineFacts:
        """See `EngineClass.facts`."""
        settings = deepspeed_settings(config, global_batch=global_batch, world_size=world_size, optimizer=optimizer)
        stage, local = zero_stage(settings), global_batch // world_size
        check_stage(optimizer, stage=stage)
        if stage == 2 and world_size > 1 and config.rows(local) < local:
            raise UserError(
                f"engine.micro_batch = {config.micro_batch} with ZeRO stage 2 ({config.deepspeed}) would reduce all "
                "gradients over the ranks once for every micro-batch. Stage 1 reduces them once per step, and gives "
                "the same weights: engine.deepspeed=zero1_bf16 (a run can be resumed with it)."
            )
        zero = settings.get("zero_optimization", {})
        buffers = 2 if zero.get("overlap_comm") else 1
        weights, bf16 = _precision(settings)
        return EngineFacts(stage, bf16, weights, bucket=buffers * int(zero.get("reduce_bucket_size", BUCKET)))

    def __init__(
        self,
        towers: Towers,
        *,
        config: EngineConfig,
        optimizer: OptimizerConfig,
        world: World,
        global_batch: int,
        compile_towers: bool | Literal["auto"] = False,
    ) -> None:
        settings = deepspeed_settings(config, global_batch=global_batch, world_size=world.size, optimizer=optimizer)
        self.stage, self.dtype, self.bf16 = zero_stage(settings), *_precision(settings)
        check_stage(optimizer, stage=self.stage)
        if self.stage:  # DeepSpeed allocates a buffer of this many elements, even for a small model
            zero = settings["zero_optimization"]
            zero["reduce_bucket_size"] = min(
                int(zero.get("reduce_bucket_size", BUCKET)), sum(p.numel() for p in towers.parameters())
            )
        self.world, self.optimizer_config = world, optimizer
        if self.bf16 and self.dtype == torch.float32:
            from pipeline.model.image_tower import use_bf16_layer_norms  # imports open_clip

            use_bf16_layer_norms(towers.clip.visual)  # type: ignore[arg-type]
        groups = parameter_groups(towers, optimizer)
        frozen = {name: p.detach().cpu().clone() for name, p in towers.clip.named_parameters() if not p.requires_grad}
        if frozen and self.stage == 3:
            raise UserError(
                f"{config.deepspeed} is ZeRO stage 3, at which no weights can be frozen (model.lock_*, model.lora): "
                "take a file of stage 0 to 2."
            )
        # DeepSpeed makes the GPU of number LOCAL_RANK the current one, after comparing it with an MPI launcher's
        # variable. Where each task sees only its own GPU (`srun --gpus-per-task=1`), that is 0 on all ranks.
        number = {"LOCAL_RANK": str(world.device.index or 0), "OMPI_COMM_WORLD_LOCAL_RANK": None}
        with _quiet_deepspeed(world) as deepspeed, environment(**number if world.device.type == "cuda" else {}):
            _check_by_deepspeed(deepspeed, settings, config.deepspeed)
            self._engine, self._wrapped, _, _ = deepspeed.initialize(
                model=towers, optimizer=build_optimizer(optimizer, groups), config=settings, dist_init_required=False
            )
        fuse_gradients(self._engine.optimizer)
        if world.size == 1 and (self.stage == 0 or hasattr(self._engine.optimizer, "update_hp_grads")):
            # A reduction over one rank changes nothing, but DeepSpeed would copy all gradients to a buffer and back.
            self._engine.enable_backward_allreduce = False
        if compile_towers:
            # Dynamo remembers the towers of an earlier stage: it would take image size and patch dropout for variables,
            # and fail to trace them. As in a new process, they are constants. torch has no public way to forget one
            # module: the programs of NeuCLIP's network go as well, and are compiled again, once a stage.
            torch.compiler.reset()
            self._engine.compile(compile_kwargs={"options": COMPILE_OPTIONS})
        self._compiled, self._may_fail = compile_towers, bool(compile_towers)
        self.module: Towers = self._engine.module
        self.state = DeepSpeedState(self._engine, stage=self.stage, world=world, optimizer=optimizer, frozen=frozen)

    def forward(self, image: Tensor, text: Tensor | PackedText) -> tuple[Tensor, Tensor]:
        """See `Engine.forward`; images of another precision than `dtype` are cast."""
        if self._compiled and isinstance(text, PackedText):
            for row in (text.tokens, text.positions):  # else, the first program would be for this number of tokens only
                torch._dynamo.maybe_mark_dynamic(row, 1)
        run = self._first_compiled if self._may_fail else self._engine
        features: tuple[Tensor, Tensor] = run(image.to(self.dtype), text)
        return features

    def _first_compiled(self, image: Tensor, text: Tensor | PackedText) -> tuple[Tensor, Tensor]:
        """A forward pass that compiles: if that fails on any rank, without compilation where `auto` decided for it.

        The first pass with a graph also compiles the backward pass, and is the last that may fail.
        """
        from torch._dynamo.exc import TorchDynamoException

        self._may_fail, reason = not torch.is_grad_enabled(), ""
        devices = [image.device] if image.is_cuda else []
        with torch.random.fork_rng(devices=devices):
            try:
                with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                    features: tuple[Tensor, Tensor] = self._engine(image, text)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                reason = in_a_line(getattr(error, "inner_exception", error))  # of a compiler
                if self._compiled is True:
                    if not isinstance(error, TorchDynamoException):
                        raise
                    raise UserError(
                        f"model.compile = true, but the towers cannot be compiled here ({reason}). `neuclip doctor` "
                        "looks for a compiler; model.compile=false needs none."
                    ) from error
        if not (reasons := [reason for reason in self.world.gather_objects(reason) if reason]):
            return features
        log.warning(
            "The towers cannot be compiled, and train uncompiled (%s). model.compile=false says so.", reasons[0]
        )
        self._compiled = self._may_fail = False
        self.module._compiled_call_impl = None
        return self._engine(image, text)

    def backward(self, features: tuple[Tensor, Tensor], gradients: tuple[Tensor, Tensor]) -> None:
        """See `Engine.backward`. DeepSpeed averages gradients over the K ranks, while the true gradient is the sum of
        the ranks' parts: hence the factor K."""
        surrogate = sum((f * g.to(f.dtype)).sum() for f, g in zip(features, gradients, strict=True))
        assert isinstance(surrogate, Tensor)
        self._engine.backward(self.world.size * surrogate)

    def step(self, *, lr_scale: float) -> bool:
        """See `Engine.step`."""
        if self.stage == 0:  # in fp32 and under autocast, stage 0 does not look for inf and NaN by itself
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
            bad = self.world.all_reduce((~torch.isfinite(norm)).float(), "max")
            wait_for(bad.device)
            if bad:
                self._engine.zero_grad()
                return False
        for group in self._wrapped.param_groups:
            group["lr"] = self.optimizer_config.lr * lr_scale * group.get("lr_share", 1.0)
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def gradient_norm(self) -> float | None:
        """See `Engine.gradient_norm`; None at ZeRO stage 0 in fp32 and under autocast."""
        norm = self._engine.get_global_grad_norm()
        return None if norm is None else float(norm)


def _precision(settings: dict[str, Any]) -> tuple[torch.dtype, bool]:
    """The type of the weights that compute, and whether products are computed in bf16."""
    weights = torch.bfloat16 if settings.get("bf16", {}).get("enabled") else torch.float32
    return weights, weights == torch.bfloat16 or bool(settings.get("torch_autocast", {}).get("enabled"))


def _check_by_deepspeed(deepspeed: Any, settings: dict[str, Any], name: str) -> None:
    """Raise a `UserError` if DeepSpeed refuses its settings, for example for a value of the wrong type."""
    own = {key: value for key, value in copy.deepcopy(settings).items() if key not in BATCH_KEYS}
    try:
        deepspeed.DeepSpeedConfig({**own, "train_micro_batch_size_per_gpu": 1})  # it may not know the ranks yet
    except (ValueError, TypeError, AssertionError, KeyError, AttributeError) as error:
        raise UserError(f"DeepSpeed refuses engine.deepspeed = {name}: {error}") from error


def _is_invalid(norm: Tensor) -> bool:
    """DeepSpeed's check of a gradient's norm, the wait of a step at ZeRO stage 1 in bf16."""
    from deepspeed.runtime.utils import is_invalid_grad_norm

    wait_for(norm.device)
    return bool(is_invalid_grad_norm(norm))


def _is_news(record: logging.LogRecord) -> bool:
    """Training reports skipped steps itself."""
    return "OVERFLOW! Skipping step." not in record.getMessage()


@contextlib.contextmanager
def _quiet_deepspeed(world: World) -> Iterator[Any]:
    """The deepspeed package, without its banner and the two-minute build of a CPU collective that we do not need."""
    os.environ.setdefault("DS_ACCELERATOR", world.device.type)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    deepspeed.utils.logger.addFilter(_is_news)
    if world.device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.runtime.bf16_optimizer.is_invalid_grad_norm = _is_invalid
    # It remembers for the whole process that an engine used torch_autocast, and lets later ones, whatever their
    # communication_data_type, reduce gradients in the precision of the weights.
    deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    with contextlib.redirect_stdout(io.StringIO()):  # it prints memory figures at every log level
        yield deepspeed


def fuse_gradients(optimizer: Any) -> None:
    """Let DeepSpeed's `BF16_Optimizer` treat the gradients of a parameter group at once; leave others as they are.

    At ZeRO stage 1 in bf16, DeepSpeed (0.19) adds every parameter's gradient to its fp32 copy, and takes every copy's
    norm, one parameter at a time: about 1,300 launches for ViT-B/16, at the end of a step, where nothing else is
    queued. The accumulated gradients are the same to the bit, and their norm is the same up to rounding.
    """
    if not hasattr(optimizer, "update_hp_grads") or optimizer.immediate_grad_update:
        return

    @torch.no_grad()
    def update_hp_grads(clear_lp_grads: bool = False) -> None:
        for index, group in enumerate(optimizer.bf16_groups):
            rows = [row for row, parameter in enumerate(group) if parameter.grad is not None]
            copies = [optimizer.fp32_groups_gradients[index][row] for row in rows]
            gradients = [group[row].grad.view(copy.shape) for row, copy in zip(rows, copies, strict=True)]
            present = optimizer.fp32_groups_has_gradients[index]
            if not rows:
                continue
            if any(present):
                torch._foreach_add_(copies, gradients)
            else:  # the copies are zeros
                torch._foreach_copy_(copies, gradients)
            for row in rows:
                present[row] = True
            if clear_lp_grads:
                torch._foreach_zero_([group[row].grad for row in rows])

    every = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return every(for_clipping=True)
        gradients, of_experts = every()
        norms: list[Tensor] = [torch.stack(torch._foreach_norm(gradients))] if gradients else []
        return norms, of_experts  # the norm of the norms is that of all gradients

    optimizer.update_hp_grads, optimizer.get_grads_for_norm = update_hp_grads, get_grads_for_norm
