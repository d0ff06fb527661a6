"""Model FLOPs utilization: the share of a device's peak that the model's own arithmetic reaches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.model.tower_costs import measure_flops, trained_towers
from pipeline.model.towers import ModelConfig, build_towers, without_weights
from pipeline.model.trimming import why_not_trimmed

# Dense bf16 TFLOP/s (no sparsity) from the vendors' data sheets, by substring of torch's device name; first match wins.
PEAK_BF16_TFLOPS = (
    (("B200",), 2250.0),
    (("GH200",), 989.0),
    (("H200", "NVL"), 835.0),
    (("H200",), 989.0),
    (("H100", "PCIe"), 756.0),
    (("H100", "NVL"), 835.0),
    (("H100",), 989.0),
    (("A100",), 312.0),
    (("L40S",), 362.0),
    (("L40",), 181.0),
    (("L4",), 121.0),
    (("A40",), 149.7),
    (("RTX A6000",), 154.8),
    (("A30",), 165.0),
    (("RTX 4090",), 165.2),
    (("RTX 3090",), 71.0),
)


def known_peak(device_name: str) -> float | None:
    """Dense bf16 TFLOP/s of a GPU by torch's device name; None if it is not in the table."""
    words = device_name.replace("-", " ").split()
    for key, peak in PEAK_BF16_TFLOPS:
        if all(part in words for word in key for part in word.split()):
            return peak
    return None


@dataclass(frozen=True)
class _ForwardFlops:
    """Forward FLOPs of a model's towers."""

    image: float
    """Of an image."""
    text: tuple[float, ...]
    """Of a text, as a polynomial in its tokens (attention is quadratic); constant where texts cannot be trimmed."""
    context_length: int
    trained: tuple[bool, bool]
    """Whether any part of the image tower, and of the text tower, is trained."""


def training_flops(model: ModelConfig, *, text_tokens: float | None = None, images: float = 1.0) -> float:
    """FLOPs of forward and backward for one pair; recomputation and the objective are not counted.

    A tower that is locked as a whole has no backward pass.

    Args:
        model: the recipe's `model` section.
        text_tokens: tokens that the text tower computes per text, where texts are trimmed; None: its context length.
        images: images that the image tower computes per pair: fewer than one if some of its outputs are stored.
    """
    flops = _forward_flops(replace(without_weights(model), sync_batchnorm=False, compile=False))
    tokens = (model.text_tokens or flops.context_length) if text_tokens is None else text_tokens
    of_text = sum(factor * tokens**power for power, factor in enumerate(flops.text))
    for_image, for_text = (3.0 if trained else 1.0 for trained in flops.trained)
    return for_image * images * flops.image + for_text * of_text


@functools.cache
def _forward_flops(model: ModelConfig) -> _ForwardFlops:
    """Measured on the meta device."""
    towers, architecture = build_towers(model, seed=0, device="meta")
    length, size = architecture.context_length, architecture.image_size
    points = [length] if why_not_trimmed(towers.clip) else sorted({1, (1 + length) // 2, length})
    image = measure_flops(towers, image_size=size, context_length=None)
    text = [measure_flops(towers, image_size=size, context_length=tokens) - image for tokens in points]
    curve = tuple(np.polynomial.polynomial.polyfit(points, text, deg=len(points) - 1))
    return _ForwardFlops(image, curve, length, trained_towers(towers))


class Utilization:
    """MFU from samples per second. Reported only where the device's peak is known."""

    def __init__(
        self, model: ModelConfig, *, device: torch.device, ranks: int, bf16: bool, peak_tflops: float | None
    ) -> None:
        """Look up the peak and the FLOPs of the model.

        Args:
            model: The recipe's `model` section.
            device: The device of this rank.
            ranks: The world size.
            bf16: Whether the towers compute in bf16; the table of peaks is for bf16.
            peak_tflops: Peak of one device, set by the user; None: from the table, for a GPU in bf16.
        """
        if peak_tflops is None and device.type == "cuda" and bf16:
            peak_tflops = known_peak(torch.cuda.get_device_name(device))
        self._model, self._peak = model, None if peak_tflops is None else peak_tflops * 1e12 * ranks
        self._tokens, self._images, self._steps = 0.0, 0.0, 0

    def count(self, *, text_tokens: float, images: float = 1.0) -> None:
        """Count a step: tokens per text and images per pair that the towers computed."""
        self._tokens += text_tokens
        self._images += images
        self._steps += 1

    def scalars(self, samples_per_second: float) -> dict[str, float]:
        """{"mfu": share of the peak} over the steps since the last call, or {} if the peak is unknown.

        With stored image features also {"image_features_read": the share of this rank's rows for which they were read}.
        """
        tokens = self._tokens / self._steps if self._steps else None
        images = self._images / self._steps if self._steps else 1.0
        self._tokens, self._images, self._steps = 0.0, 0.0, 0
        stored = {} if self._model.image_features_cache is None else {"image_features_read": 1.0 - images}
        if self._peak is None:
            return stored
        flops = training_flops(self._model, text_tokens=tokens, images=images)
        return {**stored, "mfu": samples_per_second * flops / self._peak}
