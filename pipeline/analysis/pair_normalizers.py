"""Log-normalizers of image-text pairs over a dataset, log mean_j exp(s_ij / tau), for scoring them."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from pipeline.objectives.npn.neuclip import NeuClip
from pipeline.objectives.npn.prototypes import Anchors


class Normalizers(Protocol):
    """Log-normalizers of pairs, log mean_j exp(s_ij / tau) of both sides."""

    def __call__(self, image: Tensor, text: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        """[b, d] unit-norm features of both sides and [b] sample ids -> two [b]."""


class NetworkNormalizers:
    """The prediction of the network of a trained `neuclip` objective."""

    def __init__(self, objective: NeuClip) -> None:
        self._npn, self._config = objective.npn, objective.config
        self.tau = math.exp(-objective.logit_parameters()[0])

    def __call__(self, image: Tensor, text: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        positive = (image * text).sum(1)
        tau, unused = positive.new_tensor(self.tau), torch.zeros_like(positive)
        sides = [Anchors(side, positive, unused, tau, math.log(self._config.eps)) for side in (image, text)]
        first, second = self._npn.predict((sides[0], sides[1]))
        return first + positive / tau, second + positive / tau


class SampledNormalizers:
    """Means over a sample of the dataset's pairs; a pair of the sample is left out of its own mean.

    Args:
        image: [m, d] unit-norm features of the sample.
        text: Likewise.
        sample_ids: [m].
        tau: The temperature.
    """

    def __init__(self, image: Tensor, text: Tensor, sample_ids: Tensor, *, tau: float) -> None:
        self._others, self._ids, self.tau = (text, image), sample_ids, tau

    def __call__(self, image: Tensor, text: Tensor, sample_ids: Tensor) -> tuple[Tensor, Tensor]:
        own = sample_ids[:, None] == self._ids
        counted = (len(self._ids) - own.sum(1)).log()
        first, second = (
            (side @ others.T / self.tau).masked_fill(own, -math.inf).logsumexp(1) - counted
            for side, others in zip((image, text), self._others, strict=True)
        )
        return first, second
