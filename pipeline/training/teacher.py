"""Stored features of a model (`neuclip features`): the teacher of `objective.distill`, the reference of `selection`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pipeline.config import first_problem
from pipeline.data.loading.decode import StoredCrops
from pipeline.data.loading.feature_file import FeatureFile, FeatureStore
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.distributed.devices import to_device
from pipeline.errors import UserError
from pipeline.files import read_tree
from pipeline.objectives.distill import Teacher
from pipeline.training.recipe import RunConfig

FEATURES, FACTS = "features.npy", "features.json"
LOOKED_AT = 64
"""Records, spread over the file, that are read before a run starts."""
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class TeacherFacts:
    """What stored features are of."""

    model: str
    """Hash of the teacher's weights."""
    source: str
    """Where they were loaded from."""
    tau: Annotated[Finite, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    data: list[str]
    """Hash of each source's contents; sample ids run over the sources in this order."""
    caption: str
    samples: Annotated[int, Field(gt=0)]
    bias: Finite | None = None
    """The bias of a model trained with a sigmoid loss."""
    crops: StoredCrops | None = None
    """Of which the image features are; None: of the whole image."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the file of features: CRC-32 of what determines its records, so that those of another model, other data or
    other crops are not valid in it."""

    @property
    def images(self) -> int:
        """Image features of each sample."""
        return self.crops.count if self.crops else 1

    def file(self, folder: Path) -> FeatureFile:
        """The file of the features: images and text, one behind the other."""
        path, dim = folder / FEATURES, (self.images + 1) * self.dim
        return FeatureFile(path, samples=self.samples, dim=dim, dtype=torch.float16, seed=self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the features of given data, as plain values."""
        plain = json.loads(json.dumps(asdict(self)))
        return {name: plain[name] for name in ("model", "caption", "tau", "bias", "crops")}

    @property
    def own_seed(self) -> int:
        """What `seed` is in this version."""
        plain = asdict(self)
        facts = [plain[name] for name in ("model", "data", "caption", "samples", "dim", "crops")]
        return zlib.crc32(json.dumps(facts).encode()) or 1

    @property
    def is_loose(self) -> bool:
        """Whether an earlier version wrote the file, whose seed is 0 or of `model` alone."""
        return self.seed in (0, zlib.crc32(self.model.encode()))


def seeded(facts: TeacherFacts, folder: Path) -> TeacherFacts:
    """The facts with the seed of the file of features in a folder of `neuclip features`, or of a new one."""
    written = read_tree(folder / FACTS).get("facts")
    seed = written.get("seed", 0) if isinstance(written, dict) else None
    old = replace(facts, seed=seed) if isinstance(seed, int) else None
    return old if old is not None and old.is_loose else replace(facts, seed=facts.own_seed)


class StoredTeacher:
    """A teacher whose features are read by sample id.

    Args:
        folder: Output of `neuclip features`.
        setting: Which names it, for messages.
        seed: Of the run, by which each epoch shows one of several crops.

    Raises:
        UserError: It has no complete features, or the facts and the features there are not of the same model.
    """

    def __init__(self, folder: Path, *, setting: str, seed: int = 0) -> None:
        self._seed = seed
        again = "run `neuclip features` again, which adds what is missing"
        try:
            tree: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            facts = json.dumps(tree["facts"])  # strict validation takes a dataclass from JSON only
            self.facts = TypeAdapter(TeacherFacts).validate_json(facts, strict=True)
            if self.facts.seed != self.facts.own_seed and not self.facts.is_loose:
                raise ValueError(f"{FACTS} was changed after it was written: `seed` is not that of the other facts")
            self._store = FeatureStore(self.facts.file(folder), writable=False)
            stored = tree.get("stored", 0)
            if not (type(stored) is int and 0 <= stored <= self.facts.samples):
                raise ValueError(f"{FACTS} says that {stored} of {self.facts.samples} samples have features")
            self.missing = self.facts.samples - stored
            """Samples without features, such as corrupt ones."""
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            why = first_problem(error, file=FACTS) if isinstance(error, ValidationError) else error
            raise UserError(
                f"{setting}={folder}: no features of `neuclip features` ({why}). Write them with "
                f"`neuclip features DATA --model TEACHER --output {folder}`."
            ) from error
        if "stored" not in tree:
            raise UserError(f"{setting}={folder}: the features are not complete: {again}.")
        self._hint = f"{folder} has no features of sample {{}}, or damaged ones: {again}."
        rows = range(0, self.facts.samples, max(1, self.facts.samples // LOOKED_AT))
        lost = [row for row in rows if self._store.read(row) is None]
        if len(lost) > self.missing or len(lost) == len(rows):
            raise UserError(
                f"{setting}={folder}: {len(lost)} of the {len(rows)} features checked are missing, damaged or "
                f"of another model (that of sample {lost[-1]}, for one), and {FACTS} says that {self.missing:,} of all "
                f"{self.facts.samples:,} are missing: {again}."
            )

    def describe(self) -> str:
        """The model, and what has no features, for the log."""
        facts, lacks = self.facts, ""
        if self.missing:
            lacks = (
                f"; {self.missing:,} of {facts.samples:,} samples have no features: the run ends if it reaches one "
                "that the loader can read"
            )
        if facts.is_loose:
            lacks += "; of an earlier version, whose file of features may be of another model or of other crops"
        crops = f", {facts.crops.count} crops of each image" if facts.crops else ""
        return f"{facts.source} (weights {facts.model[:12]}, tau {facts.tau:.4g}{crops}{lacks})"

    def of(self, sample_ids: Tensor, *, epoch: int, device: torch.device, stand_in: bool = False) -> Teacher:
        """The teacher's features of samples, [b] int64, that an epoch shows; of a batch that stands in for one, zeros.

        Raises:
            UserError: Those of a sample are missing or damaged.
        """
        ids = sample_ids.tolist()
        if stand_in:
            zeros = torch.zeros(len(ids), self.facts.dim, device=device)
            return Teacher(zeros, zeros, self.facts.tau)
        records = [self._store.read(sample_id) for sample_id in ids]
        for sample_id, record in zip(ids, records, strict=True):
            if record is None:
                raise UserError(self._hint.format(sample_id))
        values = np.frombuffer(b"".join(record or b"" for record in records), dtype="<f2")
        values = values.reshape(len(ids), self.facts.images + 1, self.facts.dim)
        crops, seed, last = self.facts.crops, self._seed, self.facts.images
        shown = [crops.shown(sample_id, seed=seed, epoch=epoch) if crops else 0 for sample_id in ids]
        values = np.stack([values[range(len(ids)), shown], values[:, last]])
        if not (finite := np.isfinite(values).all(axis=(0, 2))).all():
            raise UserError(self._hint.format(ids[int(finite.argmin())]))
        image, text = to_device(torch.from_numpy(values), device).float()
        return Teacher(F.normalize(image, dim=1), F.normalize(text, dim=1), self.facts.tau)


def open_features(folder: str, run: RunConfig, digests: Sequence[str], *, setting: str) -> StoredTeacher:
    """Stored features for a run, the hashes of whose sources' contents are `digests`; `setting` names the folder.

    Raises:
        UserError: The features are not complete, or of other data or crops.
    """
    place = Path(folder)
    teacher = StoredTeacher(place, setting=setting, seed=run.seed)
    captions = sorted({str(CaptionField.parse(source.caption or run.data.caption)) for source in run.data.sources})
    found = {"data": teacher.facts.data, "captions": [teacher.facts.caption]}
    wanted = {"data": list(digests), "captions": captions}
    if other := [name for name in wanted if wanted[name] != found[name]]:
        raise UserError(
            f"{setting}={place} are of other {' and '.join(other)} than this run "
            f"({'; '.join(f'{found[name]}, now {wanted[name]}' for name in other)}): run `neuclip features` on "
            "data.sources, in their order, with --caption as in data.caption."
        )
    crops, own = teacher.facts.crops, run.data.crop
    if crops is not None and (crops.scale, crops.ratio) != (own.scale, own.ratio):
        raise UserError(
            f"{setting}={place} are of crops with scale {list(crops.scale)} and ratio {list(crops.ratio)}, and this "
            f"run has data.crop.scale={list(own.scale)} data.crop.ratio={list(own.ratio)}: set them to the former, or "
            "run `neuclip features` with --crop-scale and --crop-ratio."
        )
    return teacher


def common_crops(opened: Mapping[str, Sequence[StoredTeacher]]) -> StoredCrops | None:
    """The crops that a run shows, from stored features by the setting that names them; None: its own.

    Raises:
        UserError: They are of different crops, or a setting names the same features twice.
    """
    for setting, teachers in opened.items():
        for number, teacher in enumerate(teachers):
            if teacher.facts.identity in [other.facts.identity for other in teachers[:number]]:
                raise UserError(
                    f"{setting} has the features of {teacher.facts.source} twice (number {number + 1} for one): list "
                    "each teacher once."
                )
    found = {
        f"{setting} ({number})": teacher.facts.crops
        for setting, teachers in opened.items()
        for number, teacher in enumerate(teachers, 1)
        if teacher.facts.crops is not None
    }
    if len(set(found.values())) > 1:
        listed = "; ".join(f"{name}: {crops.count} with seed {crops.seed}" for name, crops in found.items())
        raise UserError(
            f"The stored features are of different crops, and a step shows one of a sample: {listed}. Run `neuclip "
            "features` with the same --augmentations and --seed."
        )
    return next(iter(found.values()), None)
