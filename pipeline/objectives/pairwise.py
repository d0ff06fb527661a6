"""Pairwise maths shared by all objectives: pure functions, in row blocks, in the log domain.

Shape legend: B global batch, b rows of this rank, d feature dimension. Rows are this rank's own samples of one side,
columns are the whole global batch of the other side; `first` is the column of row 0's own pair. The two sides are one
code path called twice. Memory is O(block x B): similarities are computed again for the gradient rather than kept.

exp(h) is never formed alone: at tau = 0.01 it leaves the range of fp32. Similarities need true fp32 products: TF32
would put an error of about 0.05 on h at tau = 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of one [block, B] temporary: 64 MiB in fp32, large enough that GEMMs stay efficient.
BLOCK_ELEMENTS = 2**24


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows` such that each block has about `BLOCK_ELEMENTS` elements, and at least one row."""
    size = max(1, BLOCK_ELEMENTS // max(1, columns))
    for start in range(0, rows, size):
        yield slice(start, min(rows, start + size))


@dataclass(frozen=True)
class AnchorSide:
    """What the anchors of one side bring to the pairwise gradient; every tensor [n] for n anchors.

    positive: s_ii. tau: temperature. log_weight: w_i such that dL/ds_ij = exp(h_ij + w_i) for j != i.
    pull: -dL/ds_ii, what the own pair is pulled together with.
    """

    positive: Tensor
    tau: Tensor
    log_weight: Tensor
    pull: Tensor

    def take(self, rows: slice) -> AnchorSide:
        return AnchorSide(self.positive[rows], self.tau[rows], self.log_weight[rows], self.pull[rows])


def anchor_statistics(
    anchors_bd: Tensor, others_Bd: Tensor, *, positive_b: Tensor, tau_b: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """The in-batch normalizer of each anchor and what its temperature gradient needs.

    With h_ij = (s_ij - s_ii) / tau_i, returns `log_g = log mean_{j != i} exp(h_ij)` and
    `mean_h = sum_{j != i} softmax(h_i)_j h_ij`, both [b], so that `d log_g_i / d tau_i = -mean_h_i / tau_i`.
    """
    columns = others_Bd.shape[0]
    log_g, mean_h = torch.empty_like(positive_b), torch.empty_like(positive_b)
    for rows in row_blocks(anchors_bd.shape[0], columns):
        h = anchors_bd[rows] @ others_Bd.T
        h.sub_(positive_b[rows, None]).div_(tau_b[rows, None])
        own_pair = h.diagonal(first + rows.start)
        own_pair.fill_(-math.inf)
        log_sum = h.logsumexp(1)
        weight = (h - log_sum[:, None]).exp_()
        own_pair.fill_(0.0)
        mean_h[rows] = weight.mul_(h).sum(1)
        log_g[rows] = log_sum - math.log(columns - 1)
    return log_g, mean_h


def feature_gradient(own_bd: Tensor, others_Bd: Tensor, coefficients: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """`sum_j dL/ds_ij others_j` for each own row i: the loss's gradient with respect to this rank's features, [b, d].

    Args: coefficients: maps a block of similarities [rows, B] and its row slice to dL/ds of the same shape.
    """
    gradient = torch.empty_like(own_bd)
    for rows in row_blocks(own_bd.shape[0], others_Bd.shape[0]):
        gradient[rows] = coefficients(own_bd[rows] @ others_Bd.T, rows) @ others_Bd
    return gradient


def softmax_gradient(own_bd: Tensor, others_Bd: Tensor, *, own: AnchorSide, others: AnchorSide, first: int) -> Tensor:
    """Feature gradient of every softmax objective, for one side.

    A sample's feature is used twice: as an anchor against all others (weights of `own`, [b]) and as a negative of every
    anchor of the other side (weights of `others`, [B]). This needs only the gathered scalars of the other ranks'
    anchors and no gradient collective (FastCLIP, section 4).
    """
    local = slice(first, first + own_bd.shape[0])
    pull = own.pull + others.pull[local]

    def coefficients(s: Tensor, rows: slice) -> Tensor:
        anchor = own.take(rows)
        a = (s - anchor.positive[:, None]).div_(anchor.tau[:, None]).add_(anchor.log_weight[:, None]).exp_()
        a += s.sub_(others.positive).div_(others.tau).add_(others.log_weight).exp_()
        a.diagonal(first + rows.start).copy_(-pull[rows])
        return a

    return feature_gradient(own_bd, others_Bd, coefficients)
