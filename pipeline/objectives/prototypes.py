"""Maths of the normalizer-prediction network (NPN) of prototypes, in closed form: pure functions, no autograd graph.

    alpha_i = log( eps + (1/m) sum_j exp( (e_i . W_j / |W_j| - s_ii) / tau ) )          NeuCLIP, equations (10) and (11)

Shape legend: B anchors, d feature dimension, m prototypes. Anchors are unit-norm features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# exp(30) is about 1e13: a ratio beyond it saturates, so that its square stays finite in fp32.
MAX_LOG_RATIO = 30.0


@dataclass(frozen=True)
class Anchors:
    """One side of a batch as an NPN sees it.

    features: [B, d] unit-norm. positive: s_ii, [B]. log_target: log(eps + g_i), [B]. tau: [B]. log_eps: scalar.
    """

    features: Tensor
    positive: Tensor
    log_target: Tensor
    tau: Tensor
    log_eps: float


def log_normalizer(anchors: Anchors, weight_md: Tensor) -> Tensor:
    """alpha of each anchor, [B]."""
    return _alpha(anchors, logits(anchors, weight_md).logsumexp(1), weight_md.shape[0])


def logits(anchors: Anchors, weight_md: Tensor) -> Tensor:
    """z_ij = (cos(e_i, W_j) - s_ii) / tau_i, [B, m]."""
    z = anchors.features @ weight_md.T
    z *= 1.0 / weight_md.norm(dim=1)
    return z.sub_(anchors.positive[:, None]).div_(anchors.tau[:, None])


def loss_gradient(anchors: Anchors, weight_md: Tensor) -> tuple[Tensor, Tensor]:
    """d L / d W of the unified loss (12), [m, d], and alpha under this W, [B].

    With P_ij = r_i exp(z_ij - log m - alpha_i) / B and r_i = 1 - (eps + g_i) / exp(alpha_i):
    G_j = sum_i P_ij e_i and dL/dW_j = (G_j - (G_j . U_j) U_j) / |W_j|, U_j = W_j / |W_j|.
    """
    z = logits(anchors, weight_md)
    alpha = _alpha(anchors, z.logsumexp(1), weight_md.shape[0])
    residual = 1.0 - torch.exp((anchors.log_target - alpha).clamp_(max=MAX_LOG_RATIO))
    p = z.sub_((alpha + math.log(weight_md.shape[0]))[:, None]).exp_()
    p *= (residual / anchors.positive.shape[0])[:, None]
    return tangent(p.T @ anchors.features, weight_md), alpha


def tangent(gradient_md: Tensor, weight_md: Tensor) -> Tensor:
    """Gradient with respect to W from the gradient with respect to W / |W|, row by row; overwrites its input."""
    norm = weight_md.norm(dim=1, keepdim=True)
    radial = (gradient_md * weight_md).sum(1, keepdim=True) / norm.square()
    return gradient_md.addcmul_(weight_md, radial, value=-1.0).div_(norm)


def feature_terms(anchors: Anchors, weight_md: Tensor, others_bd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives of alpha with respect to the anchor's own feature, its partner's feature and its temperature.

    The anchor's feature counts as unit-norm: the normalisation in the encoder removes the radial part.
    Args: others_bd: the features of the anchors' partners, [B, d].
    Returns: d alpha/d e [B, d], d alpha/d partner [B, d], d alpha/d tau [B].
    """
    z = logits(anchors, weight_md)
    alpha = _alpha(anchors, z.logsumexp(1), weight_md.shape[0])
    share = (z - (alpha + math.log(weight_md.shape[0]))[:, None]).exp_()  # sums to 1 - eps / exp(alpha)
    total = share.sum(1, keepdim=True)
    inverse_tau = 1.0 / anchors.tau[:, None]
    unit = weight_md / weight_md.norm(dim=1, keepdim=True)
    to_own = (share @ unit - total * others_bd) * inverse_tau
    to_partner = -total * anchors.features * inverse_tau
    return to_own, to_partner, -(share * z).sum(1) / anchors.tau


def _alpha(anchors: Anchors, log_sum: Tensor, prototypes: int) -> Tensor:
    return torch.logaddexp(log_sum - math.log(prototypes), log_sum.new_tensor(anchors.log_eps))
