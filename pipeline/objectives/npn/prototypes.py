"""Maths of the normalizer-prediction network (NPN) of prototypes, in closed form: pure functions, no autograd graph.

    alpha_i = log( eps + (1/m) sum_j exp( (e_i . W_j / |W_j| - s_ii) / tau ) )          NeuCLIP, equations (10) and (11)

Shape legend: B anchors, d feature dimension, m prototypes, R rows of a block. Anchors are unit-norm features.

What an update costs beside its two GEMMs are passes over [B, m] and [m, d], and on a CPU they are the part that is easy
to do badly. So whatever is constant along a row or a column makes no pass of its own: 1/(|W_j| tau) joins a pass over
the prototypes or over the product, s_ii the scalars of the row, and the anchors (small) carry the residuals r_i into
the second GEMM. What is left is in `passes`: softmax, the prototypes' norms, and the optimizer's step on the tangent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pipeline.objectives.npn.kernels import FUSED, Passes, Prototypes, UnitGradient, pieces
from pipeline.objectives.workspace import Workspace

# exp(30) is about 1e13: a ratio beyond it saturates, so that its square stays finite in fp32.
MAX_LOG_RATIO = 30.0
# Elements of one [R, m] block, which bounds the memory and feeds a GEMM.
_CPU_BLOCK, _GPU_BLOCK = 2**21, 2**25

NpnObjective = Literal["unified", "separate"]


@dataclass(frozen=True)
class Anchors:
    """One side of a batch as an NPN sees it.

    features: [B, d] unit-norm. positive: s_ii, [B]. log_target: log(eps + g_i), [B]. tau: scalar. log_eps: number.
    low: the features in bf16 where GEMMs run in bf16, else None.
    """

    features: Tensor
    positive: Tensor
    log_target: Tensor
    tau: Tensor
    log_eps: float
    low: Tensor | None = None

    def __len__(self) -> int:
        return self.positive.shape[0]

    def take(self, rows: slice) -> Anchors:
        low = None if self.low is None else self.low[rows]
        return replace(
            self,
            features=self.features[rows],
            positive=self.positive[rows],
            log_target=self.log_target[rows],
            low=low,
        )

    def full_precision(self) -> Anchors:
        return replace(self, low=None)


def log_normalizer(
    anchors: Anchors, at: Prototypes, *, workspace: Workspace | None = None, passes: Passes = FUSED
) -> Tensor:
    """alpha of each anchor, [B]. Args: at: as from `prepare`, for these anchors."""
    space, found = workspace or Workspace(), []
    for part, z in _products(anchors, at, space):
        shift, total = passes.sums(z, at, space)
        alpha, _ = passes.run(_predict, shift, total, part, len(at.weight))
        found.append(alpha)
    return torch.cat(found)


def loss_gradient(anchors: Anchors, weight_md: Tensor, *, objective: NpnObjective = "unified") -> tuple[Tensor, Tensor]:
    """dL/dW, [m, d], and alpha under this W, [B].

    unified: L of equation (12), dL/d alpha_i = tau r_i / B, r_i = 1 - (eps + g_i) / exp(alpha_i).
    separate: L = mean_i (alpha_i - log(eps + g_i))^2 / 2, as in section 5.2.
    With P_ij = r_i exp(z_ij - log m - alpha_i) / B and G_j = sum_i P_ij e_i, both are
    dL/dW_j = (G_j - (G_j . U_j) U_j) / |W_j|, U_j = W_j / |W_j|; for `separate` r_i = (alpha_i - log(eps + g_i)) / tau.
    """
    space = Workspace()
    gradient, alpha = unit_gradient(anchors, prepare(anchors, weight_md, space), objective=objective, workspace=space)
    return torch.cat([gradient.tangent(rows) for rows in pieces(weight_md)]), alpha


def prepare(anchors: Anchors, weight_md: Tensor, space: Workspace, passes: Passes = FUSED) -> Prototypes:
    """The prototypes for GEMMs in the precision of the anchors."""
    dtype = weight_md.dtype if anchors.low is None else torch.bfloat16
    return passes.prepare(weight_md, anchors.tau, dtype=dtype, space=space)


def unit_gradient(
    anchors: Anchors, at: Prototypes, *, objective: NpnObjective, workspace: Workspace, passes: Passes = FUSED
) -> tuple[UnitGradient, Tensor]:
    """G of `loss_gradient`, from which its tangent is dL/dW, and alpha. Args: at: as from `prepare`."""
    total, alphas = None, []
    for part, z in _products(anchors, at, workspace):
        powers, shift, sums = passes.exponentials(z, at, workspace)
        del z  # on a GPU no buffer of the workspace: its memory is free for the product
        pull, alpha = passes.run(_pull, shift, sums, part, len(at.weight), objective, len(anchors))
        total = _add_product(total, powers, pull, at, workspace, whole=part is anchors)
        alphas.append(alpha)
    assert total is not None  # there are anchors
    return UnitGradient(total, at), torch.cat(alphas)


def _add_product(
    total: Tensor | None, powers: Tensor, pull: Tensor, at: Prototypes, space: Workspace, *, whole: bool
) -> Tensor:
    """total + p^T pull, [m, d]. Sums over blocks are in the precision of W; `whole`: there is one block, and no sum."""
    shape = tuple(at.weight.shape)
    if pull.dtype == at.weight.dtype:
        if total is None:
            return torch.mm(powers.T, pull, out=space.take("gradient", shape, like=at.weight))
        return total.addmm_(powers.T, pull)
    product = _matmul_low(powers.T, pull, "low_gradient", space)
    if whole:
        return product
    return space.take("gradient", shape, like=at.weight).copy_(product) if total is None else total.add_(product)


def alpha_slopes(anchors: Anchors, weight_md: Tensor, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of alpha with respect to the anchor's own feature, its partner's feature and the temperature.

    The anchor's feature counts as unit-norm: the normalisation in the encoder removes the radial part.
    Args: partners_bd: the features of the anchors' partners, [b, d].
    Returns: d alpha/d e [b, d], d alpha/d partner [b, d], d alpha/d tau [b].
    """
    unit = weight_md / weight_md.norm(dim=1, keepdim=True)
    to_own, to_partner, to_tau = torch.empty_like(partners_bd), torch.empty_like(partners_bd), []
    full, space = anchors.full_precision(), Workspace()
    at, start = prepare(full, weight_md, space), 0
    for part, z in _products(full, at, space):
        powers, shift, total = FUSED.exponentials(z, at, space)
        _, share = _predict(shift, total, part, len(weight_md))
        rows = slice(start, start := start + len(part))
        mean_prototype = (powers @ unit) * (share / total)[:, None]
        to_own[rows] = (mean_prototype - share[:, None] * partners_bd[rows]) / anchors.tau
        to_partner[rows] = -share[:, None] * part.features / anchors.tau
        cosine = (mean_prototype * part.features).sum(1)  # share-weighted mean of cos(e, W_j)
        to_tau.append((share * part.positive - cosine) / anchors.tau.square())
    return to_own, to_partner, torch.cat(to_tau)


