"""Outputs of a locked image tower, computed once per sample and kept on disk (`model.image_features_cache`).

A locked tower gives the same output for the same pixels in every epoch. What is kept is the output before the
normalisation to unit length, in the precision in which the tower computes: nothing behind it is trained, and the step
goes on from there as it would from the tower.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.data.loading.feature_file import FeatureFile, FeatureStore
from pipeline.data.loading.loader import Batch
from pipeline.engine.engine_protocol import Engine
from pipeline.errors import UserError
from pipeline.files import read_tree, write_json
from pipeline.model.architectures import Architecture
from pipeline.model.model_folder import weights_digest
from pipeline.training.run_state import RunState
from pipeline.training.step import micro_batches

IDENTITY, FEATURES = "identity.json", "features.npy"


class ImageFeatures:
    """The image side's input of a step: stored outputs, and computed ones where none are stored.

    `micro_batch` images run through the tower at once; None: all of a batch.
    """

    def __init__(self, store: FeatureStore, engine: Engine, *, micro_batch: int | None) -> None:
        self._store, self._engine, self._micro_batch = store, engine, micro_batch
        self._computed: tuple[Tensor, Tensor] | None = None

    def outputs(self, batch: Batch, image: Tensor) -> Tensor:
        """The image tower's outputs [b, d] of a batch, on the device.

        Args:
            batch: With `features`.
            image: [m, 3, H, W], normalized, of the rows that are missing there.
        """
        stored = batch.features
        assert stored is not None
        values = stored.values.to(image.device, non_blocking=True)
        self._computed = None
        if not len(image):
            return values
        parts = [self._engine.image_output(image[rows]) for rows in micro_batches(len(image), self._micro_batch)]
        computed = torch.cat(parts).to(values.dtype)
        on_host = torch.empty(computed.shape, dtype=computed.dtype, pin_memory=computed.is_cuda)
        self._computed = batch.sample_id[stored.missing], on_host.copy_(computed, non_blocking=True)
        return values.index_copy(0, stored.missing.to(image.device, non_blocking=True), computed)

    def save(self) -> None:
        """Store what the last `outputs` computed. Call it after the step, which has waited for the copy to the host."""
        if self._computed is not None:
            sample_ids, values = self._computed
            self._store.write(sample_ids.numpy(), values)
            self._computed = None


def open_image_features(
    state: RunState, architecture: Architecture, *, report: Callable[[str], None]
) -> ImageFeatures | None:
    """Open or create the features of this run's image tower and data, and let the loader read them. Collective.

    Call it when the weights are those of the run, after a checkpoint was restored. `report` receives a sentence.

    Returns:
        None without `model.image_features_cache`.

    Raises:
        UserError: Some rank has too little disk space or cannot create the file, or shards have no hashes.
    """
    run, world, loader = state.run, state.world, state.loader
    if run.model.image_features_cache is None:
        return None
    facts = _identity(state, architecture)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(run.model.image_features_cache) / digest
    file = FeatureFile(folder / FEATURES, samples=loader.n, dim=architecture.dim, dtype=state.engine.dtype)
    existed = file.path.is_file()
    problems = world.gather_objects(_create(file, facts))
    if any(problems):
        raise UserError(next(problem for problem in problems if problem))
    store = FeatureStore(file)
    loader.use_features(file)
    state_of_file = "found, and what is missing is added" if existed else "new"
    report(
        f"Image features: {file.path} ({state_of_file}), {file.samples:,} samples x {file.dim} x {file.dtype.itemsize} "
        f"bytes and a checksum each, {file.file_bytes / 1e6:,.1f} MB.{_others(folder, facts)}"
    )
    return ImageFeatures(store, state.engine, micro_batch=run.engine.micro_batch)


def _create(file: FeatureFile, facts: Mapping[str, Any]) -> str:
    """Make the file and its description; what keeps this rank from it, or nothing."""
    try:
        file.create()
        write_json(file.path.with_name(IDENTITY), facts)
    except UserError as error:
        return str(error)
    except OSError as error:
        return f"model.image_features_cache: {file.path} cannot be created: {error.strerror}."
    return ""


def _identity(state: RunState, architecture: Architecture) -> dict[str, Any]:
    """Everything that determines the outputs by sample id. Collective."""
    shards = state.loader.mixture.manifest.shards
    if not all(shard.sha256 for shard in shards):
        raise UserError(
            "model.image_features_cache needs shards whose manifest has their hashes, from which it knows that the "
            "images are the same: `neuclip manifest --replace` writes them."
        )
    visual = {name: value for name, value in state.engine.state.weights() if name.startswith("visual.")}
    return {
        "image tower's weights": weights_digest(visual),
        "architecture": {key: architecture.model_cfg.get(key) for key in ("embed_dim", "vision_cfg", "quick_gelu")},
        "mean and std": [*architecture.mean, *architecture.std],
        "precision": f"{state.engine.dtype}, bf16 products: {state.engine.bf16}",
        "samples": state.loader.n,
        **state.loader.image_identity(),
    }


def _others(folder: Path, facts: Mapping[str, Any]) -> str:
    """A sentence on features in the same place that do not fit this run, and in what they differ."""
    ours, found = json.loads(json.dumps(facts)), []
    for path in sorted(folder.parent.glob(f"*/{IDENTITY}")):
        if path.parent == folder:
            continue
        if not (theirs := read_tree(path)):  # being written or removed
            continue
        found.append(f"{path.parent.name} (another {', '.join(key for key in ours if ours[key] != theirs.get(key))})")
    return f" The folder also has features that do not fit this run: {'; '.join(found)}." if found else ""
