"""NeuCLIP in plain PyTorch with autograd: Algorithm 1 of the paper, line by line. Read this first.

The other modules of this folder do the same in closed form, in the log domain, on many ranks and with rollback; the
tests compare them with this one. It forms exp((s_ij - s_ii) / tau), which leaves fp32's range at small tau: use
float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def batch_normalizers(anchors: Tensor, partners: Tensor, tau: Tensor) -> Tensor:
    """g_i, [B]: the mean of exp((s_ij - s_ii) / tau) over j != i, s_ij = anchor i . partner j."""
    s = anchors @ partners.T
    others = ~torch.eye(len(s), dtype=torch.bool)
    return torch.exp((s - s.diagonal()[:, None]) / tau).mul(others).sum(1) / (len(s) - 1)


def predicted_log_normalizers(anchors: Tensor, partners: Tensor, weight: Tensor, *, tau: Tensor, eps: float) -> Tensor:
    """alpha_i, [B], from the anchors and their partners, [B, d], and prototypes W, [m, d]: equations (10) and (11)."""
    cosine = anchors @ F.normalize(weight, dim=1).T
    positive = (anchors * partners).sum(1, keepdim=True)
    return torch.log(eps + torch.exp((cosine - positive) / tau).mean(1))


class ReferenceNeuClip:
    """State and steps of Algorithm 1; the caller updates encoders and temperature (line 12).

    `restart_every` is T_r, `inner_steps` is T_u, and `lr` is AdaGrad's learning rate.
    """

    def __init__(self, *, rho: float, eps: float, restart_every: int, inner_steps: int, lr: float) -> None:
        self.rho, self.eps, self.restart_every, self.inner_steps, self.lr = rho, eps, restart_every, inner_steps, lr
        self.steps = 0
        self.weights: list[Tensor] = []  # W1 for image anchors, W2 for text anchors, [m, d] each

    def step(self, image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
        """Lines 3 to 11 for the features of a batch, [B, d] each, m = B: the loss, to be differentiated by the
        caller."""
        sides = ((image, text), (text, image))
        if self.steps == 0:
            self.weights = [partners.detach().clone().requires_grad_() for _, partners in sides]
            self.optimizer = torch.optim.Adagrad(self.weights, lr=self.lr)
        elif self.steps % self.restart_every == 0:  # lines 3 and 4
            for weight, (_, partners) in zip(self.weights, sides, strict=True):
                weight.data.copy_(partners)
        for _ in range(self.inner_steps):  # lines 5 to 9
            self.optimizer.zero_grad()
            self.objective(image.detach(), text.detach(), tau.detach()).backward()
            self.optimizer.step()
        self.steps += 1
        for weight in self.weights:
            weight.grad = None
        return self.objective(image, text, tau)  # lines 10 and 11

    def objective(self, image: Tensor, text: Tensor, tau: Tensor) -> Tensor:
        """The mini-batch value of (12) as a function of features, temperature and prototypes."""
        total = torch.zeros(())
        for weight, anchors, partners in zip(self.weights, (image, text), (text, image), strict=True):
            g = batch_normalizers(anchors, partners, tau)
            alpha = predicted_log_normalizers(anchors, partners, weight, tau=tau, eps=self.eps)
            total = total + (torch.exp(-alpha) * (self.eps + g) + alpha).mean()
        return tau * total + 2 * tau * (self.rho - 1)
