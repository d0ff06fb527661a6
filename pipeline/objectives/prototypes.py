"""Maths of the normalizer-prediction network (NPN) of prototypes, in closed form: pure functions, no autograd graph.

    alpha_i = log( eps + (1/m) sum_j exp( (e_i . W_j / |W_j| - s_ii) / tau ) )          NeuCLIP, equations (10) and (11)

Shape legend: B anchors, d feature dimension, m prototypes, R rows of a block. Anchors are unit-norm features.

What an update costs beside its two GEMMs are passes over [B, m] and [m, d]. So whatever is constant along a row or a
column makes no pass of its own: 1/|W_j| and 1/tau scale the similarities together, the positive s_ii and the residuals
r_i go to the scalars of the row, and the anchors (small) carry the rows' weights into the second GEMM. On a CPU the
passes follow each other on pieces that stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pipeline.objectives.workspace import Workspace

# exp(30) is about 1e13: a ratio beyond it saturates, so that its square stays finite in fp32.
MAX_LOG_RATIO = 30.0
# Elements of one [R, m] block, which bounds the memory and feeds a GEMM.
_CPU_BLOCK, _GPU_BLOCK = 2**21, 2**25
# Elements of a piece that consecutive passes find in a CPU core's own cache.
_CPU_PIECE = 2**19

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


@dataclass(frozen=True)
class _Block:
    """Softmax over the prototypes for R anchors: softmax_ij = exponentials_ij / total_i."""

    rows: slice
    exponentials: Tensor  # [R, m], fp32 or bf16; a buffer that the next block overwrites
    total: Tensor
    alpha: Tensor
    share: Tensor  # of the sum in alpha that is not eps


def log_normalizer(anchors: Anchors, weight_md: Tensor, *, workspace: Workspace | None = None) -> Tensor:
    """alpha of each anchor, [B]."""
    return torch.cat([block.alpha for block in _softmax_blocks(anchors, weight_md, workspace or Workspace())])


def loss_gradient(
    anchors: Anchors, weight_md: Tensor, *, objective: NpnObjective = "unified", workspace: Workspace | None = None
) -> tuple[Tensor, Tensor]:
    """dL/dW, [m, d] (a buffer of the workspace), and alpha under this W, [B].

    unified: L of equation (12), dL/d alpha_i = tau r_i / B, r_i = 1 - (eps + g_i) / exp(alpha_i).
    separate: L = mean_i (alpha_i - log(eps + g_i))^2 / 2, as in section 5.2.
    With P_ij = r_i exp(z_ij - log m - alpha_i) / B and G_j = sum_i P_ij e_i, both are
    dL/dW_j = (G_j - (G_j . U_j) U_j) / |W_j|, U_j = W_j / |W_j|; for `separate` r_i = (alpha_i - log(eps + g_i)) / tau.
    """
    space = workspace or Workspace()
    gradient, alpha = unit_gradient(anchors, weight_md, objective=objective, workspace=space)
    for rows in pieces(weight_md):
        to_tangent_(gradient[rows], weight_md[rows], space)
    return gradient, alpha


def unit_gradient(
    anchors: Anchors, weight_md: Tensor, *, objective: NpnObjective, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """G of `loss_gradient`, the gradient with respect to W / |W|, and alpha."""
    size = anchors.positive.shape[0]
    gradient, alphas = workspace.take("gradient", tuple(weight_md.shape), like=weight_md), []
    for block in _softmax_blocks(anchors, weight_md, workspace):
        part = anchors.take(block.rows)
        pull = _residual(part, block.alpha, objective) * block.share / (size * block.total)
        weighted, first = part.features * pull[:, None], block.rows.start == 0
        if anchors.low is None:
            torch.addmm(gradient, block.exponentials.T, weighted, beta=0.0 if first else 1.0, out=gradient)
        else:
            product = _matmul_low(block.exponentials.bfloat16().T, weighted.bfloat16(), "low_gradient", workspace)
            gradient.copy_(product) if first else gradient.add_(product)
        alphas.append(block.alpha)
    return gradient, torch.cat(alphas)


def to_tangent_(gradient_md: Tensor, weight_md: Tensor, space: Workspace) -> Tensor:
    """Gradient with respect to W from that with respect to W / |W|, row by row, in place."""
    inverse = 1.0 / weight_md.norm(dim=1)
    product = torch.mul(gradient_md, weight_md, out=space.take("row_products", tuple(weight_md.shape), like=weight_md))
    radial = product.sum(1).mul_(inverse.pow(3))
    return gradient_md.mul_(inverse[:, None]).addcmul_(weight_md, radial[:, None], value=-1.0)


def pieces(matrix: Tensor) -> list[slice]:
    """Rows of a matrix in pieces that several passes can share: on a CPU small ones, elsewhere all at once."""
    rows = matrix.shape[0]
    step = rows if matrix.is_cuda else max(1, _CPU_PIECE // matrix.shape[1])
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def alpha_slopes(anchors: Anchors, weight_md: Tensor, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of alpha with respect to the anchor's own feature, its partner's feature and the temperature.

    The anchor's feature counts as unit-norm: the normalisation in the encoder removes the radial part.
    Args: partners_bd: the features of the anchors' partners, [b, d].
    Returns: d alpha/d e [b, d], d alpha/d partner [b, d], d alpha/d tau [b].
    """
    unit = weight_md / weight_md.norm(dim=1, keepdim=True)
    to_own, to_partner, to_tau = torch.empty_like(partners_bd), torch.empty_like(partners_bd), []
    for block in _softmax_blocks(anchors.full_precision(), weight_md, Workspace()):
        part = anchors.take(block.rows)
        weight = block.share / block.total  # times the exponentials: d alpha / d z
        mean_prototype = (block.exponentials @ unit) * weight[:, None]
        to_own[block.rows] = (mean_prototype - block.share[:, None] * partners_bd[block.rows]) / anchors.tau
        to_partner[block.rows] = -block.share[:, None] * part.features / anchors.tau
        cosine = (mean_prototype * part.features).sum(1)  # share-weighted mean of cos(e, W_j)
        to_tau.append((block.share * part.positive - cosine) / anchors.tau.square())
    return to_own, to_partner, torch.cat(to_tau)


