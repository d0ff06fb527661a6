"""Similarities of images and texts under a model: the CLIP score of pairs, or all images against all texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.pixels import ImageError, orientation, read_file, read_upright, to_rgb, upright


def score(
    model: str | EvaluationModel,
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
        UserError: The numbers of images and texts differ, or an image cannot be read.
    """
    one_image, one_text = isinstance(images, str | Path) or hasattr(images, "convert"), isinstance(texts, str)
    images = [images] if one_image else images
    texts = [texts] if isinstance(texts, str) else texts
    if not matrix and len(images) != len(texts):
        raise UserError(
            f"{len(images)} images and {len(texts)} texts were given: give one text per image, or matrix=True to "
            "compare every image with every text."
        )
    if isinstance(model, str):
        model = load_for_evaluation(model)
    device = next(model.towers.parameters()).device
    preprocess, size = model.preprocess, max(1, batch_size)

    def image_batch(part: Sequence[Any]) -> Tensor:
        return torch.stack([preprocess(_open(image)) for image in part])

    image = _encode(images, image_batch, model.encode_image, size=size, device=device, dim=model.dim)
    tokenize = model.tokenize
    text = _encode(texts, lambda part: tokenize(list(part)), model.encode_text, size=size, device=device, dim=model.dim)
    if matrix:
        return image @ text.T
    pairs = (image * text).sum(1)
    return pairs[0] if one_image and one_text else pairs


def _encode(
    items: Sequence[Any],
    prepare: Callable[[Sequence[Any]], Tensor],
    encode: Callable[[Tensor], Tensor],
    *,
    size: int,
    device: torch.device,
    dim: int,
) -> Tensor:
    """[n, d] unit-norm features on the CPU."""
    batches: Iterator[Sequence[Any]] = (items[start : start + size] for start in range(0, len(items), size))
    features = [encode(prepare(batch).to(device)).float().cpu() for batch in batches]
    return torch.cat(features) if features else torch.empty(0, dim)


def _open(image: Any) -> Any:
    """A PIL image in RGB, as a viewer shows it: cameras store turned pictures with a note to turn them back (EXIF).

    Raises:
        UserError: The file cannot be read as an image.
    """
    try:
        if isinstance(image, str | Path):
            return read_upright(read_file(image))
        return upright(to_rgb(image), orientation(image))  # `to_rgb` has loaded it
    except (OSError, ImageError) as error:
        raise UserError(f"The image {image} cannot be read ({error}).") from error
