"""Helpers of the objectives' tests: features, contexts, and normalizers as the papers write them."""

import torch
import torch.nn.functional as F

from pipeline.distributed.world import World
from pipeline.objectives import ObjectiveContext


def context(batch_size, dim=16, **facts):
    defaults: dict[str, object] = {
        "dim": dim, "batch_size": batch_size, "dataset_size": 4 * batch_size, "steps_per_epoch": 4, "total_steps": 40,
        "world": World(), "device": torch.device("cpu"), "dtype": torch.float64,
    }  # fmt: skip
    return ObjectiveContext(**{**defaults, **facts})


def unit_features(batch_size, dim=16, *, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch_size, dim)
    return list(F.normalize(torch.randn(shape, generator=generator, dtype=dtype), dim=2).unbind(0))


def normalizers(image, text, tau, *, equal=None):
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


def relative_error(ours, reference):
    ours, reference = ours.detach(), reference.detach()
    return float((ours - reference).abs().max() / reference.abs().max().clamp_min(1e-300))


def assert_exact(objective, output, loss, *inputs, tolerance=1e-10):
    """The output is the loss as written, with autograd's gradients by image, text and, if it is given, temperature."""
    found = (output.grad_image, output.grad_text, objective._pending.tau_gradient)[: len(inputs)]
    assert relative_error(output.loss, loss) < tolerance
    for ours, expected in zip(found, torch.autograd.grad(loss, inputs, retain_graph=True), strict=True):
        assert relative_error(ours, expected) < tolerance
