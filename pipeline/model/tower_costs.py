"""FLOPs and activation memory of the towers, counted on the meta device, where nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class TowerCosts:
    """What both towers cost per image-text pair."""

    parameters: int
    """Of both towers."""
    trained_parameters: int
    """Those that are not locked."""
    image_flops: float
    """Forward, of one image; a multiply-add counts as 2."""
    text_flops: float
    """Forward, of one text."""
    saved_bytes: float
    """What autograd saves for the backward pass of one pair, in fp32."""
    context_length: int
    """Tokens of one text."""
    trained: tuple[bool, bool]
    """Whether any part of the image tower, and of the text tower, is trained."""

    @property
    def forward_flops(self) -> float:
        """Of one pair."""
        return self.image_flops + self.text_flops


def measure_towers(towers: nn.Module, *, image_size: int, context_length: int) -> TowerCosts:
    """Count parameters, FLOPs and saved tensors of towers that were built on the meta device."""
    towers.train()
    one, two = (
        _saved_bytes(lambda rows=rows: towers(*_inputs(rows, image_size, context_length)), towers)  # type: ignore[misc]
        for rows in (2, 4)
    )
    image, text = _inputs(2, image_size, context_length)
    return TowerCosts(
        parameters=sum(p.numel() for p in towers.parameters()),
        trained_parameters=sum(p.numel() for p in towers.parameters() if p.requires_grad),
        image_flops=_flops(lambda: towers(image, None)) / 2,
        text_flops=_flops(lambda: towers.encode_text(text)) / 2,  # type: ignore[operator]
        saved_bytes=(two - one) / 2,
        context_length=context_length,
        trained=trained_towers(towers),
    )


def trained_towers(towers: nn.Module) -> tuple[bool, bool]:
    """Whether any part of the image tower, and of the text tower, is trained."""
    named = [(name.startswith("clip.visual."), p.requires_grad) for name, p in towers.named_parameters()]
    image, text = (any(learns for of_image, learns in named if of_image == side) for side in (True, False))
    return image, text


def measure_flops(towers: nn.Module, *, image_size: int, context_length: int | None) -> float:
    """Forward FLOPs of one pair, or without a context length of one image, in training, on the meta device."""
    towers.train()
    image, text = _inputs(2, image_size, context_length or 1)
    return _flops(lambda: towers(image, text if context_length else None)) / 2


def _flops(forward: Callable[[], Any]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        forward()
    return counter.get_total_flops()


def _inputs(rows: int, image_size: int, context_length: int) -> tuple[Tensor, Tensor]:
    image = torch.zeros(rows, 3, image_size, image_size, device="meta")
    return image, torch.zeros(rows, context_length, dtype=torch.int64, device="meta")


def activation_bytes(costs: TowerCosts, *, micro_batch: int, bf16: bool) -> int:
    """Bytes that autograd saves for one micro-batch, with fused attention; under bf16 half of what fp32 needs."""
    return round(costs.saved_bytes * micro_batch * (0.5 if bf16 else 1.0))


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace `scaled_dot_product_attention` by one that saves what fused kernels save.

    On the meta device torch uses the unfused kernel, which saves the L x L attention weights. The function is
    replaced by name because a TorchFunctionMode does not reach the calls of `nn.MultiheadAttention`.
    """
    functional: Any = nn.functional
    plain = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = lambda q, k, v, *_, **__: _FusedAttention.apply(q, k, v)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


class _FusedAttention(torch.autograd.Function):
    """Attention on shapes only. Saves inputs, output and one log-sum-exp per query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)  # in the layout of q, so that joining the heads copies nothing
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("shapes only")


def _saved_bytes(forward: Callable[[], Any], towers: nn.Module) -> int:
    """Bytes of the distinct storages that autograd keeps for backward, without parameters.

    Activation checkpointing hides what it saves, so the inputs of the transformers' blocks are counted in any case.
    """
    own = {p.untyped_storage()._cdata for p in towers.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    blocks = [block for name, m in towers.named_modules() if name.endswith("resblocks") for block in m.children()]
    handles = [block.register_forward_pre_hook(lambda _, inputs: (keep(inputs[0]), None)[1]) for block in blocks]
    with _fused_attention(), saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    for handle in handles:
        handle.remove()
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
