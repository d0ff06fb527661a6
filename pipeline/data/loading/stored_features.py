"""Stored features of all samples of a dataset, which `neuclip features` writes and runs read by sample id.

Either a teacher's unit-norm image and text features in fp16 (`data.teacher_features`), or the outputs of an image tower
before the normalisation to unit length in fp32 (`data.image_features`), behind which a run that locks the tower goes on
as it would from the tower.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pipeline.config import first_problem
from pipeline.data.data_config import IMAGES, DataConfig
from pipeline.data.loading.decode import StoredCrops
from pipeline.data.loading.feature_file import AGAIN, FeatureFile, FeatureStore, no_features
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.errors import UserError
from pipeline.files import read_bounded

FEATURES, FACTS = "features.npy", "features.json"
LOOKED_AT = 64
"""Records, spread over the file, that are read before a run starts."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class FeatureFacts:
    """What stored features are of."""

    model: str
    """Hash of the model's weights; of outputs of an image tower, of the tower's."""
    source: str
    """Where they were loaded from."""
    tau: Annotated[Finite, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    data: list[str]
    """Hash of each source's contents; sample ids run over the sources in this order."""
    caption: str
    """Where captions are; empty for outputs of an image tower."""
    samples: Annotated[int, Field(gt=0)]
    bias: Finite | None = None
    """The bias of a model trained with a sigmoid loss."""
    crops: StoredCrops | None = None
    """Of which the image features are; None: of the whole image, or the tower's outputs of the central square."""
    tower: dict[str, Any] | None = None
    """Of outputs of an image tower, what else determines them; None: a teacher's features."""

    @property
    def sides(self) -> int:
        """1 for images, 2 for images and texts."""
        return 2 if self.tower is None else 1

    @property
    def images(self) -> int:
        """Image features of each sample."""
        return self.crops.count if self.crops else 1

    def file(self, folder: Path) -> FeatureFile:
        """The file of the features: those of images, and a teacher's of the text behind them."""
        dim, dtype = (self.images + self.sides - 1) * self.dim, "<f2" if self.tower is None else "<f4"
        return FeatureFile(folder / FEATURES, samples=self.samples, dim=dim, dtype=dtype, seed=self._seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the features of given data, as plain values."""
        names = ("model", "caption", "tau", "bias", "crops") if self.tower is None else ("tower", "crops")
        plain = json.loads(json.dumps(asdict(self)))
        return {name: plain[name] for name in names}

    @property
    def _seed(self) -> int:
        """CRC-32 of what determines the records, so that those of another model, data or crops are not valid."""
        plain = asdict(self)
        names = ["model", "data", "caption", "samples", "dim", "crops", *(["tower"] if self.tower else [])]
        return zlib.crc32(json.dumps([plain[name] for name in names]).encode()) or 1


class StoredFeatures:
    """Complete features of `neuclip features`, which are read by sample id.

    Args:
        folder: Where they are.
        setting: Which names it: `data.teacher_features` or `data.image_features`.
        seed: Of the run, by which each epoch shows one of several crops.

    Raises:
        UserError: There are no complete features for this setting, or `features.json` and the file do not go together.
    """

    def __init__(self, folder: Path, *, setting: str, seed: int = 0) -> None:
        self.named, self._seed = f"{setting}={folder}", seed
        try:
            tree: dict[str, Any] = json.loads(read_bounded(folder / FACTS).decode())
            facts = json.dumps(tree["facts"])  # strict validation takes a dataclass from JSON only
            self.facts = TypeAdapter(FeatureFacts).validate_json(facts, strict=True)
            if (self.facts.tower is None) == (setting == IMAGES):
                kind = "a teacher's features" if setting == IMAGES else "the outputs of an image tower"
                raise ValueError(f"these are {kind}")
            self.file = self.facts.file(folder)
            self._store = FeatureStore(self.file)
            stored = tree.get("stored", 0)
            if not (type(stored) is int and 0 <= stored <= self.facts.samples):
                raise ValueError(f"{FACTS} says that {stored} of {self.facts.samples} samples have features")
            self.missing = self.facts.samples - stored
            """Samples without features, such as corrupt ones."""
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            why = first_problem(error, file=FACTS) if isinstance(error, ValidationError) else error
            raise UserError(
                f"{self.named}: no features of `neuclip features` ({why}). Write them with "
                f"{how_to_write(setting, folder)}."
            ) from error
        if "stored" not in tree:
            raise UserError(f"{self.named}: the features are not complete: {AGAIN}.")
        rows = range(0, self.facts.samples, max(1, self.facts.samples // LOOKED_AT))
        lost = [row for row in rows if self._store.read(row) is None]
        if len(lost) > self.missing or len(lost) == len(rows):
            raise UserError(
                f"{self.named}: {len(lost)} of the {len(rows)} features checked are missing, damaged or "
                f"of another model (that of sample {lost[-1]}, for one), and {FACTS} says that {self.missing:,} of all "
                f"{self.facts.samples:,} are missing: {AGAIN}."
            )

    def describe(self) -> str:
        """The model, and what has no features, for the log."""
        facts, lacks = self.facts, ""
        if self.missing:
            lacks = (
                f"; {self.missing:,} of {facts.samples:,} samples have no features: the run ends if it reaches one "
                "that the loader can read"
            )
        crops = f", {facts.crops.count} crops of each image" if facts.crops else ""
        tau = f", tau {facts.tau:.4g}" if facts.tower is None else ""
        return f"{facts.source} (weights {facts.model[:12]}{tau}{crops}{lacks})"

    def read(self, sample_ids: Tensor, *, epoch: int) -> Tensor:
        """The features [sides, b, d] of samples, [b] int64, that an epoch shows.

        Raises:
            UserError: Those of a sample are missing or damaged.
        """
        ids, crops, images = sample_ids.tolist(), self.facts.crops, self.facts.images
        values = np.empty((len(ids), self.file.dim), dtype=self.file.dtype)
        for row, sample_id in enumerate(ids):
            record = self._store.read(sample_id)
            if record is not None:
                values[row] = np.frombuffer(record, dtype=self.file.dtype)
            if record is None or not np.isfinite(values[row]).all():
                raise no_features(self.file, sample_id)
        of_each = values.reshape(len(ids), -1, self.facts.dim)
        shown = [crops.shown(sample_id, seed=self._seed, epoch=epoch) if crops else 0 for sample_id in ids]
        return torch.from_numpy(np.stack([of_each[range(len(ids)), shown], *of_each[:, images:].swapaxes(0, 1)]))


def how_to_write(setting: str, folder: str | Path) -> str:
    """The command that writes the features that a setting names."""
    return (
        f"`neuclip features {'MODEL --images-only' if setting == IMAGES else 'TEACHER'} --data DATA --output {folder}`"
    )


def open_features(
    data: DataConfig, digests: Iterable[str], *, seed: int, named: Mapping[str, Sequence[str]]
) -> dict[str, list[StoredFeatures]]:
    """Stored features for a run.

    Args:
        data: The `data` section.
        digests: Hash of each source's contents.
        seed: Of the run.
        named: Folders by the setting that names them.

    Raises:
        UserError: They are not complete, of other data or crops, or a setting names the same ones twice.
    """
    opened = {
        setting: [StoredFeatures(Path(folder), setting=setting, seed=seed) for folder in folders]
        for setting, folders in named.items()
    }
    for setting, group in opened.items():
        for number, stored in enumerate(group):
            _check_fit(stored, data, list(digests))
            if stored.facts.identity in [other.facts.identity for other in group[:number]]:
                raise UserError(
                    f"{setting} has the features of {stored.facts.source} twice (number {number + 1} for one): list "
                    "each teacher once."
                )
    return opened


def _check_fit(stored: StoredFeatures, data: DataConfig, digests: list[str]) -> None:
    facts = stored.facts
    captions = sorted({str(CaptionField.parse(source.caption or data.caption)) for source in data.sources})
    given, wanted = {"data": facts.data}, {"data": digests}
    if facts.tower is None:
        given["captions"], wanted["captions"] = [facts.caption], captions
    if other := [name for name in wanted if wanted[name] != given[name]]:
        raise UserError(
            f"{stored.named} are of other {' and '.join(other)} than this run "
            f"({'; '.join(f'{given[name]}, now {wanted[name]}' for name in other)}): run `neuclip features` on "
            "data.sources, in their order, with --caption as in data.caption."
        )
    theirs = own = (data.crop.scale, data.crop.ratio)
    if facts.crops is not None:
        theirs = (facts.crops.scale, facts.crops.ratio)
    elif facts.tower is not None:
        theirs = ((1.0, 1.0), (1.0, 1.0))
    if theirs != own:
        raise UserError(
            f"{stored.named} are of crops with scale {list(theirs[0])} and ratio {list(theirs[1])}, and this run has "
            f"data.crop.scale={list(own[0])} data.crop.ratio={list(own[1])}: set them to the former, or run `neuclip "
            "features` with --augmentations, --crop-scale and --crop-ratio."
        )


def common_crops(opened: Mapping[str, Sequence[StoredFeatures]]) -> StoredCrops | None:
    """The crops that a run shows, from stored features by the setting that names them; None: its own.

    Raises:
        UserError: They are of different crops.
    """
    distinct = {
        f"{setting} ({number})": stored.facts.crops
        for setting, group in opened.items()
        for number, stored in enumerate(group, 1)
        if stored.facts.crops is not None
    }
    if len(set(distinct.values())) > 1:
        listed = "; ".join(f"{name}: {crops.count} with seed {crops.seed}" for name, crops in distinct.items())
        raise UserError(
            f"The stored features are of different crops, and a step shows one of a sample: {listed}. Run `neuclip "
            "features` with the same --augmentations and --seed."
        )
    return next(iter(distinct.values()), None)
