"""One JSON per task and checkpoint: the score, what determines it, and nothing that changes between runs."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import platform
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.suite_facts import file_digests as file_digests
from pipeline.evaluation.datasets.task_data import TaskData
from pipeline.evaluation.task_score import TaskScore
from pipeline.files import replacing, write_text
from pipeline.model.evaluation_model import EvaluationModel

PACKAGES = ("torch", "torchvision", "open_clip_torch", "pillow", "numpy", "pyarrow", "datasets")
NUMERIC_SOURCES = (
    "evaluation/datasets/csv_table.py",
    "evaluation/datasets/dataset_table.py",
    "evaluation/datasets/own_tasks.py",
    "evaluation/datasets/parquet_table.py",
    "evaluation/datasets/tar_index.py",
    "evaluation/datasets/rows.py",
    "evaluation/datasets/tables.py",
    "evaluation/datasets/task_data.py",
    "evaluation/datasets/datacomp.py",
    "evaluation/datasets/task.py",
    "evaluation/datasets/webdataset.py",
    "evaluation/protocols/association.py",
    "evaluation/protocols/classification.py",
    "evaluation/protocols/groups.py",
    "evaluation/protocols/retrieval.py",
    "evaluation/runner/compute.py",
    "evaluation/runner/encode.py",
    "evaluation/runner/images.py",
    "evaluation/runner/pixel_cache.py",
    "evaluation/runner/texts.py",
    "model/architectures.py",
    "model/evaluation_model.py",
    "model/model_folder.py",
    "model/towers.py",
    "pixels.py",
    "precision.py",
)
"""The files of `pipeline/` that a score is a function of; a change of any of them makes results stale."""
SETTINGS = ("blank_class", "micro_batch", "precision", "code")
"""Inputs that all results of one summary have in common."""
OUTCOMES_SUFFIX = ".outcomes.npz"


@dataclass(frozen=True)
class TaskResult(TaskScore):
    """A task's score and everything that it depends on."""

    official: bool
    """Whether the data has the official counts."""
    inputs: Mapping[str, Any]
    """Digests, settings and versions: equal inputs give an equal result."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=False, allow_nan=False) + "\n"


def read_result(path: Path) -> TaskResult | None:
    """The result in a file; None when there is none, or it is damaged or has another format."""
    try:
        result = TaskResult(**json.loads(path.read_text(encoding="utf-8")))
        stated = result.metrics[result.main_metric]
        whole = isinstance(result.inputs, dict) and isinstance(result.task, str) and isinstance(result.samples, int)
        return result if whole and math.isfinite(result.score) and result.score == stated else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_outcomes(path: Path) -> dict[str, np.ndarray] | None:
    """The per-sample outcomes beside a result's file; None when they are missing or damaged."""
    try:
        with np.load(path.with_suffix(OUTCOMES_SUFFIX), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        # RuntimeError: a damaged entry claims a password, or a version of the format that does not exist.
        return None


def write_result(path: Path, result: TaskResult, outcomes: Mapping[str, np.ndarray]) -> None:
    """Write the per-sample outcomes, then the result, so that an existing result is always complete."""
    with replacing(path.with_suffix(OUTCOMES_SUFFIX)) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **outcomes)
    write_text(path, result.to_json(), durable=True)


def inputs_of(
    model: EvaluationModel, data: TaskData, *, files: Mapping[str, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that determines a result, as digests and versions. `files` holds the digests of the data, by name."""
    prompts = json.dumps([data.classnames, data.templates], ensure_ascii=False)
    return {
        "checkpoint": model.digest,
        "architecture": model.architecture.name,
        "model_config": model_config_digest(model),
        "task_data": data_digest(files, data.columns),
        "layout": data.layout,
        "prompts": _sha256(prompts),
        **settings,
        "code": code_version(),
        "python": platform.python_version(),
        "packages": package_versions(),
    }


def data_digest(files: Mapping[str, str], columns: Sequence[str] = ()) -> str:
    """One digest for a task's data, from those of its files by name, and the columns that are read, where chosen."""
    lines = [f"{digest}  {name}" for name, digest in files.items()] + [f"column {name}" for name in columns]
    return _sha256("\n".join(lines))


def model_config_digest(model: EvaluationModel) -> str:
    """SHA-256 of the architecture and preprocessing, which the weights do not determine."""
    architecture = model.architecture
    towers = {key: value for key, value in architecture.model_cfg.items() if key != "init_logit_bias"}
    config = {"model_cfg": towers, "preprocess_cfg": dict(architecture.preprocess_cfg)}
    return _sha256(json.dumps(config, sort_keys=True, default=list))


@functools.cache
def code_version() -> str:
    """Version of this project and SHA-256 of the sources that scores depend on."""
    pipeline, digest = Path(__file__).parents[2], hashlib.sha256()
    for name in NUMERIC_SOURCES:
        digest.update(f"{name}\n".encode())
        digest.update((pipeline / name).read_bytes())
    version = importlib.metadata.version("neuclip")
    return f"{version} {digest.hexdigest()[:16]}"


@functools.cache
def package_versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_results(folder: Path) -> dict[str, TaskResult]:
    """Every task's result in an evaluation folder, by key; summary and timings are other files."""
    found = (read_result(path) for path in sorted(folder.glob("*.json")))
    return {result.task: result for result in found if result is not None}
