"""What an objective consists of: parts that have state, checks of a batch, and helpers for the tensors of its state.

The optimizers of state outside the encoders' engine are pure updates in place, on tensors that the caller keeps: the
parameter and the `slots`, of its shape. `updates` is the number of the update, from 1.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives.sample_table import PerSampleTable

log = logging.getLogger(__name__)
DRIFT_CHECK_EVERY = 500
"""Steps. A comparison waits for the device."""
MAX_EVENTS = 3
"""One mismatch may be a flipped bit; three mean that the ranks compute different things."""
_ODD = 0x9E3779B1
Rate = Tensor | float


@dataclass(frozen=True)
class AdaGrad:
    """torch.optim.Adagrad without decay; on a CPU in its fused form, one pass over memory."""

    lr: float
    eps: float = 1e-10
    unused_counter: Tensor = field(default_factory=lambda: torch.zeros(()), compare=False)
    """torch's step counter, which only matters to learning-rate decay."""
    slots: ClassVar[tuple[str, ...]] = ("accumulator",)

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        adagrad(
            [parameter],
            [gradient],
            [slots["accumulator"]],
            [self.unused_counter],
            fused=parameter.device.type == "cpu",
            lr=self.lr,
            weight_decay=0.0,
            lr_decay=0.0,
            eps=self.eps,
            maximize=False,
        )


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam without weight decay; `lr` and `updates` may be tensors, one value for all or one per row.

    With `root` false it divides by the second moment instead of by its root.
    """

    lr: Rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    root: bool = True
    slots: ClassVar[tuple[str, ...]] = ("moment1", "moment2")

    def step(self, parameter: Tensor, gradient: Tensor, slots: Mapping[str, Tensor], *, updates: Rate) -> None:
        beta1, beta2 = self.betas
        first = slots["moment1"].lerp_(gradient, 1 - beta1) / (1 - beta1**updates)
        second = slots["moment2"].lerp_(gradient.square(), 1 - beta2) / (1 - beta2**updates)
        parameter -= self.lr * first / ((second.sqrt() if self.root else second) + self.eps)


InnerOptimizer = AdaGrad | Adam
Pair = tuple[Tensor, Tensor]
"""The image side and the text side."""


class StatefulPart:
    """A part of an objective, which saves, loads, compares and logs it; by default without any state."""

    table: PerSampleTable | None = None
    """Per-sample state."""
    needs_ids = False
    """Whether it uses `AnchorBatch.ids`."""

    def replicated_state(self) -> dict[str, Tensor]:
        """The state that every rank holds, by name: the tensors themselves, so that loading writes into them."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """This rank's share of state that is divided among the ranks, by name."""
        return {}

    def gathered_state(self) -> dict[str, Tensor]:
        """State that is divided among the ranks, whole on every rank, by name; collective."""
        return {}

    def divide_state(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of what `gathered_state` returned, possibly on another number of ranks."""

    def learning_rates(self, *, lr_scale: float) -> dict[str, float]:
        """Current learning rates, by the name of their setting."""
        return {}

    def distributions(self) -> dict[str, Tensor]:
        """Values of the lasting state for histograms, computed on each call."""
        return {}

    def commit(self, update: Any) -> None:
        """Apply `AnchorWeights.update` of the pending batch."""


class WithGradient(torch.autograd.Function):
    """A loss whose gradients with respect to the features are known already."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, text: Tensor, loss: Tensor, gradients: tuple[Tensor, Tensor], scale: int
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.scale, ctx.dtypes = scale, (image.dtype, text.dtype)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0] * ctx.scale
        image, text = ((g * scale).to(dtype) for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return image, text, None, None, None


def check_batch(image: Tensor, text: Tensor, sample_ids: Tensor | None, *, dim: int, lengths: bool) -> None:
    """Check a batch from another training loop: features [b, dim] of this rank and ids [b] int64, if there are any.

    With `lengths`, warn if the features do not have length 1.

    Raises:
        UserError: Shapes or types are wrong.
    """
    if wrong := [type(x).__name__ for x in (image, text) if not isinstance(x, Tensor)]:
        raise UserError(f"Features are {' and '.join(wrong)}: both have to be tensors of torch, [b, {dim}].")
    shapes = [tuple(x.shape) for x in (image, text)]
    if image.ndim != 2 or shapes[0] != shapes[1] or shapes[0][1] != dim:
        raise UserError(
            f"Features have shapes {shapes[0]} (image) and {shapes[1]} (text): both need [b, {dim}], b pairs of this "
            f"rank and the dim={dim} that the objective was built for."
        )
    if lengths:
        length = float(torch.stack([image, text]).detach().float().norm(dim=2).sub(1).abs().max()) + 1
        if not length < 1.02:
            warnings.warn(
                f"Features have to have length 1, and those of the first batch differ by up to {length - 1:.3g}: use "
                "torch.nn.functional.normalize(features, dim=-1), or encode_image(images, normalize=True).",
                stacklevel=3,
            )
    if sample_ids is None:
        return
    kind = sample_ids.dtype if isinstance(sample_ids, Tensor) else type(sample_ids).__name__
    if kind is not torch.int64 or sample_ids.shape != (len(image),):
        shape = f" of shape {tuple(sample_ids.shape)}" if isinstance(sample_ids, Tensor) else ""
        raise UserError(f"sample_ids is {kind}{shape}: it has to be a torch.int64 tensor of shape ({len(image)},).")


def load_tensors(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state[key]` into `own[key]` for every key of `own`, in place.

    Raises:
        UserError: A key is missing or a shape differs; then nothing has been changed.
    """
    for key, tensor in own.items():
        if key not in state:
            raise UserError(
                f"The saved objective state has no {key}; it holds {', '.join(sorted(state)) or 'nothing'}. "
                "Resume with the objective settings that the checkpoint was written with."
            )
        if state[key].shape != tensor.shape:
            raise UserError(
                f"The saved {key} has shape {tuple(state[key].shape)}, but these settings need {tuple(tensor.shape)}. "
                "Resume with the objective settings and the batch_size that the checkpoint was written with."
            )
    for key, tensor in own.items():
        tensor.copy_(state[key])


def fingerprint(tensors: Mapping[str, Tensor], *, device: torch.device) -> Tensor:
    """A 64-bit hash of the tensors' bits and positions, as a 0-dim int64 on `device`, without host synchronisation."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors.values():
        whole_number = {4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
        bits = tensor.detach().contiguous().view(whole_number)
        words = bits.flatten().to(device=device, dtype=torch.int64)
        places = torch.arange(1, words.numel() + 1, device=device).mul_(_ODD).bitwise_or_(1)
        total = total * _ODD + (words + places).mul_(places).sum()  # integer sums wrap: any order
    return total


class DriftGuard:
    """Compares the ranks' state; on a mismatch rank 0's wins, and the event is counted."""

    def __init__(self, world: World, *, device: torch.device) -> None:
        self.world = world
        self.every = DRIFT_CHECK_EVERY if world.size > 1 else 0
        """Steps between two comparisons; 0: never."""
        self.device = device
        self.events = 0

    def check(self, tensors: Mapping[str, Tensor], *, step: int) -> None:
        """Copy rank 0's tensors to all ranks, in place, if they differ.

        Raises:
            UserError: The third mismatch since the process began; raised on every rank.
        """
        own = fingerprint(tensors, device=self.device)
        seen = self.world.all_gather(own.reshape(1))
        if bool((seen == seen[0]).all()):
            return
        self.events += 1
        different = [rank for rank, value in enumerate(seen.tolist()) if value != int(seen[0])]
        if self.world.is_main:
            log.warning("step %d: objective state of ranks %s differed from rank 0's; it was replaced", step, different)
        for tensor in tensors.values():
            tensor.copy_(self.world.broadcast(tensor.to(self.device, copy=True)))
        if self.events >= MAX_EVENTS:
            raise UserError(
                f"The objective's state differed between ranks {self.events} times since the start (last at step "
                f"{step}, ranks {different} against rank 0). Every rank must run the same torch build on the same kind "
                "of device with the same settings; if they do, suspect these devices. Resume from the last checkpoint."
            )
