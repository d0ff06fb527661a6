"""FLOPs and activation memory of the towers, counted on the meta device, and the share of a device's peak (MFU)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from pipeline.model.towers import ModelConfig, build_towers, without_weights
from pipeline.model.trimming import why_not_trimmed


@dataclass(frozen=True)
class TowerCosts:
    """What both towers cost per image-text pair. FLOPs are of the forward pass; a multiply-add counts as 2."""

    parameters: int
    trained_parameters: int
    """Those that are not locked."""
    image_flops: float
    text_flops: float
    saved_bytes: float
    """What autograd saves for the backward pass of one pair, in fp32."""
    autocast_bytes: float
    """The same under autocast to bf16."""
    trained: tuple[bool, bool]
    """As `trained_towers`."""

    @property
    def forward_flops(self) -> float:
        return self.image_flops + self.text_flops


def measure_towers(towers: Any, *, image_size: int, context_length: int) -> TowerCosts:
    """Count parameters, FLOPs and saved tensors of towers that were built on the meta device."""
    from pipeline.model.image_tower import is_bf16_under_autocast  # imports open_clip

    towers.train()
    saved = autocast = 0.0
    for side, encode in enumerate((towers.encode_image, towers.encode_text)):
        norms_in_fp32 = side == 1 or not is_bf16_under_autocast(towers.clip.visual)
        two, four = (
            _saved_by(encode, _inputs(rows, image_size, context_length)[side], towers, norms_in_fp32=norms_in_fp32)
            for rows in (2, 4)
        )
        saved, autocast = saved + (four[0] - two[0]) / 2, autocast + (four[1] - two[1]) / 2
    image = measure_flops(towers, image_size=image_size, context_length=None)
    return TowerCosts(
        parameters=sum(p.numel() for p in towers.parameters()),
        trained_parameters=sum(p.numel() for p in towers.parameters() if p.requires_grad),
        image_flops=image,
        text_flops=measure_flops(towers, image_size=image_size, context_length=context_length) - image,
        saved_bytes=saved,
        autocast_bytes=autocast,
        trained=trained_towers(towers),
    )


def trained_towers(towers: nn.Module) -> tuple[bool, bool]:
    """Whether any part of the image tower, and of the text tower, is trained."""
    sides = {name.startswith("clip.visual.") for name, p in towers.named_parameters() if p.requires_grad}
    return True in sides, False in sides


def measure_flops(towers: nn.Module, *, image_size: int, context_length: int | None) -> float:
    """Forward FLOPs of one pair, or without a context length of one image, in training, on the meta device."""
    towers.train()
    image, text = _inputs(2, image_size, context_length or 1)
    # With gradients: without them, a parameter that is expanded (timm's pooling by attention) fails in the counter.
    with FlopCounterMode(display=False) as counter:
        towers(image, text if context_length else None)
    return counter.get_total_flops() / 2


def _inputs(rows: int, image_size: int, context_length: int) -> tuple[Tensor, Tensor]:
    image = torch.zeros(rows, 3, image_size, image_size, device="meta")
    return image, torch.zeros(rows, context_length, dtype=torch.int64, device="meta")


def activation_bytes(costs: TowerCosts, *, micro_batch: int, bf16: bool, autocast: bool = False) -> int:
    """Bytes that autograd saves for one micro-batch, with fused attention.

    In bf16 it is half of what fp32 needs; more under autocast, where most layer norms keep their inputs in fp32. (Other
    operations that autocast computes in fp32, such as the softmax of a Swin tower, are not counted.)
    """
    if bf16 and autocast:
        return round(costs.autocast_bytes * micro_batch)
    return round(costs.saved_bytes * micro_batch * (0.5 if bf16 else 1.0))


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace `scaled_dot_product_attention` by a fused kernel: it saves inputs, output and a log-sum-exp per query.

    On the meta device torch uses the unfused kernel, which saves the L x L attention weights. The function is
    replaced by name because a TorchFunctionMode does not reach the calls of `nn.MultiheadAttention`.
    """
    functional: Any = nn.functional
    plain, fused = functional.scaled_dot_product_attention, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    functional.scaled_dot_product_attention = lambda q, k, v, *_, **__: fused(q, k, v)[0]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def _saved_by(
    encode: Callable[[Tensor], Tensor], inputs: Tensor, towers: nn.Module, *, norms_in_fp32: bool
) -> tuple[float, float]:
    """Bytes of the distinct storages that autograd keeps for backward, without parameters: in fp32, and under autocast.

    Under autocast, layer norms keep their inputs in fp32 if `norms_in_fp32`. Activation checkpointing hides what it
    saves: the inputs of the blocks.
    """
    own = {_storage(p) for p in towers.parameters()}
    kept, wide = dict[int, Tensor](), dict[int, Tensor]()  # which hold the tensors: a new one may take a freed address

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in own:
            kept[_storage(tensor)] = tensor
        return tensor

    def enter(block: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given[0].requires_grad:
            keep(given[0])
            if block in of_texts:  # whose embeddings are in fp32, and all that is added to them
                wide[_storage(given[0])] = given[0]

    def normalize(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        wide[_storage(given[0])] = given[0]

    handles, of_texts = list[RemovableHandle](), set[nn.Module]()
    for name, module in towers.named_modules():
        if isinstance(module, nn.LayerNorm) and norms_in_fp32:
            handles.append(module.register_forward_pre_hook(normalize))
        if name.endswith("resblocks"):
            of_texts.update(module.children() if ".visual." not in name else ())
            if getattr(towers.get_submodule(name.rpartition(".")[0]), "grad_checkpointing", False):
                handles += [block.register_forward_pre_hook(enter) for block in module.children()]
    try:
        with _fused_attention(), saved_tensors_hooks(keep, lambda tensor: tensor):
            output = encode(inputs)
    finally:
        for handle in handles:
            handle.remove()
    del output
    sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in kept.items()}
    return sum(sizes.values()), sum(size * (1.0 if key in wide else 0.5) for key, size in sizes.items())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# Dense bf16 TFLOP/s (no sparsity) from the vendors' data sheets, by words of torch's device name; first match wins.
PEAK_BF16_TFLOPS = {
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "RTX A6000": 154.8,
    "A30": 165.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def known_peak(device_name: str) -> float | None:
    """Dense bf16 TFLOP/s of a GPU by torch's device name; None if it is not in the table, or a slice of one (MIG)."""
    words = set(device_name.replace("-", " ").split())
    if "MIG" in words:
        return None
    return next((peak for key, peak in PEAK_BF16_TFLOPS.items() if words.issuperset(key.split())), None)


def training_flops(model: ModelConfig, *, text_tokens: float | None = None, images: float = 1.0) -> float:
    """FLOPs of forward and backward for one pair; recomputation and the objective are not counted.

    A tower that is locked as a whole has no backward pass. The towers compute `text_tokens` per text (None: the context
    length) and `images` per pair: none if the image tower's outputs are stored.
    """
    image, text, length = _measured(replace(without_weights(model), compile=False))
    tokens = (model.text_tokens or length) if text_tokens is None else text_tokens
    return images * image + float(np.polynomial.polynomial.polyval(tokens, text))


@functools.cache
def _measured(model: ModelConfig) -> tuple[float, np.ndarray, int]:
    """FLOPs of training on an image and on a text, the latter as a polynomial in its tokens (attention is quadratic) or
    a constant where texts cannot be trimmed; and the context length."""
    towers, architecture = build_towers(model, seed=0, device="meta")
    length, size = architecture.context_length, architecture.image_size
    points = [length] if why_not_trimmed(towers.clip) else sorted({1, (1 + length) // 2, length})
    image = measure_flops(towers, image_size=size, context_length=None)
    text = [measure_flops(towers, image_size=size, context_length=tokens) - image for tokens in points]
    curve = np.polynomial.polynomial.polyfit(points, text, deg=len(points) - 1)
    for_image, for_text = (3.0 if trained else 1.0 for trained in trained_towers(towers))
    return for_image * image, for_text * curve, length


class Utilization:
    """MFU from samples per second. Reported only where the device's peak is known: from the user, or in bf16 from the
    table."""

    def __init__(
        self,
        model: ModelConfig,
        *,
        device: torch.device,
        ranks: int,
        bf16: bool,
        peak_tflops: float | None,
        images: bool = True,
    ) -> None:
        """`images`: whether the image tower runs; `ranks` devices share the work."""
        if peak_tflops is None and device.type == "cuda" and bf16:
            peak_tflops = known_peak(torch.cuda.get_device_name(device))
        self._model, self._peak = model, None if peak_tflops is None else peak_tflops * 1e12 * ranks
        self._tokens, self._images, self._steps = 0.0, float(images), 0

    def count(self, *, text_tokens: float) -> None:
        """Count a step: tokens per text that the text tower computed."""
        self._tokens += text_tokens
        self._steps += 1

    def scalars(self, samples_per_second: float) -> dict[str, float]:
        """{"mfu": share of the peak} over the steps since the last call, or {} if the peak is unknown."""
        tokens = self._tokens / self._steps if self._steps else None
        self._tokens, self._steps = 0.0, 0
        if self._peak is None:
            return {}
        flops = training_flops(self._model, text_tokens=tokens, images=self._images)
        return {"mfu": samples_per_second * flops / self._peak}
