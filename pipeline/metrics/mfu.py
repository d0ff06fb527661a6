"""Model FLOP utilisation: the share of a device's peak arithmetic that the model's own arithmetic reaches."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.model.tower_costs import measure_towers
from pipeline.model.towers import ModelConfig, build_towers

# Dense bf16 TFLOP/s of the makers' data sheets (no sparsity), by words in torch's name of the device; first hit wins.
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
    """Dense bf16 TFLOP/s of a GPU by torch's name for it; None for one that is not in the table."""
    words = device_name.replace("-", " ").split()
    for key, peak in PEAK_BF16_TFLOPS:
        if all(part in words for word in key for part in word.split()):
            return peak
    return None


def training_flops(model: ModelConfig) -> float:
    """FLOP of forward and backward of one pair (a multiply-add is 2; recomputation and objective not counted)."""
    plain = replace(model, pretrained=None, sync_batchnorm=False)  # shapes are all that counts
    towers, architecture = build_towers(plain, seed=0, device="meta")
    length = int(architecture.model_cfg["text_cfg"].get("context_length", 77))
    return 3 * measure_towers(towers, image_size=architecture.image_size, context_length=length).forward_flops


class Utilization:
    """MFU from samples per second. Absent where no peak is known: never guessed."""

    def __init__(
        self, model: ModelConfig, *, device: torch.device, ranks: int, bf16: bool, peak_tflops: float | None
    ) -> None:
        """Args: peak_tflops: of one device, given by the user; None looks the GPU up, when its arithmetic is bf16."""
        if peak_tflops is None and device.type == "cuda" and bf16:
            peak_tflops = known_peak(torch.cuda.get_device_name(device))
        self._peak = None if peak_tflops is None else peak_tflops * 1e12 * ranks
        self._flops = 0.0 if self._peak is None else training_flops(model)

    def scalars(self, samples_per_second: float) -> dict[str, float]:
        """{"mfu": share of the peak}, or nothing."""
        return {} if self._peak is None else {"mfu": samples_per_second * self._flops / self._peak}
