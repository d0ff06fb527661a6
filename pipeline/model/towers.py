"""open_clip's two towers, as features only: temperature and bias belong to the objective, outside the engine.

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
from pipeline.model.batchnorm import use_fp32_batch_norms
from pipeline.model.model_folder import LOGIT_KEYS, create_clip, load_folder


@section
class ModelConfig:
    """Which towers to train. `arch` is an open_clip name, one of pipeline/model/model_configs/, or a JSON file."""

    arch: str = "ViT-B-32"
    pretrained: str | None = None
    """Start from these weights: an open_clip tag, a weights file or a folder such as a checkpoint of ours."""
    image_size: int | None = Field(default=None, ge=8)
    patch_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    grad_checkpointing: bool = False
    sync_batchnorm: bool = False
    """Batch norms use the statistics of all ranks' rows (with engine.micro_batch: of all ranks' micro-batches)."""
    compile: bool = False


class Towers(nn.Module):
    """Both encoders behind one forward; features are unit-norm fp32."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        for name in LOGIT_KEYS:  # a 0-dim parameter would crash the engine, and bf16 would round it
            if getattr(clip, name, None) is not None:
                delattr(clip, name)
                setattr(clip, name, None)
        self.clip = clip

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] normalised images and [B, L] tokens -> two [B, d] unit-norm fp32 features."""
        return self.encode_image(image), self.encode_text(text)

    def encode_image(self, image: Tensor) -> Tensor:
        return F.normalize(self.clip.encode_image(image).float(), dim=-1)  # type: ignore[operator]

    def encode_text(self, text: Tensor) -> Tensor:
        return F.normalize(self.clip.encode_text(text).float(), dim=-1)  # type: ignore[operator]


def build_towers(config: ModelConfig, *, seed: int, device: str | torch.device = "cpu") -> tuple[Towers, Architecture]:
    """The fp32 towers of a recipe with weights drawn from `seed` (or `config.pretrained`), and their description.

    `device="meta"` builds shapes only. Raises: UserError for an unknown architecture or pretrained weights.
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
            # Towers start from `pretrained` or from scratch, never from a half: no base text weights.
            clip = create_clip(name, pretrained=pretrained, pretrained_text=False, device=device, **kwargs)
    model_cfg = open_clip.get_model_config(name)
    architecture = describe(name, clip, model_cfg, source=name)
    use_fp32_batch_norms(clip, synchronised=config.sync_batchnorm)
    towers = Towers(clip)
    if config.grad_checkpointing:
        towers.clip.set_grad_checkpointing(True)  # type: ignore[operator]
    return towers, architecture
