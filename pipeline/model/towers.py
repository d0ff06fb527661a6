"""open_clip's image and text tower as one module that returns features.

Temperature and bias belong to the objective, outside the engine.

Shape legend: B images or texts, L tokens, d feature dimension.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from pipeline.config import section
from pipeline.errors import UserError
from pipeline.model.architectures import Architecture
from pipeline.model.attention import PackedText, use_fp32_embedding_sums, use_packed_attention
from pipeline.model.finetuning import LoraConfig, add_adapters, lock_towers
from pipeline.model.model_folder import LOGIT_KEYS, create_from
from pipeline.model.starting_weights import find_start, folder_of
from pipeline.model.trimming import TextTrimming, encode_text, text_trimming, why_not_trimmed


@section
class ModelConfig:
    """Which towers to train."""

    arch: str = "ViT-B-32"
    """An architecture of open_clip, one of `pipeline/model/model_configs/`, or a JSON file in open_clip's format;
    `pretrained`: the one that is stored with the weights of `model.pretrained`."""
    pretrained: str | None = None
    """Start from these weights: an open_clip tag, a weights file, a model folder such as one of our checkpoints, the
    folder of a run (its latest checkpoint), or `hf-hub:OWNER/NAME`."""
    pretrained_temperature: bool = True
    """Start from the temperature (and SigLIP's bias) of the pretrained weights instead of `objective.tau_init`."""
    image_size: int | None = Field(default=None, ge=8)
    """Side of the input images in pixels; None: the architecture's. Pretrained position embeddings are interpolated."""
    context_length: int | None = Field(default=None, ge=4)
    """Tokens of a text; None: the architecture's. Pretrained position embeddings are interpolated."""
    tokenizer: str | None = None
    """Folder with the files of a Hugging Face tokenizer, for architectures that use one (SigLIP, CLIPA, XLM-R); None:
    that of the pretrained folder, else the hub's."""
    lock_image: bool = False
    """Keep the image tower as it is (LiT): only the text tower is trained."""
    unlocked_image_blocks: int = Field(default=0, ge=0)
    """With `lock_image`: parts at the tower's end that are trained nevertheless, counted as open_clip does: the final
    projection is the first, then block by block."""
    lock_text: bool = False
    """Keep the text tower as it is."""
    unlocked_text_blocks: int = Field(default=0, ge=0)
    """With `lock_text`: parts at the tower's end that are trained nevertheless."""
    patch_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Share of the image patches that each training step leaves out (FLIP); None: the architecture's own value."""
    grad_checkpointing: bool = False
    """Activation checkpointing: keep only the inputs of each transformer block and compute the rest again in the
    backward pass. Less memory for about a third more compute."""
    packed_attention: bool = True
    """Compute attention from one matrix product for queries, keys and values, and with a causal mask that flash kernels
    know, the last block of open_clip's own ViTs for the class token only, if nothing else of it is read (7% fewer FLOPs
    for 12 blocks), and on GPUs patch embeddings as matrix products. The same function as open_clip's modules up to
    rounding, and the same weights."""
    text_tokens: int | None = Field(default=None, ge=2)
    """Longest text in training: longer ones are cut before their end-of-text token. None: the context length. For
    towers whose texts can be packed."""
    text_batching: Literal["auto", "packed", "padded", "whole"] = "auto"
    """How texts of different lengths share a micro-batch. `packed`: one behind the other, so that only tokens that
    exist are computed; on GPUs by torch's attention for variable lengths. `padded`: each is as wide as the longest of
    its micro-batch, rounded up to a multiple of 8 tokens. `whole`: each is as wide as the context. Features and
    gradients are the same up to rounding. `auto`: packed where possible, that is, for causal text towers that are read
    at the end-of-text token, with packed attention; other towers get whole texts."""
    lora: LoraConfig = LoraConfig()
    compile: bool | Literal["auto"] = "auto"
    """Compile the towers with `torch.compile`. The first steps take minutes; torch keeps the compiled code in its cache
    for the next start. `auto`: on a GPU in bf16, if a tenth of the run's estimated time is more than compiling takes;
    towers that cannot be compiled are then trained uncompiled, with a warning."""

    @model_validator(mode="after")
    def _unlocked_of_locked(self) -> ModelConfig:
        for side in ("image", "text"):
            if (blocks := getattr(self, f"unlocked_{side}_blocks")) and not getattr(self, f"lock_{side}"):
                raise ValueError(
                    f"unlocked_{side}_blocks = {blocks} is for a locked tower: set model.lock_{side}=true, or leave it "
                    "out to train the whole tower"
                )
        return self


class Towers(nn.Module):
    """Image and text encoder in one module. Features are unit-norm fp32, whatever the dtype of the weights."""

    def __init__(self, clip: nn.Module, *, pretrained: bool = True, notes: tuple[str, ...] = ()) -> None:
        """`pretrained`: the temperature is of weights. `notes`: what a run's log says about the towers."""
        super().__init__()
        self.notes = notes
        self.logit: tuple[float, float | None] | None = None
        """log(1/tau) and bias of the pretrained weights."""
        scale, bias = (getattr(clip, name, None) for name in LOGIT_KEYS)
        if pretrained and scale is not None and not scale.is_meta:
            self.logit = float(scale.detach()), None if bias is None else float(bias.detach())
        for name in LOGIT_KEYS:  # a 0-dim parameter crashes DeepSpeed, and bf16 would round it
            if getattr(clip, name, None) is not None:
                delattr(clip, name)
                setattr(clip, name, None)
        self.clip = clip
        self.image_format = image_format(clip.visual)  # type: ignore[arg-type]
        """Memory format in which the image tower is fastest."""

    def forward(self, image: Tensor, text: Tensor | PackedText | None) -> tuple[Tensor, Tensor] | Tensor:
        """[B, 3, H, W] normalised images and [B, L] tokens -> two [B, d] unit-norm fp32 features.

        Without texts it returns the image tower's output before normalisation, [B, d], in the precision in which the
        tower computes. Instead of images it takes such outputs.
        """
        if text is None:
            output: Tensor = self.clip.encode_image(image)  # type: ignore[operator]
            return output
        return self.encode_image(image), self.encode_text(text)

    def encode_image(self, image: Tensor) -> Tensor:
        """[B, 3, H, W], or the image tower's outputs [B, d] -> [B, d]."""
        output = image if image.dim() == 2 else self.clip.encode_image(image)  # type: ignore[operator]
        return F.normalize(output.float(), dim=-1)

    def encode_text(self, text: Tensor | PackedText) -> Tensor:
        """[B, L] -> [B, d]; fewer tokens than the context, or packed ones, where `text_trimming` allows it."""
        return F.normalize(encode_text(self.clip, text).float(), dim=-1)


def image_format(visual: nn.Module) -> torch.memory_format:
    """Channels last, in which images leave the loader, for the towers that are as fast or faster with it.

    Kernels for this layout need no transpositions, and the layout of the input carries over to all convolutions. A step
    on a CPU core in fp32 takes 0.95 of the time with RN50, and 1.00 with convnext_base (ViT-B-32: 0.97, within the
    spread). Other towers stay contiguous: on CPUs, torch's backward pass of 1x1 convolutions with a stride, which
    FastViT (MobileCLIP) and timm's ResNets have, corrupts memory in channels last (torch 2.12.1: all of 8 processes
    that trained MobileCLIP-S1 or MobileCLIP2-S0 at 256 pixels for two steps crashed, none with contiguous images).
    """
    measured = type(getattr(visual, "trunk", visual)).__name__ in ("ModifiedResNet", "ConvNeXt")
    return torch.channels_last if measured else torch.contiguous_format


def without_weights(config: ModelConfig) -> ModelConfig:
    """The same towers and tokenizer, without the weights, where these come from elsewhere or do not matter."""
    folder = folder_of(config.pretrained) if config.pretrained else None
    return replace(config, arch=str(folder or config.arch), pretrained=None)


def text_batching(clip: nn.Module, config: ModelConfig, *, by_kernel: bool = False) -> tuple[TextTrimming | None, bool]:
    """How the texts of a `model` section are trimmed, and whether they are packed.

    `by_kernel`: the device has a kernel for packed texts. Elsewhere they are computed in groups, whose sizes change
    with every batch: compiled towers would be compiled anew each time.

    Raises:
        UserError: Packed texts or `text_tokens` are demanded where they would change what the model computes.
    """
    whole = config.text_batching == "whole"
    unfit = why_not_trimmed(clip) or ("model.text_batching is whole." if whole else "")
    compiled = "model.compile=true compiles packed texts in bf16 on GPUs only."
    unpacked = unfit or (compiled if config.compile is True and not by_kernel else "")
    if unfit and config.text_tokens is not None:
        raise UserError(f"model.text_tokens={config.text_tokens}: {unfit} Leave text_tokens out.")
    if unpacked and config.text_batching == "packed":
        raise UserError(f"model.text_batching=packed: {unpacked} Use model.text_batching=auto.")
    trimming = None if unfit else text_trimming(clip, longest=config.text_tokens)
    return trimming, not unpacked and config.text_batching != "padded"


def check_model(config: ModelConfig) -> None:
    """Check everything about a `model` section that can be checked without loading weights; errors as there."""
    find_start(config.arch, config.pretrained)
    build_towers(without_weights(config), seed=0, device="meta")


def unread_pixels(visual: nn.Module, image_size: int) -> tuple[str, ...]:
    """A sentence about the pixels at the right and the bottom that fill no whole patch, if there are any."""
    patches = getattr(getattr(visual, "trunk", None), "patch_embed", visual)
    patch = getattr(patches, "patch_size", None)
    side = int(patch[0] if isinstance(patch, tuple) else patch or 1)
    if not (left := image_size % side):
        return ()
    below = image_size - left
    note = (
        f"Images of {image_size} px hold {below // side} x {below // side} patches of {side} px: the last {left} px at "
        f"the right and at the bottom are never read. model.image_size={below} is cheaper and reads as much; "
        f"{below + side} has none left over."
    )
    return (note,)


def build_towers(config: ModelConfig, *, seed: int, device: str | torch.device = "cpu") -> tuple[Towers, Architecture]:
    """Build a recipe's towers in fp32; `seed` is that of weights that are not pretrained, `device="meta"` gives none.

    Raises:
        UserError: Unknown architecture, pretrained weights that do not exist or do not fit, or settings that this
            architecture does not allow.
    """
    from pipeline.model.image_tower import (  # imports open_clip
        use_class_token_block,
        use_fp32_batch_norms,
        use_patch_dropout_on_device,
        use_patch_product,
    )

    start = find_start(config.arch, config.pretrained)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        clip, architecture = create_from(
            start,
            tokenizer=Path(config.tokenizer) if config.tokenizer else None,
            force_image_size=config.image_size,
            force_context_length=config.context_length,
            force_patch_dropout=config.patch_dropout,
            device=device,
        )
    patches: Any = getattr(getattr(clip.visual, "trunk", None), "patch_embed", None)
    taken = patches.img_size if getattr(patches, "strict_img_size", False) else None  # None also if it takes any
    if taken and taken[0] != architecture.image_size:
        raise UserError(
            f"The architecture {start.name} states vision_cfg.image_size = {architecture.image_size}, and its timm "
            f"model takes images of {taken[0]} px: write that in its JSON file, or set model.image_size."
        )
    image_blocks = config.unlocked_image_blocks if config.lock_image else None
    text_blocks = config.unlocked_text_blocks if config.lock_text else None
    lock_towers(clip, image=image_blocks, text=text_blocks)
    use_fp32_batch_norms(clip)
    use_fp32_embedding_sums(clip)
    use_patch_dropout_on_device(clip)
    if config.packed_attention:
        use_packed_attention(clip)
        use_class_token_block(clip)
        use_patch_product(clip.visual)  # type: ignore[arg-type]
    add_adapters(clip, config.lora, seed=seed, locked=(config.lock_image, config.lock_text))
    notes = unread_pixels(clip.visual, architecture.image_size)  # type: ignore[arg-type]
    towers = Towers(clip, pretrained=bool(config.pretrained), notes=notes)
    if config.grad_checkpointing:
        towers.clip.set_grad_checkpointing(True)  # type: ignore[operator]
    return towers, architecture
