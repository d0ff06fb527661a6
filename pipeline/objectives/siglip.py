"""`siglip`: the pairwise sigmoid loss, equal to open_clip's `SigLipLoss`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from pipeline.config import section
from pipeline.objectives import pairwise
from pipeline.objectives.base import Objective
from pipeline.objectives.pairwise import equal_pairs
from pipeline.objectives.registry import ObjectiveContext, ObjectiveOutput, register
from pipeline.objectives.temperature import LearnedScalar, LearnedTemperature, TemperatureConfig, tau_lr_at


@section
class SigLipConfig(TemperatureConfig):
    """Sigmoid loss with a learned scale 1/tau and a learned bias."""

    name: str = "siglip"
    tau_init: float = Field(default=0.1, gt=0)
    bias_init: float = -10.0
    """Initial bias of the logits; it is learned with the temperature's learning rate."""


@register("siglip", SigLipConfig)
class SigLip(Objective):
    """L = -(1/B) sum_ij log sigmoid( y_ij (s_ij / tau + bias) ), y = 1 for the own pair and -1 for all others."""

    config: SigLipConfig
    masks = True

    def __init__(self, config: SigLipConfig, context: ObjectiveContext) -> None:
        self.temperature = LearnedTemperature(config, context)
        self.bias = LearnedScalar(config.bias_init, name="bias", context=context)
        super().__init__(config, context, parts=(self.temperature, self.bias))

    def loss_and_gradients(
        self, image: Tensor, text: Tensor, *, sample_ids: Tensor, keys: Tensor | None = None
    ) -> tuple[ObjectiveOutput, tuple[Tensor, Tensor]]:
        images, texts = self.gather_features(image, text)
        keys = None if keys is None else self.world.all_gather(keys)
        size, first = images.shape[0], self.world.rows(image.shape[0]).start
        scale, bias = 1.0 / self.temperature.value(), self.bias.value
        sums = torch.zeros(3, dtype=image.dtype, device=image.device)  # loss, dL/dscale, dL/dbias of this rank's images
        gradients = []
        for side, (own, others) in enumerate(((image, texts), (text, images))):
            gradient = torch.empty_like(own)
            for rows, s in pairwise.similarities(own, others):
                logits = s * scale + bias
                if keys is not None:
                    equal = equal_pairs(keys, rows=pairwise.shifted(rows, first))
                    logits.masked_fill_(equal, -torch.inf)  # neither loss nor gradient
                pull = torch.sigmoid(logits)  # the gradient of a negative pair; the own pair has sigmoid - 1
                own_pair = logits.diagonal(first + rows.start)
                pull.diagonal(first + rows.start).copy_(-torch.sigmoid(-own_pair))
                if side == 0:
                    own_pair.neg_()
                    sums.add_(torch.stack([F.softplus(logits).sum(), (pull * s).sum(), pull.sum()]))
                torch.mm(pull.mul_(scale / size), others, out=gradient[rows])
            gradients.append(gradient)
        loss, to_scale, to_bias = (self.world.all_gather(sums[None]).sum(0) / size).unbind()
        metrics = {"loss": loss, "tau": self.temperature.value(), "logit_bias": bias.clone()}
        return ObjectiveOutput(loss, gradients[0], gradients[1], metrics), (-to_scale * scale.square(), to_bias)

    def update_state(self, pending: tuple[Tensor, Tensor], *, lr_scale: float) -> None:
        tau_gradient, bias_gradient = pending
        self.temperature.update(tau_gradient, lr_scale=lr_scale)
        self.bias.update(bias_gradient, lr=tau_lr_at(self.config, lr_scale=lr_scale))

    def logit_parameters(self) -> tuple[float, float]:
        return self.temperature.logit_scale(), float(self.bias.value)
