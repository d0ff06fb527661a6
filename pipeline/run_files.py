"""The files in a run's folder that several parts of the program read."""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from pipeline.errors import UserError
from pipeline.files import parse_mapping, read_bounded

log = logging.getLogger(__name__)
T = TypeVar("T")
RUN_CONFIG_NAME = "config.yaml"
MODEL_CONFIG_NAME = "open_clip_config.json"
TRANSFORMERS_CONFIG_NAME = "config.json"
"""In a folder that transformers' `save_pretrained` wrote."""
METRICS_NAME = "metrics.jsonl"
RUN_ID_NAME = "run_id"
FOLDER_NAME = "checkpoints"
META_NAME = "checkpoint.json"
EMA_NAME = "ema"
PREFIX = "step-"
RUN_ID = "[0-9a-f]{16}"
"""The pattern of ids. They become names of folders, so every one that was read is compared with it."""


def name_of(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    """The step in a folder name made by `name_of`."""
    return int(path.name.removeprefix(PREFIX))


def is_name(name: str) -> bool:
    """Whether `name_of` makes such names; a copy that somebody has made beside a checkpoint has another one."""
    return re.fullmatch(rf"{re.escape(PREFIX)}[0-9]+", name) is not None


def checkpoint_folders(run: Path) -> list[Path]:
    """Folders of a run that are named like checkpoints, finished and intact or not, oldest first."""
    folders = (path for path in (run / FOLDER_NAME).glob(f"{PREFIX}*") if is_name(path.name) and path.is_dir())
    return sorted(folders, key=step_of)


def finished_checkpoints(run: Path) -> list[Path]:
    """Folders of the finished checkpoints of a run, oldest first; not verified."""
    return [path for path in checkpoint_folders(run) if (path / META_NAME).is_file()]


def read_meta(path: Path) -> dict[str, Any]:
    """The contents of a checkpoint's `checkpoint.json`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not a JSON mapping.
    """
    return parse_mapping(read_bounded(path / META_NAME))


def digest_of(meta: Mapping[str, Any]) -> str:
    """SHA-256 of the contents of a `checkpoint.json` without its own entry `digest`."""
    rest = {key: value for key, value in json.loads(json.dumps(dict(meta))).items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def model_folder_in(path: Path) -> Path | None:
    """`path` if it is a model folder, open_clip's or transformers', else the run's latest finished checkpoint."""
    if any((path / name).is_file() for name in (MODEL_CONFIG_NAME, TRANSFORMERS_CONFIG_NAME)):
        return path
    return next((c for c in reversed(finished_checkpoints(path)) if (c / MODEL_CONFIG_NAME).is_file()), None)


def check_model(spec: str) -> None:
    """Raise `no_model` for what is no model before the packages that read models are imported, which takes seconds."""
    if ":" not in spec and model_folder_in(Path(spec)) is None:
        raise no_model(spec)


def no_model(spec: str) -> UserError:
    """The error for what is no model, with the nearest name in its folder if it does not exist."""
    path = Path(spec)
    others = [] if path.exists() or not path.parent.is_dir() else [other.name for other in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, others, n=1)
    hint = f" The nearest name there is {path.parent / near[0]}." if near else ""
    return UserError(
        f"{spec!r} is neither a folder with open_clip_config.json or transformers' config.json, nor a run with "
        "checkpoints, nor ARCH:PRETRAINED (for example ViT-B-32-quickgelu:openai or "
        f"ViT-B-32:/path/to/weights.safetensors).{hint}"
    )


def read_as(kind: type[T], source: Path | str) -> T | None:
    """An instance of a dataclass from a file in JSON, or a text; None if that is missing, damaged or something else."""
    try:
        text = source if isinstance(source, str) else read_bounded(source)
        parsed: T = TypeAdapter(kind).validate_json(text, strict=True)
    except (OSError, ValueError):
        return None
    return parsed


def new_run_id() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex[:16]


def read_run_id(run: Path) -> str:
    """The id in a run's folder; empty if there is none, or it is damaged."""
    try:
        text = read_bounded(run / RUN_ID_NAME).decode().strip()
    except (OSError, ValueError):
        return ""
    return valid_run_id(text)


def valid_run_id(text: object) -> str:
    """An id that was read from a file or a mirror; empty if it is none."""
    return text if isinstance(text, str) and re.fullmatch(RUN_ID, text) else ""


MOST_RECORDS = 2**31
"""Bytes of a metrics.jsonl: some million records."""


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without lines that a crash has cut off; none if the file cannot be read."""
    try:
        lines = read_bounded(path, most=MOST_RECORDS).decode(errors="replace").splitlines()
    except OSError:
        return []
    except ValueError as error:
        log.warning("%s is not read: it is %s.", path, error)
        return []
    return [record for line in lines if (record := record_of(line)) is not None]


def record_of(line: str | bytes) -> dict[str, Any] | None:
    """The mapping in a line of JSON, such as one of metrics.jsonl; None if it is damaged, for example cut off."""
    try:
        return parse_mapping(line)
    except ValueError:
        return None