def _softmax_blocks(anchors: Anchors, weight_md: Tensor, space: Workspace) -> Iterator[_Block]:
    """Softmax over the prototypes in blocks of anchors; memory O(R m). The next block overwrites the last one's z."""
    size, m = anchors.positive.shape[0], weight_md.shape[0]
    scale = 1.0 / (weight_md.norm(dim=1) * anchors.tau)
    low = None
    if anchors.low is not None:
        low = space.take("low_weight", tuple(weight_md.shape), like=weight_md, dtype=torch.bfloat16).copy_(weight_md)
    step = max(1, (_GPU_BLOCK if weight_md.is_cuda else _CPU_BLOCK) // m)
    for start in range(0, size, step):
        rows = slice(start, min(start + step, size))
        if low is None:
            out = space.take("products", (rows.stop - rows.start, m), like=weight_md)
            products = torch.mm(anchors.features[rows], weight_md.T, out=out)
        else:
            assert anchors.low is not None
            products = _matmul_low(anchors.low[rows], low.T, "low_products", space)
        top, total = _exponentiate_(products, scale, space)
        log_mean = top + total.log() - math.log(m) - anchors.positive[rows] / anchors.tau
        alpha = torch.logaddexp(log_mean, log_mean.new_tensor(anchors.log_eps))
        yield _Block(rows, products, total, alpha, torch.exp(log_mean - alpha))


def _exponentiate_(products: Tensor, scale: Tensor, space: Workspace) -> tuple[Tensor, Tensor]:
    """Replace cosines times |W_j|, [R, m], by exp(z - top), z = products * scale; returns row maxima and row sums."""
    tops, totals = [], []
    for rows in pieces(products):
        z = part = products[rows]
        if part.dtype != scale.dtype:
            z = space.take("piece", tuple(part.shape), like=scale).copy_(part)
        top = z.mul_(scale).amax(1)
        totals.append(z.sub_(top[:, None]).exp_().sum(1))
        tops.append(top)
        if z is not part:
            part.copy_(z)
    return torch.cat(tops), torch.cat(totals)


def _residual(anchors: Anchors, alpha: Tensor, objective: NpnObjective) -> Tensor:
    if objective == "unified":
        return 1.0 - torch.exp((anchors.log_target - alpha).clamp_(max=MAX_LOG_RATIO))
    return (alpha - anchors.log_target) / anchors.tau


def _matmul_low(a: Tensor, b: Tensor, name: str, space: Workspace) -> Tensor:
    """A product of bf16 matrices, accumulated in fp32; it comes as fp32 on a GPU, on a CPU there is only bf16."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b, out=space.take(name, (a.shape[0], b.shape[1]), like=a))