def _products(anchors: Anchors, at: Prototypes, space: Workspace) -> Iterator[tuple[Anchors, Tensor]]:
    """Blocks of R anchors and their products with the prototypes' directions, [R, m], still without `at.scale`.

    On a CPU a buffer that the next block overwrites: memory O(R m).
    """
    m = at.weight.shape[0]
    step = max(1, (_GPU_BLOCK if at.weight.is_cuda else _CPU_BLOCK) // m)
    for start in range(0, len(anchors), step):
        part = anchors.take(slice(start, start + step)) if step < len(anchors) else anchors
        if part.low is None:
            out = space.take("products", (len(part), m), like=part.features)
            yield part, torch.mm(part.features, at.directions.T, out=out)
        else:
            yield part, _matmul_low(part.low, at.directions.T, "low_products", space)


def _predict(shift: Tensor, total: Tensor, anchors: Anchors, m: int) -> tuple[Tensor, Tensor]:
    """alpha, [R], and the share of the prototypes in the sum of which it is the logarithm, the rest being eps, [R]."""
    log_mean = shift + total.log() - math.log(m) - anchors.positive / anchors.tau
    alpha = torch.logaddexp(log_mean, log_mean.new_full((), anchors.log_eps))
    return alpha, torch.exp(log_mean - alpha)


def _pull(
    shift: Tensor, total: Tensor, anchors: Anchors, m: int, objective: NpnObjective, size: int
) -> tuple[Tensor, Tensor]:
    """r_i share_i e_i / (sum_j p_ij size), [R, d], by which p is multiplied in the gradient's GEMM; and alpha, [R]."""
    alpha, share = _predict(shift, total, anchors, m)
    if objective == "unified":
        residual = 1.0 - torch.exp((anchors.log_target - alpha).clamp(max=MAX_LOG_RATIO))
    else:
        residual = (alpha - anchors.log_target) / anchors.tau
    weighted = anchors.features * (residual * share / (total * size))[:, None]
    return weighted if anchors.low is None else weighted.to(anchors.low.dtype), alpha


def _matmul_low(a: Tensor, b: Tensor, name: str, space: Workspace) -> Tensor:
    """A product of bf16 matrices, accumulated in fp32; it comes as fp32 on a GPU, on a CPU there is only bf16."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b, out=space.take(name, (a.shape[0], b.shape[1]), like=a))
