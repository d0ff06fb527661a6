"""Maths of the NPN of prototypes in closed form: pure functions, no autograd graph.

    alpha_i = log( eps + (1/m) sum_j exp( (e_i . W_j / |W_j| - s_ii) / tau ) )          NeuCLIP, equations (10) and (11)

Shape legend: B anchors, d feature dimension, m prototypes, R rows of a block. Anchors are unit-norm features.

Beside its two matrix products an update costs passes over [B, m] and [m, d]. Factors that are constant along a row or a
column get no pass of their own: 1/(|W_j| tau) is applied in a pass over the prototypes or the product, s_ii is
subtracted from the scalars of the row, and the residuals r_i are multiplied into the anchors, the smallest factor of
the second product. The remaining passes are in `kernels`: softmax, the prototypes' norms, and the optimizer's step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pipeline.objectives.npn.kernels import Passes, Prototypes
from pipeline.objectives.pairwise import Workspace

MAX_LOG_RATIO = 30.0
"""Ratios saturate at exp(30), about 1e13, so that their squares stay finite in fp32."""
_CPU_BLOCK, _GPU_BLOCK = 2**21, 2**25
"""Elements of one [R, m] block: bounds the memory, and is large enough for efficient products."""

NpnObjective = Literal["unified", "separate"]


@dataclass(frozen=True)
class Anchors:
    """One side of a batch as an NPN sees it."""

    features: Tensor
    """[B, d], unit-norm."""
    positive: Tensor
    """s_ii, [B]."""
    log_target: Tensor
    """log(eps + g_i), [B]."""
    tau: Tensor
    """Scalar."""
    log_eps: float
    low: Tensor | None = None
    """The features in bf16 where matrix products run in bf16."""
    ids: Tensor | None = None
    """Sample ids, [B], where prototypes of the same sample are to be excluded."""

    def __len__(self) -> int:
        return self.positive.shape[0]

    def take(self, rows: slice) -> Anchors:
        low, ids = (None if x is None else x[rows] for x in (self.low, self.ids))
        return replace(
            self,
            features=self.features[rows],
            positive=self.positive[rows],
            log_target=self.log_target[rows],
            low=low,
            ids=ids,
        )


def log_normalizer(anchors: Anchors, at: Prototypes, *, passes: Passes) -> Tensor:
    """alpha of each anchor, [B]; `at` is as from `passes.prepare`, in bf16 if the anchors have `low`."""
    parts = []
    for part, z in _products(anchors, at, passes):
        shift, total = passes.sums(z, at)
        log_sum = passes.all_ranks(shift, total)
        sums = (shift, total) if log_sum is None else (log_sum, None)
        alpha, _ = passes.run(normalizer_of_mean, sums[0], part, passes.live(at), sums[1])
        parts.append(alpha)
    return torch.cat(parts)


def unit_gradient(
    anchors: Anchors, at: Prototypes, *, objective: NpnObjective, passes: Passes
) -> tuple[Tensor, Tensor]:
    """G = dL/dU, [m, d], of which `at.tangent` makes dL/dW, and alpha at these prototypes, [B].

    G is bf16 if one bf16 matrix product computed it, else in the precision of W. It may be a workspace's buffer, which
    the next gradient overwrites.

    unified: L of equation (12), dL/d alpha_i = tau r_i / B, r_i = 1 - (eps + g_i) / exp(alpha_i).
    separate: L = mean_i (alpha_i - log(eps + g_i))^2 / 2, as in section 5.2; r_i = (alpha_i - log(eps + g_i)) / tau.
    Both: P_ij = r_i exp(z_ij - log m - alpha_i) / B, z_ij = (cos(e_i, W_j) - s_ii) / tau, G_j = sum_i P_ij e_i.
    """
    total, alphas, shape, space = None, [], tuple(at.weight.shape), passes.space
    for part, z in _products(anchors, at, passes):
        powers, shift, sums = passes.exponentials(z, at)
        del z  # on a GPU it is no buffer of the workspace, and its memory is free for the product
        log_sum = passes.all_ranks(shift, sums)
        pull, alpha = passes.run(_pull, (shift, sums, log_sum), part, passes.live(at), objective, len(anchors))
        alphas.append(alpha)
        if pull.dtype != at.weight.dtype:
            product = _matmul_low(powers.T, pull, "low_gradient", space)
            if part is anchors:  # one block and no sum
                total = product
            elif total is None:  # sums over blocks are in the precision of W
                total = space.take("gradient", shape, like=at.weight).copy_(product)
            else:
                total.add_(product)
        elif total is None:
            total = torch.mm(powers.T, pull, out=space.take("gradient", shape, like=at.weight))
        else:
            total.addmm_(powers.T, pull)
    assert total is not None  # there are anchors
    return total, torch.cat(alphas)


def alpha_slopes(anchors: Anchors, weight_md: Tensor, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d alpha / d (own feature [b, d], partner's feature [b, d], tau [b]) of b anchors."""
    unit = weight_md / weight_md.norm(dim=1, keepdim=True)
    full, passes, slopes, start = replace(anchors, low=None), Passes(), [], 0
    at = passes.prepare(weight_md, full.tau)
    for part, z in _products(full, at, passes):
        powers, shift, total = passes.exponentials(z, at)
        _, share = normalizer_of_mean(shift, part, len(weight_md), total)
        rows = slice(start, start := start + len(part))
        slopes.append(mean_slopes(part, (powers @ unit) * (share / total)[:, None], share, partners_bd[rows]))
    first, second, third = (torch.cat(parts) for parts in zip(*slopes, strict=True))
    return first, second, third


