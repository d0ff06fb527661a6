"""Images with captions, peak FLOP rates and FLOP counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch

from pipeline.metrics.mfu import Utilization, known_peak, training_flops
from pipeline.model.towers import ModelConfig
from pipeline.training.observer import captioned_grid, captions_of
from tests.towers import TINY, write_tiny


def test_captions_are_decoded_from_the_tokens() -> None:
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    tokens = tokenizer(["A red dog; 2 cats", "", "word " * 100])
    texts = captions_of(tokens, tokenizer)
    assert texts[:2] == ["a red dog ; 2 cats", ""]
    assert texts[2] == " ".join(["word"] * 75)
    assert captions_of(tokens, object()) == ["", "", ""]


def test_a_grid_shows_every_image_with_its_caption() -> None:
    colours = torch.tensor([[250, 0, 0], [0, 250, 0], [0, 0, 250], [200, 200, 0], [0, 200, 200]], dtype=torch.uint8)
    images = colours[:, :, None, None].expand(5, 3, 16, 16)
    grid = captioned_grid(images, ["", "one two", "", "", "a caption of many words " * 9])
    assert grid.shape == (2 * 200, 4 * 160, 3)
    centres = [grid[200 * row + 80, 160 * column + 80].tolist() for row, column in ((0, 0), (0, 1), (0, 3), (1, 0))]
    assert centres == [colours[i].tolist() for i in (0, 1, 3, 4)]
    ink = [(grid[200 * (i // 4) + 160 :, 160 * (i % 4) :][:40, :160] < 128).any() for i in range(5)]
    assert ink == [False, True, False, False, True]
    assert grid[201:, 160:].min() == 255  # no sixth image


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-32GB", None),
        ("A GPU of tomorrow", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
    ],
)
def test_peaks_are_looked_up_and_never_guessed(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


def test_utilization_is_the_flop_count_over_the_peak(tmp_path: Path) -> None:
    model = ModelConfig(arch=write_tiny(tmp_path), packed_attention=False)
    vision, text = TINY["vision_cfg"], TINY["text_cfg"]

    def tower(tokens: int, width: int, hidden: float) -> float:
        """Return the multiply-adds of one block: q, k, v and output, the two attention products, the MLP."""
        return tokens * width * (4 * width + 2 * hidden) + 2 * tokens**2 * width

    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    width = vision["width"]
    expected = tower(patches + 1, width, width * vision["mlp_ratio"]) + tower(8, text["width"], 4 * text["width"])
    expected += patches * width * 3 * vision["patch_size"] ** 2 + (width + text["width"]) * TINY["embed_dim"]
    flops = training_flops(model)
    assert flops == pytest.approx(3 * 2 * expected, rel=0.01)
    # Shapes depend neither on the initial weights nor on other ranks.
    assert training_flops(replace(model, pretrained="runs/old/checkpoints/step-00000001", sync_batchnorm=True)) == flops
    cpu = torch.device("cpu")
    given = Utilization(model, device=cpu, ranks=2, bf16=False, peak_tflops=1e-6)
    assert given.scalars(100.0) == {"mfu": pytest.approx(100 * flops / 2e6)}
    assert Utilization(model, device=cpu, ranks=2, bf16=True, peak_tflops=None).scalars(100.0) == {}
