"""Helpers of the objectives' tests: features, contexts, and normalizers as the papers write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.objectives import ObjectiveContext


def context(batch_size: int, dim: int = 16, **facts: object) -> ObjectiveContext:
    defaults: dict[str, object] = {
        "dim": dim, "batch_size": batch_size, "dataset_size": 4 * batch_size, "steps_per_epoch": 4, "total_steps": 40,
        "world": World(), "device": torch.device("cpu"), "dtype": torch.float64,
    }  # fmt: skip
    return ObjectiveContext(**{**defaults, **facts})


def unit_features(batch_size: int, dim: int = 16, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch_size, dim)
    return list(F.normalize(torch.randn(shape, generator=generator, dtype=dtype), dim=2).unbind(0))


def normalizers(
    image: Tensor, text: Tensor, tau: tuple[Tensor, Tensor], *, equal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """g1_i, g2_i: the mean of exp((s_ij - s_ii) / tau_i) over j != i, for both sides; formed naively.

    The terms of pairs that are `equal`, [B, B], are 0.
    """
    s = image @ text.T
    others = ~torch.eye(len(s), dtype=torch.bool)
    others = others if equal is None else others & ~equal
    first, second = (
        torch.exp((m - s.diagonal()[:, None]) / t.expand(len(s))[:, None]).mul(others).sum(1) / (len(s) - 1)
        for m, t in zip((s, s.T), tau, strict=True)
    )
    return first, second


def relative_error(ours: Tensor, reference: Tensor) -> float:
    ours, reference = ours.detach(), reference.detach()
    return float((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-300))


def assert_exact(objective: Any, output: Any, loss: Tensor, *inputs: Tensor, tolerance: float = 1e-10) -> None:
    """The output is the loss as written, with autograd's gradients by image, text and, if it is given, temperature."""
    found = (output.grad_image, output.grad_text, objective._pending.tau_gradient)[: len(inputs)]
    assert relative_error(output.loss, loss) < tolerance
    for ours, expected in zip(found, torch.autograd.grad(loss, inputs, retain_graph=True), strict=True):
        assert relative_error(ours, expected) < tolerance
