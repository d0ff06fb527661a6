"""Load a model for evaluation: weights, preprocessing and tokenizer of a checkpoint or of published weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model.architectures import Architecture, check_tag, describe, load_open_clip, register
from pipeline.model.finetuning import LoraConfig
from pipeline.model.model_folder import CONFIG_NAME, create_clip, load_folder, weights_digest
from pipeline.model.starting_weights import logit_of, model_folder_in
from pipeline.model.towers import ModelConfig, Towers, build_towers, without_weights


@dataclass(frozen=True)
class EvaluationModel:
    """A model for evaluation: fp32, in eval mode, with its own preprocessing and tokenizer."""

    towers: Towers
    architecture: Architecture
    preprocess: Callable[[Any], Tensor]
    source: str
    """Where the weights are from, for messages and results."""

    @cached_property
    def digest(self) -> str:
        """`weights_digest` of the model, computed when it is first asked for: a validation never does."""
        return weights_digest(self.towers.clip.state_dict())

    @property
    def tokenize(self) -> Callable[[list[str]], Tensor]:
        return self.architecture.tokenize

    @property
    def image_size(self) -> int:
        return self.architecture.image_size

    @property
    def dim(self) -> int:
        return self.architecture.dim

    @torch.no_grad()
    def encode_image(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] preprocessed images -> [B, d] unit-norm fp32."""
        return self.towers.encode_image(image)

    @torch.no_grad()
    def encode_text(self, text: Tensor) -> Tensor:
        """[B, L] tokens -> [B, d] unit-norm fp32."""
        return self.towers.encode_text(text)


def load_for_evaluation(spec: str, *, device: str | torch.device = "cpu") -> EvaluationModel:
    """Load a checkpoint or published weights for evaluation.

    Args:
        spec: One of our checkpoint folders or any folder with `open_clip_config.json` (a hub download); a run's
            folder, of which the latest checkpoint is loaded; or `ARCH:PRETRAINED`, where PRETRAINED is an open_clip
            tag or a weights file.
        device: Where to put the model.

    Raises:
        UserError: There is no model at `spec`, or the weights do not fit the architecture.
    """
    open_clip = load_open_clip()
    folder = model_folder_in(Path(spec))
    if folder is not None:
        clip, source = load_folder(folder), str(folder)
        stored = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        architecture = describe(stored.get("architecture", folder.name), clip, stored["model_cfg"], tokenizer=folder)
    else:
        arch, colon, pretrained = spec.partition(":")
        if not colon or not pretrained:
            raise UserError(
                f"{spec!r} is neither a folder with {CONFIG_NAME}, nor a run with checkpoints, nor ARCH:PRETRAINED "
                "(for example ViT-B-32-quickgelu:openai or ViT-B-32:/path/to/weights.safetensors)."
            )
        name = register(arch)
        if not Path(pretrained).is_file():
            check_tag(name, pretrained)
        clip = create_clip(name, pretrained=pretrained)
        source = spec
        architecture = describe(name, clip, open_clip.get_model_config(name))
    return for_evaluation(Towers(clip, logit=logit_of(clip)).to(device), architecture, source=source)


def copy_for_evaluation(
    config: ModelConfig, weights: Mapping[str, Tensor], *, device: torch.device, source: str
) -> EvaluationModel:
    """Towers of their own with these weights (a state dict by open_clip's names), as `load_for_evaluation` has them.

    Args:
        config: The run's `model` section.
        weights: fp32 values.
        device: Where to put the model.
        source: For messages and results.
    """
    # The same attention as in `neuclip evaluate`, so that both compute the same scores.
    plain = replace(without_weights(config), packed_attention=False, trim_image=False, lora=LoraConfig())
    towers, architecture = build_towers(plain, seed=0)
    towers.clip.load_state_dict(dict(weights))
    return for_evaluation(towers.to(device), architecture, source=source)


def for_evaluation(towers: Towers, architecture: Architecture, *, source: str) -> EvaluationModel:
    """Turn towers in memory into an `EvaluationModel`. Its digest equals that of a checkpoint with the same weights."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform = image_transform_v2(PreprocessCfg(**architecture.preprocess_cfg), is_train=False)
    return EvaluationModel(towers.eval(), architecture, transform, source)