def mean_slopes(anchors: Anchors, mean_bd: Tensor, share: Tensor, partners_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slopes of alpha = log(eps + mean over j of exp((e . x_j - s) / tau)), as `alpha_slopes` returns them.

    mean_bd is the mean of x_j under the softmax weights, times `share`, the mean's share of exp(alpha), [b]. The
    anchor's feature is taken as unit-norm: the normalisation in the encoder removes the radial part.
    """
    to_own = (mean_bd - share[:, None] * partners_bd) / anchors.tau
    to_partner = -share[:, None] * anchors.features / anchors.tau
    cosine = (mean_bd * anchors.features).sum(1)  # share-weighted mean of cos(e, x_j)
    return to_own, to_partner, (share * anchors.positive - cosine) / anchors.tau.square()


def _products(anchors: Anchors, at: Prototypes, passes: Passes) -> Iterator[tuple[Anchors, Tensor]]:
    """Blocks of R anchors and their products with the prototypes' directions, [R, m], before `at.scale` is applied.

    On a CPU the products are in a buffer that the next block overwrites: memory O(R m).
    """
    ranks = passes.division.world.size if passes.division else 1
    most = -(-passes.live(at) // ranks)  # the same blocks on all ranks
    step = max(1, (_CPU_BLOCK if at.weight.device.type == "cpu" else _GPU_BLOCK) // most)
    for start in range(0, len(anchors), step):
        part = anchors.take(slice(start, start + step)) if step < len(anchors) else anchors
        if part.low is None:
            out = passes.space.take("products", (len(part), len(at.weight)), like=part.features)
            yield part, torch.mm(part.features, at.directions.T, out=out)
        else:
            yield part, _matmul_low(part.low, at.directions.T, "low_products", passes.space)


def normalizer_of_mean(
    shift: Tensor, anchors: Anchors, m: int | Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """alpha, [..., R], and the mean's share of exp(alpha), [..., R]; the rest is eps.

    shift: log of the sum over j of exp(e . x_j / tau), [..., R], up to the factor `total` of the sum, [..., R];
    m: the number of x_j, for each anchor if they differ, [R].
    """
    log_sum = shift if total is None else shift + total.log()
    log_m = m.clamp(min=1).log() if isinstance(m, Tensor) else math.log(m)
    log_mean = log_sum - log_m - anchors.positive / anchors.tau
    alpha = torch.logaddexp(log_mean, log_mean.new_full((), anchors.log_eps))
    return alpha, torch.exp(log_mean - alpha)


def _pull(
    sums: tuple[Tensor, Tensor, Tensor | None], anchors: Anchors, m: int, objective: NpnObjective, size: int
) -> tuple[Tensor, Tensor]:
    """r_i share_i e_i / (sum_j p_ij size), [R, d], the other factor of p in the gradient's product; and alpha, [R].

    sums: t_i and s_i of the own prototypes and, if these are divided, the log-sum over all ranks'; m: those of all
    ranks; size: B.
    """
    shift, total, log_sum = sums
    alpha, share = (
        normalizer_of_mean(shift, anchors, m, total) if log_sum is None else normalizer_of_mean(log_sum, anchors, m)
    )
    if objective == "unified":
        residual = 1.0 - torch.exp((anchors.log_target - alpha).clamp(max=MAX_LOG_RATIO))
    else:
        residual = (alpha - anchors.log_target) / anchors.tau
    weight = residual * share / ((total if log_sum is None else torch.exp(log_sum - shift)) * size)
    weighted = anchors.features * weight[:, None]
    return weighted if anchors.low is None else weighted.to(anchors.low.dtype), alpha


def _matmul_low(a: Tensor, b: Tensor, name: str, space: Workspace) -> Tensor:
    """A product of bf16 matrices, accumulated in fp32; the result is fp32 on a GPU and bf16 on a CPU."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b, out=space.take(name, (a.shape[0], b.shape[1]), like=a))
