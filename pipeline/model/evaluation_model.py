"""Load a model for evaluation, with its preprocessing and tokenizer; `score` compares images and texts under it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model.architectures import Architecture
from pipeline.model.finetuning import LoraConfig
from pipeline.model.model_folder import create_from, weights_digest
from pipeline.model.starting_weights import start_of
from pipeline.model.towers import ModelConfig, Towers, build_towers, without_weights
from pipeline.pictures.pixels import Colour, orientation, read_file, read_rgb, to_rgb, upright


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
        """`weights_digest` of the model; a validation never asks for it."""
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


def load_for_evaluation(spec: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> EvaluationModel:
    """Load a checkpoint or published weights for evaluation.

    Args:
        spec: One of our checkpoint folders, any folder with `open_clip_config.json` (a hub download), or a `CLIPModel`
            of transformers; a run's folder, of which the latest checkpoint is loaded; `hf-hub:OWNER/NAME`; or
            `ARCH:PRETRAINED`, where PRETRAINED is an open_clip tag, a weights file or a folder.
        device: Where to put the model.

    Raises:
        UserError: There is no model at `spec`, or the weights do not fit the architecture.
    """
    start = start_of(os.fspath(spec))
    clip, architecture = create_from(start)
    return for_evaluation(Towers(clip).to(device), architecture, source=str(start.folder or spec))


def copy_for_evaluation(
    config: ModelConfig, weights: Mapping[str, Tensor], *, device: torch.device, source: str, background: Colour
) -> EvaluationModel:
    """New towers of a `model` section with these weights by open_clip's names, as `load_for_evaluation` has them."""
    # The same attention as in `neuclip evaluate`, so that both compute the same scores.
    plain = replace(without_weights(config), packed_attention=False, lora=LoraConfig())
    towers, architecture = build_towers(plain, seed=0)
    towers.clip.load_state_dict(dict(weights))
    return for_evaluation(towers.to(device), replace(architecture, background=background), source=source)


def for_evaluation(towers: Towers, architecture: Architecture, *, source: str) -> EvaluationModel:
    """Turn towers in memory into an `EvaluationModel`. Its digest equals that of a checkpoint with the same weights."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform = image_transform_v2(PreprocessCfg(**architecture.preprocess_cfg), is_train=False)
    return EvaluationModel(towers.eval(), architecture, transform, source)


def score(
    model: str | os.PathLike[str] | EvaluationModel,
    images: Sequence[Any] | Any,
    texts: Sequence[str] | str,
    *,
    matrix: bool = False,
    batch_size: int = 64,
) -> Tensor:
    """Cosine similarities of images and texts: the CLIP score, without the temperature.

    Args:
        model: What `load` takes or returns.
        images: Paths or PIL images, n in all; a single one need not be in a list.
        texts: Captions, m in all; a single one need not be in a list.
        matrix: Compare every image with every text, instead of image i with text i (n = m).
        batch_size: Images or texts that are encoded at a time.

    Returns:
        fp32 values in [-1, 1] on the CPU: [n] of the pairs, [] of a single image and a single text (`float` takes it),
        or always [n, m] with `matrix`.

    Raises:
        UserError: The numbers of images and texts differ, an image cannot be read, or `batch_size` is below 1.
    """
    if batch_size < 1:
        raise UserError(f"batch_size = {batch_size} must be at least 1.")
    one_image, one_text = isinstance(images, str | Path) or hasattr(images, "convert"), isinstance(texts, str)
    images, texts = [images] if one_image else images, [texts] if isinstance(texts, str) else texts
    if not matrix and len(images) != len(texts):
        raise UserError(
            f"{len(images)} images and {len(texts)} texts were given: give one text per image, or matrix=True to "
            "compare every image with every text."
        )
    loaded = model if isinstance(model, EvaluationModel) else load_for_evaluation(model)
    image, text = _features(loaded, images, size=batch_size), _features(loaded, texts, size=batch_size, of_texts=True)
    if matrix:
        return image @ text.T
    pairs = (image * text).sum(1)
    return pairs[0] if one_image and one_text else pairs


def _features(model: EvaluationModel, items: Sequence[Any], *, size: int, of_texts: bool = False) -> Tensor:
    """[n, d] unit-norm features on the CPU."""
    device, parts = next(model.towers.parameters()).device, [torch.empty(0, model.dim)]
    for start in range(0, len(items), size):
        batch = items[start : start + size]
        if of_texts:
            features = model.encode_text(model.tokenize(list(batch)).to(device))
        else:
            opened = (model.preprocess(_open(image, model.architecture.background)) for image in batch)
            features = model.encode_image(torch.stack([*opened]).to(device))
        parts.append(features.float().cpu())
    return torch.cat(parts)


def _open(image: Any, background: Colour) -> Any:
    """A PIL image in RGB, as a viewer shows it: cameras store turned pictures with a note to turn them back (EXIF)."""
    try:
        if isinstance(image, str | Path):
            return read_rgb(read_file(image), background=background, turned=True)
        return upright(to_rgb(image, background), orientation(image))  # `to_rgb` has loaded it
    except (OSError, ValueError) as error:  # the latter for images, and paths with a NUL
        raise UserError(f"The image {image} cannot be read ({error}).") from error
