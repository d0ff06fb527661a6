"""Write a model's features of every sample of a dataset: a teacher's, or the outputs of an image tower.

Shards are computed one by one. A stopped job continues with the shards whose features are not all stored, and ranks
share the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipeline.analysis.pair_scores import encode
from pipeline.analysis.shard_pairs import UNREAD, ImageOf, PairReader, whole
from pipeline.data.data_config import MAX_PIXELS, CropConfig
from pipeline.data.loading.decode import ImageDecoder, normalize
from pipeline.data.loading.stored_features import FACTS, FeatureFacts
from pipeline.data.order.mixture import Mixture
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_json
from pipeline.model.evaluation_model import EvaluationModel


def write_features(
    model: EvaluationModel,
    mixture: Mixture,
    facts: FeatureFacts,
    *,
    output: Path,
    world: World,
    batch_size: int,
    workers: int,
    on_shard: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write what is missing, and the counts into `features.json`. Collective.

    `facts` are those of both the model (the teacher, or the one whose image tower it is) and the data; the folder
    `output` holds no features of others. At most `batch_size` images are encoded at a time, and `on_shard` is called
    with the number of this rank's finished shards, and of all its shards.

    Returns:
        The counts.

    Raises:
        UserError: The file cannot be created, the disk is full, features are not finite, or a shard cannot be read or
            is not that of the manifest.
    """
    file, shards, problems = facts.file(output), mixture.manifest.shards, Counter[str]()
    try:
        file.create()
    except OSError as error:
        raise UserError(
            f"{file.path}, of {file.file_bytes / 1e6:,.1f} MB, cannot be created or opened: {error.strerror}."
        ) from error

    def missing(index: int) -> int:
        shard = shards[index]
        return sum(file.read(row) is None for row in range(shard.offset, shard.offset + shard.samples))

    mine = range(world.rank, len(shards), world.size)
    left = [index for index in mine if missing(index)]
    done = len(mine) - len(left)
    on_shard(done, len(mine))
    image_of = image_reader(model, facts)
    caption = CaptionField.parse(facts.caption) if facts.caption else None
    pairs = PairReader(mixture.manifest, caption, image_of, batch_size=batch_size, workers=workers, verified=True)
    for batch in pairs.read(left):
        if batch.sample_ids:
            try:
                if facts.tower is None:
                    features = torch.cat(encode(model, batch), dim=1)
                else:
                    with torch.no_grad():
                        features = model.towers(batch.image.to(world.device), None)
                file.write(batch.sample_ids, features)
            except OSError:  # reported below, on every rank
                break
        offset = shards[batch.shard].offset  # what an earlier start has stored is not lost
        problems.update(problem for row, problem in batch.problems if file.read(offset + row) is None)
        if batch.ends_shard:
            on_shard(done := done + 1, len(mine))
    lost = sum(missing(index) for index in left) - problems.total()
    gathered = world.gather_objects((lost, problems))
    if lost := sum(number for number, _ in gathered):
        raise UserError(
            f"The features of {lost:,} samples could not be stored in {file.path}: the disk is full, they are not "
            "finite, or another job writes others there. Run it again when the cause is removed; what is stored stays."
        )
    reasons = sum((counts for _, counts in gathered), Counter[str]())
    if away := [reason for reason in reasons if reason.startswith(UNREAD)]:
        raise UserError(
            f"{sum(reasons[reason] for reason in away):,} samples are in shards that cannot be read ({away[0]}). Run "
            "it again when they are there; what is stored stays."
        )
    counts = {"samples": facts.samples, "stored": facts.samples - reasons.total(), "problems": dict(reasons)}
    if world.is_main:
        write_json(output / FACTS, {"facts": asdict(facts), **counts})
    return counts


def image_reader(model: EvaluationModel, facts: FeatureFacts) -> ImageOf:
    """Takes the image as an evaluation does; of outputs of an image tower, its pixels in training."""
    architecture = model.architecture
    if facts.tower is None:
        return whole(model.preprocess, architecture.background)
    central = CropConfig(scale=(1, 1), ratio=(1, 1))
    decoder = ImageDecoder(model.image_size, central, "fast", MAX_PIXELS, architecture.background)
    mean, std = architecture.mean, architecture.std
    return lambda data: normalize(decoder(data, state=0)[None], mean=mean, std=std)[0]
