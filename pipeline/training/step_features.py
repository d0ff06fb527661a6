"""What a step reads by sample id beside its batch: a teacher's features, and the outputs of a locked image tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.data.data_config import IMAGES, TEACHER
from pipeline.data.loading.loader import Batch
from pipeline.data.loading.stored_features import StoredFeatures, common_crops, open_features
from pipeline.distributed.devices import to_device
from pipeline.errors import UserError
from pipeline.model.architectures import Architecture
from pipeline.model.finetuning import check_constant_image_tower
from pipeline.model.model_folder import image_tower_identity
from pipeline.objectives.distill import Teacher
from pipeline.training.run_state import RunState


@dataclass(frozen=True)
class StepFeatures:
    """The stored features of a run, made by `open_step_features`."""

    device: torch.device
    images: StoredFeatures | None = None
    """Outputs of the image tower; None: the tower runs in every step."""
    teachers: Sequence[StoredFeatures] = ()
    """Whose similarities the run learns from, too."""

    def of(self, batch: Batch, *, stand_in: bool = False) -> tuple[Tensor | None, list[Teacher]]:
        """The image tower's outputs [b, d] of a batch, and the teachers' features; of a stand-in batch, zeros.

        Raises:
            UserError: Those of a sample are missing or damaged.
        """

        def values(stored: StoredFeatures) -> Tensor:
            if stand_in:
                return torch.zeros(stored.facts.sides, len(batch.text), stored.facts.dim, device=self.device)
            return to_device(stored.read(batch.sample_id, epoch=batch.position.epoch), self.device).float()

        teachers = [(F.normalize(values(stored), dim=2), stored.facts.tau) for stored in self.teachers]
        image = None if self.images is None else values(self.images)[0]
        return image, [Teacher(sides[0], sides[1], tau) for sides, tau in teachers]


def open_step_features(state: RunState, architecture: Architecture, *, report: Callable[[str], None]) -> StepFeatures:
    """Open the stored features of a run, and let the loader show their crops or decode no images. Collective.

    Call it when the weights are those of the run, after a checkpoint was restored. `report` receives sentences.

    Raises:
        UserError: They do not fit the run.
    """
    run, loader, named = state.run, state.loader, state.run.data.stored_features
    if not any(named.values()):
        return StepFeatures(state.world.device)
    opened = open_features(run.data, loader.mixture.digests, seed=run.seed, named=named)
    for setting, group in opened.items():
        for number, stored in enumerate(group):
            state.features[f"{setting}[{number}]" if number else setting] = stored.facts.identity
            report(f"{'Teacher' if setting == TEACHER else 'Image features'}: {stored.describe()}.")
    if (crops := common_crops(opened)) is not None:
        loader.use_crops(crops)
    images = next(iter(opened[IMAGES]), None)
    if images is not None:
        _check_tower(images, state, architecture)
        loader.use_features(images.file)
    return StepFeatures(state.world.device, images, opened[TEACHER])


def _check_tower(images: StoredFeatures, state: RunState, architecture: Architecture) -> None:
    """Check that stored outputs are those of the run's image tower. Collective."""
    engine, theirs = state.engine, images.facts.tower or {}
    check_constant_image_tower(engine.module.clip.visual)  # type: ignore[arg-type]
    own = image_tower_identity(dict(engine.state.weights()), architecture, decoding=state.run.data.decoding)
    if other := [name for name, value in own.items() if theirs.get(name) != value]:
        raise UserError(
            f"{images.named} has the outputs of another image tower than this run locks (other {', other '.join(other)}"
            "). Run `neuclip features MODEL --images-only` with the weights of model.pretrained as MODEL and another "
            "--output, or set what differs as it is there (data.decoding=fast)."
        )
