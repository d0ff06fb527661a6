"""Model FLOPs utilization: the share of a device's peak that the model's own arithmetic reaches."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import torch

from pipeline.model.tower_costs import measure_flops
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


def training_flops(model: ModelConfig, *, text_tokens: float | None = None) -> float:
    """FLOPs of forward and backward for one pair; recomputation and the objective are not counted.

    Args:
        model: the recipe's `model` section.
        text_tokens: tokens that the text tower computes per text, where texts are trimmed; None: its context length.
    """
    curve, context_length = _flops_by_text_tokens(replace(without_weights(model), sync_batchnorm=False, compile=False))
    tokens = (model.text_tokens or context_length) if text_tokens is None else text_tokens
    return 3.0 * sum(factor * tokens**power for power, factor in enumerate(curve))


@functools.cache
def _flops_by_text_tokens(model: ModelConfig) -> tuple[tuple[float, ...], int]:
    """Forward FLOPs of a pair as a polynomial in the tokens per text (attention is quadratic), and the context length.

    The polynomial is constant where the model's texts cannot be trimmed.
    """
    towers, architecture = build_towers(model, seed=0, device="meta")
    length, size = architecture.context_length, architecture.image_size
    points = [length] if why_not_trimmed(towers.clip) else sorted({1, (1 + length) // 2, length})
    flops = [measure_flops(towers, image_size=size, context_length=tokens) for tokens in points]
    return tuple(np.polynomial.polynomial.polyfit(points, flops, deg=len(points) - 1)), length


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
        self._tokens, self._steps = 0.0, 0

    def count(self, *, text_tokens: float) -> None:
        """Count a step in which the text tower computed `text_tokens` tokens per text."""
        self._tokens += text_tokens
        self._steps += 1

    def scalars(self, samples_per_second: float) -> dict[str, float]:
        """{"mfu": share of the peak} over the steps since the last call, or {} if the peak is unknown."""
        tokens = self._tokens / self._steps if self._steps else None
        self._tokens, self._steps = 0.0, 0
        if self._peak is None:
            return {}
        return {"mfu": samples_per_second * training_flops(self._model, text_tokens=tokens) / self._peak}
