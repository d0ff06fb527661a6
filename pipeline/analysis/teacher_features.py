"""Write a model's image and text features of every sample of a dataset, for distillation.

Shards are computed one by one. A stopped job continues with the shards whose features are not all stored, and ranks
share the shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.analysis.pair_scores import encode
from pipeline.analysis.shard_pairs import read_pairs
from pipeline.data.loading.feature_file import FeatureStore
from pipeline.data.order.mixture import Mixture
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
        batch_size: Pairs that are encoded at a time.
        workers: Decoding threads.
        on_shard: Called with the number of this rank's finished shards, and of all its shards.

    Returns:
        The counts.

    Raises:
        UserError: The disk is full, or features are not finite.
    """
    file, shards, problems = facts.file(output), mixture.manifest.shards, Counter[str]()
    file.create()
    store = FeatureStore(file)

    def missing(index: int) -> int:
        shard = shards[index]
        return sum(store.read(row) is None for row in range(shard.offset, shard.offset + shard.samples))

    mine = range(world.rank, len(shards), world.size)
    left = [index for index in mine if missing(index)]
    done = len(mine) - len(left)
    on_shard(done, len(mine))
    for batch in read_pairs(
        mixture.manifest,
        left,
        caption=CaptionField.parse(facts.caption),
        preprocess=model.preprocess,
        batch_size=batch_size,
        workers=workers,
    ):
        if batch.captions:
            store.write(np.array(batch.sample_ids), torch.cat(encode(model, batch), dim=1).cpu())
        problems.update(problem for _, problem in batch.problems)
        if not store.writable:  # reported below, on every rank
            break
        if batch.ends_shard:
            on_shard(done := done + 1, len(mine))
    lost = sum(missing(index) for index in left) - problems.total()
    found = world.gather_objects((lost, problems))
    if lost := sum(number for number, _ in found):
        raise UserError(
            f"The features of {lost:,} samples could not be stored in {file.path}: the disk is full, or they are not "
            "finite. Run it again when the cause is removed; what is stored stays."
        )
    reasons = sum((counts for _, counts in found), Counter[str]())
    counts = {"samples": facts.samples, "stored": facts.samples - reasons.total(), "problems": dict(reasons)}
    if world.is_main:
        write_json(output / FACTS, {"facts": vars(facts), **counts})
    return counts
