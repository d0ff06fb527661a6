"""Distillation of a teacher's similarities: the relational loss of MobileCLIP and of open_clip's `DistillClipLoss`.

    L = mean_i KL(q_i || p_i) / 2 + mean_i KL(q'_i || p'_i) / 2,    p_i = softmax_j(s_ij / tau_i)

with s the student's similarities of the global batch, q_i the same of the teacher at its own temperature, and p', q'
for texts as anchors. It is the distillation loss of MobileCLIP (Vasu et al. 2024, arXiv 2311.17049). open_clip uses the
cross-entropy, which differs from the KL divergence by a constant of the teacher and has the same gradient.

Shape legend: B global batch, b rows of this rank, d and e feature dimensions of student and teacher. A pair is (image
side, text side).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.distributed.world import World
from pipeline.objectives.pairwise import row_blocks
from pipeline.objectives.registry import Pair


@dataclass(frozen=True)
class Teacher:
    """A teacher's features of this rank's samples."""

    image: Tensor
    """Unit-norm [b, e]."""
    text: Tensor
    """Unit-norm [b, e]."""
    tau: float
    """The teacher's temperature."""


def relational_loss(
    own: Pair, features: Pair, tau: Tensor, *, teacher: Teacher, world: World
) -> tuple[Tensor, Pair, Tensor]:
    """The loss over the global batch and its exact derivatives. Collective: the teacher's features, 8 scalars a row.

    Args:
        own: The student's unit-norm features of this rank, [b, d] each.
        features: Those of all ranks, [B, d] each.
        tau: The student's temperature of each anchor, [2, B].
        teacher: Its features of this rank's samples.
        world: The ranks.

    Returns:
        The loss; its gradients by this rank's features, [b, d] each; and B times those by each anchor's tau, [B, 2].
    """
    rows, size = world.rows(len(own[0])), len(features[0])
    guide = (teacher.image.to(own[0].dtype), teacher.text.to(own[0].dtype))
    guides = (world.all_gather(guide[0]), world.all_gather(guide[1]))
    scalars = torch.empty(len(own[0]), 2, 4, dtype=own[0].dtype, device=own[0].device)
    for side in (0, 1):
        for block in row_blocks(len(own[side]), size, device=own[side].device):
            s = own[side][block] @ features[1 - side].T
            t = guide[side][block] @ guides[1 - side].T / teacher.tau
            tau_b = tau[side][rows][block]
            log_z, log_y = (s / tau_b[:, None]).logsumexp(1), t.logsumexp(1)
            log_p, log_q = s / tau_b[:, None] - log_z[:, None], t - log_y[:, None]
            divergence = (log_q.exp() * (log_q - log_p)).sum(1)
            slope = ((log_q.exp() - log_p.exp()) * s).sum(1) / tau_b**2
            scalars[block, side] = torch.stack([divergence, slope, log_z, log_y], 1)
    divergences, slopes, log_z, log_y = world.all_gather(scalars).unbind(2)

    gradients = []
    for side in (0, 1):
        gradient, other = torch.empty_like(own[side]), 1 - side
        for block in row_blocks(len(gradient), size, device=gradient.device):
            s = own[side][block] @ features[other].T
            t = guide[side][block] @ guides[other].T / teacher.tau
            here = slice(rows.start + block.start, rows.start + block.stop)
            tau_b, z_b, y_b = tau[side][here, None], log_z[here, side, None], log_y[here, side, None]
            pull = ((s / tau_b - z_b).exp() - (t - y_b).exp()) / tau_b  # rows as anchors
            pull += ((s / tau[other] - log_z[:, other]).exp() - (t - log_y[:, other]).exp()) / tau[other]  # columns
            gradient[block] = pull @ features[other] / (2 * size)
        gradients.append(gradient)
    return divergences.mean(0).sum() / 2, (gradients[0], gradients[1]), slopes / 2
