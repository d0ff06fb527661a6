"""What fine-tuning leaves as it is: locked towers (LiT, arXiv:2111.07991), and frozen layers with LoRA beside them.

A run's checkpoints have the adapted weights under open_clip's names, so that everything that reads a model reads them,
and the adapters alone in peft's format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.config import section
from pipeline.errors import UserError
from pipeline.model.model_folder import load_tensors, save_tensors

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""peft's names."""
IN_BLOCK = re.compile(r"\.\d+\.")
BASE, IN_PEFT = ".base_layer.", "base_model.model."


@section
class LoraConfig:
    """Low-rank adapters (LoRA, 2106.09685) for fine-tuning: the pretrained weights stay as they are, and beside every
    linear layer $W$ in the blocks of the towers that are not locked two small matrices are trained:
    $W + (\\mathrm{alpha} / \\mathrm{rank}) B A$. In open_clip's own towers these layers are the MLPs: attention is one
    joint matrix there, which is not adapted. Needs `pip install 'neuclip[lora]'`."""

    rank: int | None = Field(default=None, ge=1)
    """Rows of $A$, usually 4 to 64; None: no adapters, the weights themselves are trained."""
    alpha: float | None = Field(default=None, gt=0)
    """Weight of the adapters, divided by the rank; None: twice the rank."""

    @model_validator(mode="after")
    def _of_adapters(self) -> LoraConfig:
        if self.rank is None and self.alpha is not None:
            raise ValueError("alpha is of adapters, and there are none: set model.lora.rank, too")
        return self

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        assert self.rank is not None
        return 2.0 if self.alpha is None else self.alpha / self.rank


def add_adapters(clip: nn.Module, config: LoraConfig, *, seed: int, locked: tuple[bool, bool]) -> None:
    """Add adapters to a model in place and freeze everything else; nothing without a rank.

    `seed`: of A's initial values, B starts at 0; `locked`: whether image and text tower stay as they are.

    Raises:
        UserError: peft is not installed, or the model has batch norms.
    """
    if config.rank is None:
        return
    try:
        import peft
    except ImportError as error:
        raise UserError(f"model.lora needs the package peft: pip install 'neuclip[lora]' ({error}).") from error
    if any(isinstance(module, _BatchNorm) for module in clip.modules()):
        raise UserError("model.lora: the statistics of this architecture's batch norms would change beside adapters.")
    linear = (name for name, module in clip.named_modules() if type(module) is nn.Linear and IN_BLOCK.search(name))
    layers = [name for name in linear if not locked[0 if name.startswith("visual.") else 1]]
    # One expression for the layers that differ in their number: peft would also adapt others by a plain list of names.
    expressions = sorted({re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) for name in layers})
    alpha: Any = config.scale * config.rank  # peft declares an integer; a float serves as well
    settings: Any = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules="|".join(expressions))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(settings, clip)
    clip.adapters = settings


def is_adapter(name: str) -> bool:
    """Whether a parameter is one of the small matrices."""
    return ".lora_A." in name or ".lora_B." in name


def merged(weights: Mapping[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Weights of a model with adapters as those of open_clip's model without them: W + scale B A."""
    whole = {}
    for name, value in weights.items():
        if is_adapter(name):
            continue
        layer, adapted, kind = name.partition(BASE)
        if adapted and kind == "weight":
            a, b = (weights[f"{layer}.lora_{side}.default.weight"] for side in "AB")
            value = value + config.scale * (b @ a)
        whole[f"{layer}.{kind}" if adapted else name] = value
    return whole


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model."""

    settings: Any
    """peft's configuration."""
    tensors: Mapping[str, Tensor]
    """By the names of the model's parameters."""
    base: str
    """Digest of the weights beside which they are trained."""

    def save(self, folder: Path) -> list[Path]:
        """Write the two files that `peft.PeftModel.from_pretrained` reads, into an existing folder."""
        self.settings.save_pretrained(folder)
        tensors = {IN_PEFT + name.replace(".default.", "."): value for name, value in self.tensors.items()}
        save_tensors(tensors, folder / ADAPTER_FILES[1])
        return [folder / name for name in ADAPTER_FILES]


def read_adapters(folder: Path) -> dict[str, Tensor]:
    """What `Adapters.save` wrote, by the names of the model's parameters."""
    stored = load_tensors(folder / ADAPTER_FILES[1])
    return {
        re.sub(r"\.(lora_[AB])\.", r".\1.default.", name.removeprefix(IN_PEFT)): value for name, value in stored.items()
    }


def lock_towers(clip: Any, *, image: int | None, text: int | None) -> None:
    """Freeze towers in place, but for so many blocks at their ends; None does not lock a tower.

    Raises:
        UserError: This architecture cannot be locked so, or nothing would be left to train.
    """
    for side, unlocked in (("image", image), ("text", text)):
        if unlocked is None:
            continue
        before = sum(p.requires_grad for p in clip.parameters())
        try:
            with next(clip.parameters()).device:  # where open_clip makes the frozen batch norms
                if side == "image":
                    clip.lock_image_tower(unlocked_groups=unlocked, freeze_bn_stats=True)
                else:
                    clip.lock_text_tower(unlocked_layers=unlocked, freeze_layer_norm=True)
            after = sum(p.requires_grad for p in clip.parameters())
            problem = "the whole tower stays trainable" if after == before else ""
        except (AssertionError, NotImplementedError, AttributeError, TypeError, RuntimeError) as error:
            problem = str(error) or type(error).__name__
        if problem:
            raise UserError(
                f"model.lock_{side}: open_clip cannot lock this architecture's {side} tower with {unlocked} blocks "
                f"unlocked ({problem})."
            )
    learned = (parameter for name, parameter in clip.named_parameters() if not name.startswith("logit_"))
    if not any(parameter.requires_grad for parameter in learned):  # the logit scale belongs to the objective
        raise UserError("Both towers are locked: nothing is left to train. Unlock one, or some of its last blocks.")


def check_constant_image_tower(visual: nn.Module) -> None:
    """Check that the outputs of an image tower, as it is trained, depend on the image alone for as long as a run takes.

    Raises:
        UserError: Its weights are trained, its batch norms follow the batches, or it drops something at random.
    """
    drops = ("p", "drop_prob", "prob", "share", "dropout")  # of torch, timm, open_clip and ours
    why = ""
    for name, module in visual.named_modules():
        if isinstance(module, _BatchNorm):
            why = f"the batch norm visual.{name} follows the batches"
        elif "drop" in type(module).__name__.lower() or isinstance(module, nn.MultiheadAttention):
            shares = (getattr(module, key, None) for key in drops)
            if share := next((value for value in shares if isinstance(value, float | int) and value), 0):
                kind, patches = type(module).__name__, "for patches, set model.patch_dropout=0"
                why = f"visual.{name} ({kind}) drops a random share of {share:g} ({patches})"
    if trained := [name for name, parameter in visual.named_parameters() if parameter.requires_grad]:
        why = f"visual.{trained[0]} is trained (open_clip's lock leaves the projection behind timm's towers trainable)"
    if why:
        raise UserError(
            f"data.image_features needs an image tower that is wholly locked and always computes the same, and {why}. "
            "Change that, or leave data.image_features out."
        )
