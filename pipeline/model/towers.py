"""open_clip's image and text tower as one module that returns features.

Temperature and bias belong to the objective, outside the engine.

Shape legend: B images or texts, L tokens, d feature dimension.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pipeline.config import section
from pipeline.model.architectures import (
    Architecture,
    check_same_towers,
    check_tag,
    check_tokenizer,
    describe,
    load_open_clip,
    register,
)
from pipeline.model.attention import use_packed_attention
from pipeline.model.batchnorm import use_fp32_batch_norms
from pipeline.model.model_folder import LOGIT_KEYS, create_clip, load_folder
from pipeline.model.patch_dropout import use_patch_dropout_on_device
from pipeline.model.trimming import encode_text


@section
class ModelConfig:
    """Which towers to train."""

    arch: str = "ViT-B-32"
    """An architecture of open_clip, one of `pipeline/model/model_configs/`, or a JSON file in open_clip's format."""
    pretrained: str | None = None
    """Start from these weights: an open_clip tag, a weights file, or a model folder such as one of our checkpoints."""
    image_size: int | None = Field(default=None, ge=8)
    """Side of the input images in pixels; None: the architecture's. Pretrained position embeddings are interpolated."""
    patch_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the image patches that each training step leaves out (FLIP); None: the architecture's own value."""
    grad_checkpointing: bool = False
    """Activation checkpointing: keep only the inputs of each transformer block and compute the rest again in the
    backward pass. Less memory for about a third more compute."""
    sync_batchnorm: bool = False
    """Batch norms use the statistics of all ranks' rows (with `engine.micro_batch`: of all ranks' micro-batches)."""
    packed_attention: bool = True
    """Compute attention from one matrix product for queries, keys and values, and with a causal mask that flash kernels
    know. The same function as open_clip's `nn.MultiheadAttention` up to rounding, and the same weights."""
    text_tokens: int | None = Field(default=None, ge=2)
    """Longest text in training: longer ones are cut before their end-of-text token. None: the context length. For
    towers whose texts can be trimmed."""
    trim_text: bool | None = None
    """Cut texts after the longest of each micro-batch, rounded up to a multiple of 8 tokens, and sort texts by length
    into micro-batches. Features and gradients stay the same up to rounding. None: wherever that is so, that is, for
    causal text towers that are read at the end-of-text token; true: refuse other towers; false: never."""
    compile: bool = False
    """Compile the towers with `torch.compile`. The first steps take minutes."""


class Towers(nn.Module):
    """Image and text encoder in one module. Features are unit-norm fp32, whatever the dtype of the weights."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        for name in LOGIT_KEYS:  # a 0-dim parameter crashes DeepSpeed, and bf16 would round it
            if getattr(clip, name, None) is not None:
                delattr(clip, name)
                setattr(clip, name, None)
        self.clip = clip

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] normalised images and [B, L] tokens -> two [B, d] unit-norm fp32 features."""
        return self.encode_image(image), self.encode_text(text)

    def encode_image(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, d]."""
        return F.normalize(self.clip.encode_image(image).float(), dim=-1)  # type: ignore[operator]

    def encode_text(self, text: Tensor) -> Tensor:
        """[B, L] -> [B, d]; fewer tokens than the context where `text_trimming` allows it."""
        return F.normalize(encode_text(self.clip, text).float(), dim=-1)


def build_towers(config: ModelConfig, *, seed: int, device: str | torch.device = "cpu") -> tuple[Towers, Architecture]:
    """Build a recipe's towers in fp32.

    Args:
        config: the recipe's `model` section.
        seed: of the initial weights, where `config.pretrained` gives none.
        device: "meta" builds shapes without values.

    Returns:
        The towers and their description.

    Raises:
        UserError: unknown architecture, or pretrained weights that do not exist or do not fit.
    """
    open_clip = load_open_clip()
    name = register(config.arch)
    check_tokenizer(name)
    pretrained = config.pretrained
    folder = Path(pretrained) if pretrained else None
    kwargs: dict[str, Any] = {"force_image_size": config.image_size, "force_patch_dropout": config.patch_dropout}
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        if folder is not None and folder.is_dir():
            clip = load_folder(folder, **kwargs)
            check_same_towers(folder, name)
        else:
            if pretrained and not folder.is_file():  # type: ignore[union-attr]
                check_tag(name, pretrained)
            # Without `pretrained`, both towers start from scratch: no weights of the text tower's base model.
            clip = create_clip(name, pretrained=pretrained, pretrained_text=False, device=device, **kwargs)
    model_cfg = open_clip.get_model_config(name)
    architecture = describe(name, clip, model_cfg, source=name)
    use_fp32_batch_norms(clip, synchronised=config.sync_batchnorm)
    use_patch_dropout_on_device(clip)
    if config.packed_attention:
        use_packed_attention(clip)
    towers = Towers(clip)
    if config.grad_checkpointing:
        towers.clip.set_grad_checkpointing(True)  # type: ignore[operator]
    return towers, architecture
