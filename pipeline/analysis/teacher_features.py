"""Write a model's image and text features of every sample of a dataset, for distillation.

Shards are computed one by one. A stopped job continues with the shards whose features are not all stored, and ranks
share the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.analysis.pair_scores import encode
from pipeline.analysis.shard_pairs import UNREAD, ImageOf, PairReader, whole
from pipeline.data.data_config import CropConfig
from pipeline.data.loading.decode import StoredCrops, crop_exactly, normalize
from pipeline.data.loading.feature_file import FeatureStore
from pipeline.data.order.mixture import Mixture
from pipeline.data.shards.rgb_image import rgb_image
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_json
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.training.teacher import FACTS, TeacherFacts


def write_features(
    model: EvaluationModel,
    mixture: Mixture,
    facts: TeacherFacts,
    *,
    output: Path,
    world: World,
    batch_size: int,
    workers: int,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write what is missing, and the counts into `features.json`. Collective.

    Args:
        model: The teacher.
        mixture: The data.
        facts: Those of both; `output` holds no features of others.
        output: The folder.
        world: The ranks.
        batch_size: Images that are encoded at a time, or the crops of one.
        workers: Decoding threads.
        on_shard: Called with the number of this rank's finished shards, and of all its shards.

    Returns:
        The counts.

    Raises:
        UserError: The file cannot be created, the disk is full, features are not finite, or a shard cannot be read or
            is not that of the manifest.
    """
    file, shards, problems = facts.file(output), mixture.manifest.shards, Counter[str]()
    try:
        file.create()
        store = FeatureStore(file)
    except OSError as error:
        raise UserError(
            f"{file.path}, of {file.file_bytes / 1e6:,.1f} MB, cannot be created or opened: {error.strerror}."
        ) from error

    def missing(index: int) -> int:
        shard = shards[index]
        return sum(store.read(row) is None for row in range(shard.offset, shard.offset + shard.samples))

    mine = range(world.rank, len(shards), world.size)
    left = [index for index in mine if missing(index)]
    done = len(mine) - len(left)
    on_shard(done, len(mine))
    image_of = crops_of(model, facts.crops) if facts.crops else whole(model.preprocess)
    caption = CaptionField.parse(facts.caption)
    size = max(1, batch_size // facts.images)
    pairs = PairReader(mixture.manifest, caption, image_of, batch_size=size, workers=workers, verified=True)
    for batch in pairs.read(left):
        if batch.captions:
            image, text = encode(model, batch)
            store.write(np.array(batch.sample_ids), torch.cat([image.view(len(text), -1), text], dim=1).cpu())
        offset = shards[batch.shard].offset  # what an earlier start has stored is not lost
        problems.update(problem for row, problem in batch.problems if store.read(offset + row) is None)
        if not store.writable:  # reported below, on every rank
            break
        if batch.ends_shard:
            on_shard(done := done + 1, len(mine))
    lost = sum(missing(index) for index in left) - problems.total()
    found = world.gather_objects((lost, problems))
    if lost := sum(number for number, _ in found):
        raise UserError(
            f"The features of {lost:,} samples could not be stored in {file.path}: the disk is full, they are not "
            "finite, or another job writes others there. Run it again when the cause is removed; what is stored stays."
        )
    reasons = sum((counts for _, counts in found), Counter[str]())
    if away := [reason for reason in reasons if reason.startswith(UNREAD)]:
        raise UserError(
            f"{sum(reasons[reason] for reason in away):,} samples are in shards that cannot be read ({away[0]}). Run "
            "it again when they are there; what is stored stays."
        )
    counts = {"samples": facts.samples, "stored": facts.samples - reasons.total(), "problems": dict(reasons)}
    if world.is_main:
        write_json(output / FACTS, {"facts": asdict(facts), **counts})
    return counts


def crops_of(model: EvaluationModel, crops: StoredCrops) -> ImageOf:
    """Takes all stored crops of an image, at the size of the model's images: [K, 3, H, W].

    They are what a run shows of the sample in training, but for its size and decoder.
    """
    mean, std = model.architecture.mean, model.architecture.std
    limits = CropConfig(scale=crops.scale, ratio=crops.ratio)

    def crop_all(data: bytes, sample_id: int) -> Tensor:
        image, size = rgb_image(data), model.image_size
        states = [crops.state(sample_id, number) for number in range(crops.count)]
        found = [crop_exactly(image, crop=limits, size=size, state=state) for state in states]
        return normalize(torch.stack(found), mean=mean, std=std)

    return crop_all
