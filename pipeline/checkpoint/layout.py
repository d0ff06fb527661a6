"""The files of a checkpoint: one folder per step, independent of ZeRO stage and number of ranks.

    RUN/checkpoints/step-00000500/
        open_clip_config.json, open_clip_model.safetensors   the model, as open_clip loads it (fp32 master weights)
        moments.safetensors       the encoders' optimizer state by parameter name
        objective.safetensors     temperature, normalizer network, ...
        ema/                      the average of the weights, if there is one, as a model folder of its own
        rows-R-I.safetensors      per-sample state of rank R, one block of rows per file
        checkpoint.json           step, samples, data position, recipe, versions; size and SHA-256 of every file, its
                                  own included
    RUN/checkpoints/latest        name of the newest checkpoint
    RUN/checkpoints/best          name of the checkpoint with the lowest validation loss, if there is validation

A folder that has a `checkpoint.json` is finished. Folders with other names, such as `step-00000500.bak`, are left
alone. Nothing in a checkpoint is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

FOLDER_NAME = "checkpoints"
META_NAME = "checkpoint.json"
LATEST_NAME = "latest"
MOMENTS_NAME = "moments.safetensors"
OBJECTIVE_NAME = "objective.safetensors"
EMA_NAME = "ema"
BEST_NAME = "best"
FORMAT, VERSION = "neuclip-checkpoint", 1
PREFIX = "step-"


def name_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step in a folder name made by `name_of`."""
    return int(path.name.removeprefix(PREFIX))


def fallback_run(fallback: str, run: Path) -> Path:
    """The folder in `checkpoint.fallback` that stands in for a run's folder."""
    return Path(fallback) / run.name


def is_name(name: str) -> bool:
    """Whether `name_of` makes such names; a copy that somebody has made beside a checkpoint has another one."""
    return re.fullmatch(rf"{re.escape(PREFIX)}\d+", name) is not None


def checkpoint_folders(run: Path) -> list[Path]:
    """Folders of a run that are named like checkpoints, finished and intact or not, oldest first."""
    found = (path for path in (run / FOLDER_NAME).glob(f"{PREFIX}*") if is_name(path.name) and path.is_dir())
    return sorted(found, key=step_of)


def finished_checkpoints(run: Path) -> list[Path]:
    """Folders of the finished checkpoints of a run, oldest first; not verified."""
    return [path for path in checkpoint_folders(run) if (path / META_NAME).is_file()]


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the lowest validation loss; None if there is none on disk."""
    try:
        path = run / FOLDER_NAME / (run / FOLDER_NAME / BEST_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return path if (path / META_NAME).is_file() else None


def read_meta(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's `checkpoint.json`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a JSON mapping.
    """
    meta = json.loads((path / META_NAME).read_text(encoding="utf-8"))
    if not isinstance(meta, dict):
        raise ValueError("not a mapping")
    return meta


def digest_of(meta: dict[str, Any]) -> str:
    """SHA-256 of the contents of a `checkpoint.json` without its own entry `digest`."""
    rest = {key: value for key, value in json.loads(json.dumps(meta)).items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
