"""What an objective is given, returns and consists of, and objectives by name.

`objective.name` selects a method: a file below `pipeline.objectives`, or of an installed package with an entry point of
the group `neuclip.objectives`. Shape legend: b local batch, d feature dimension, K ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from pipeline.config import parse, section, suggest
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.registries import Registry


@section
class ObjectiveConfig:
    """The settings that every method has."""

    name: str
    """Registered name of the method."""
    distill: float = Field(default=0.0, ge=0)
    """Weight of a distillation loss that is added: the divergence of the similarities within the global batch from
    those of a teacher (MobileCLIP; open_clip's `--distill-model`), whose features `data.teacher_features` has. 0: no
    teacher. For the methods with a softmax, so not for `siglip`."""
    mask_equal: bool = False
    """Pairs with an equal text or image are not each other's negatives in a batch: texts with the same tokens, images
    with the same pixels after the crop (with a random crop, only an image that is in the batch under the same sample id
    counts as equal). In the methods' means over negatives their terms are 0; distillation and the normalizer networks'
    prototypes are not masked."""


@dataclass(frozen=True)
class ObjectiveContext:
    """The facts of a run that an objective may need; all of them are known before the first batch.

    Outside the trainer, dataset_size, steps_per_epoch and total_steps may be 0 (unknown) where the method needs none.
    """

    dim: int
    batch_size: int
    """Pairs of the global batch, over all ranks."""
    dataset_size: int
    steps_per_epoch: int
    total_steps: int
    world: World
    device: torch.device
    """`meta` builds an objective that only knows its sizes, see `Objective.memory`."""
    seed: int = 0
    dtype: torch.dtype = torch.float32
    """Of state and arithmetic; the tests use float64."""

    beta2: float = 0.98
    """Of the temperatures' Adam, as `adam_eps`: in a run those of the encoders' optimizer, as in open_clip, where the
    temperature is one of the model's parameters, and in FastCLIP (procedures 4 and 5)."""
    adam_eps: float = 1e-8

    def epochs(self, *, needed_by: str) -> int:
        """Number of epochs of the run, counting a partial last one; `needed_by` is the setting that depends on it.

        Raises:
            UserError: The length of the run is unknown.
        """
        if self.total_steps < 1 or self.steps_per_epoch < 1:
            raise UserError(
                f"{needed_by} follows the epochs of the run: give build_objective total_steps, and dataset_size or "
                f"steps_per_epoch (total_steps = {self.total_steps}, steps_per_epoch = {self.steps_per_epoch})."
            )
        return -(-self.total_steps // self.steps_per_epoch)


@dataclass(frozen=True)
class ObjectiveOutput:
    """Loss of the global batch and its gradient with respect to this rank's features."""

    loss: Tensor
    """Scalar, the same on every rank."""
    grad_image: Tensor
    """[b, d], d(global loss)/d(local features): the true gradient, not divided by K."""
    grad_text: Tensor
    metrics: Mapping[str, Tensor]
    """Detached scalars, the same on every rank, left on the device."""
    distributions: Mapping[str, Tensor] = field(default_factory=dict)
    """Values per anchor for histograms."""


@dataclass(frozen=True)
class ObjectiveMemory:
    """Bytes of an objective's state: on every rank, and per sample of the dataset, in host memory, divided by the
    number of ranks."""

    replicated: int
    """With the rank's share of what is divided among the ranks."""
    per_sample: float


Pair = tuple[Tensor, Tensor]
"""The image side and the text side."""


class StatefulPart:
    """A part of an objective, which saves, loads, compares and logs it; by default without any state."""

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


ObjectiveClass = TypeVar("ObjectiveClass", bound=type)

OBJECTIVES: Registry[Any] = Registry(
    "objective", setting="objective.name", package="pipeline.objectives", group="neuclip.objectives"
)
objective_names = OBJECTIVES.names
_SECTIONS: dict[str, type[ObjectiveConfig]] = {}


def register(name: str, config: type[ObjectiveConfig]) -> Callable[[ObjectiveClass], ObjectiveClass]:
    """Class decorator: make an objective selectable as `objective.name=<name>` with `config` as its section.

    One class may be registered under several names with different defaults.
    """

    def add(objective: ObjectiveClass) -> ObjectiveClass:
        OBJECTIVES.register(name)(objective)
        _SECTIONS[name] = config
        return objective

    return add


OTHER_NAMES = dict.fromkeys(("clip", "infonce", "info_nce", "contrastive", "softmax", "open_clip"), "openclip")
OTHER_NAMES |= {"sigmoid": "siglip"}
"""What people call a method -> its name here."""


def parse_objective(tree: Mapping[str, Any]) -> ObjectiveConfig:
    """The checked section of the method `tree["name"]`. A UserError names the key that is wrong."""
    name, names = tree.get("name"), objective_names()
    if not isinstance(name, str):
        raise UserError(f"objective.name is required and was not given. Allowed: {', '.join(names)}.")
    if name not in names:
        near = suggest(OTHER_NAMES.get(name.lower(), name), names)
        raise UserError(f"objective.name = {name!r} is not known. {near}")
    return parse(_SECTIONS[name], tree, prefix="objective")


def setting_names(name: Any) -> set[str]:
    """The settings of a method; none if there is no such method."""
    return {field.name for field in fields(_SECTIONS[name])} if name in objective_names() else set()
