"""A base for objectives whose loss is written down and differentiated by autograd: the loss is all that a method adds.

    @section
    class MarginConfig(TemperatureConfig):
        name: str = "margin"
        margin: float = 0.1


    @register("margin", MarginConfig)
    class Margin(AutogradObjective):
        config: MarginConfig

        def batch_loss(self, image, text, *, tau):
            logits = (image @ text.T - self.config.margin * torch.eye(len(image), device=image.device)) / tau
            labels = torch.arange(len(image), device=image.device)
            return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

Every rank computes the loss of the global batch: [B, B] memory, and no collective beyond the gather of features. The
methods of this project use closed forms instead, which compute only the rank's own rows.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from pipeline.errors import UserError
from pipeline.objectives.base import Objective
from pipeline.objectives.registry import ObjectiveContext, ObjectiveOutput
from pipeline.objectives.temperature import LearnedTemperature, TemperatureConfig


class AutogradObjective(Objective):
    """An objective without state beyond a learned temperature; a method implements `batch_loss`."""

    def __init__(self, config: TemperatureConfig, context: ObjectiveContext) -> None:
        self.temperature = LearnedTemperature(config, context)
        super().__init__(config, context, parts=(self.temperature,))

    @abstractmethod
    def batch_loss(self, image: Tensor, text: Tensor, *, tau: Tensor) -> Tensor:
        """The loss of the global batch, a scalar, the same on every rank.

        Args:
            image: [B, d] unit-norm features.
            text: [B, d] unit-norm features.
            tau: The temperature, a scalar. It is learned if the loss depends on it.
        """

    def loss_and_gradients(
        self, image: Tensor, text: Tensor, *, sample_ids: Tensor
    ) -> tuple[ObjectiveOutput, Tensor | None]:
        rows = self.world.rows(len(image))
        tau = self.temperature.value()
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (*self.gather_features(image, text), tau)]
            loss = self.batch_loss(inputs[0], inputs[1], tau=inputs[2])
            if loss.dim() or not loss.requires_grad:
                raise UserError(
                    f"{type(self).__name__}.batch_loss returned a tensor of shape {tuple(loss.shape)}"
                    f"{'' if loss.requires_grad else ' without a graph'}: it must return a scalar computed from the "
                    "features that it is given."
                )
            to_image, to_text, to_tau = torch.autograd.grad(loss, inputs, allow_unused=True)
        gradients = [torch.zeros_like(x) if g is None else g[rows] for x, g in ((image, to_image), (text, to_text))]
        value = loss.detach()
        return ObjectiveOutput(value, gradients[0], gradients[1], {"loss": value, "tau": tau}), to_tau

    def update_state(self, pending: Tensor | None, *, lr_scale: float) -> None:
        if pending is not None:
            self.temperature.update(pending, lr_scale=lr_scale)

    def logit_parameters(self) -> tuple[float, float | None]:
        return self.temperature.logit_scale(), None
