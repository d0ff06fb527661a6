"""Load any checkpoint as a model to evaluate; weights that differ from their recorded digests are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.layout import META_NAME, read_meta
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import plain
from pipeline.files import sha256_of
from pipeline.model.architectures import CONFIG_NAME
from pipeline.model.evaluation_model import EvaluationModel, load_for_evaluation
from pipeline.model.model_folder import WEIGHTS_NAME

POSITIONS = "visual.positional_embedding"


def load_checkpoint(spec: str, *, device: torch.device) -> EvaluationModel:
    """What `load_for_evaluation` loads, compared with the digests in our own checkpoints.

    Raises:
        UserError: Nothing can be loaded, the weights do not fit the architecture, or a file is damaged.
    """
    try:
        model = load_for_evaluation(spec, device=device)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{plain(spec, longest=200)} cannot be read: {error.strerror or plain(error)}.") from error
    except Exception as error:  # open_clip can fail in many ways on a file of another model
        raise UserError(
            f"{spec} cannot be loaded ({type(error).__name__}: {plain(error, longest=200)}): "
            "the weights are damaged, or those of another architecture."
        ) from error
    folder = Path(model.source)
    wrong = damaged_files(folder)
    if wrong:
        raise UserError(
            f"{folder / wrong[0]} is damaged: its SHA-256 is not the one in {META_NAME}. "
            "Take another checkpoint, or copy this one again from where it is whole."
        )
    return model


def damaged_files(folder: Path) -> list[str]:
    """Model files in one of our checkpoints whose SHA-256 differs from `checkpoint.json`."""
    stated = stated_files(folder)
    return [name for name, facts in stated.items() if "sha256" in facts and sha256_of(folder / name) != facts["sha256"]]


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint's model files exist with their stated sizes; a copy may still be in progress."""
    try:
        stated = stated_files(folder)
        there = all((folder / name).is_file() for name in (CONFIG_NAME, WEIGHTS_NAME))
        return there and all(
            (folder / name).stat().st_size == facts["bytes"] for name, facts in stated.items() if "bytes" in facts
        )
    except (OSError, ValueError, AttributeError):
        return False


def stated_files(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Size and SHA-256 of the model's files, from `checkpoint.json`; empty for other folders."""
    if not (folder / META_NAME).is_file():
        return {}
    files = read_meta(folder).get("files", {})
    return {name: files[name] for name in (CONFIG_NAME, WEIGHTS_NAME) if name in files}


def notes_on(model: EvaluationModel) -> list[str]:
    """What a user should know about a loaded model: that its weights were interpolated to another image size."""
    stored = _stored_positions(model.source)
    positions = model.towers.clip.state_dict().get(POSITIONS)
    if stored is None or positions is None or stored == positions.shape[0]:
        return []
    sizes = [round((count - 1) ** 0.5) for count in (stored, positions.shape[0])]
    note = (
        f"The weights of {model.source} have position embeddings for {sizes[0]} x {sizes[0]} patches, but the model is "
        f"configured for images of {model.image_size} pixels, {sizes[1]} x {sizes[1]} patches: open_clip interpolated "
        "them. Scores are those of the interpolated model."
    )
    return [note]


def _stored_positions(source: str) -> int | None:
    """How many position embeddings the image tower has in the weights file; None if unknown."""
    from safetensors import safe_open

    path = Path(source) / WEIGHTS_NAME if Path(source).is_dir() else Path(source.partition(":")[2])
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return int(file.get_slice(POSITIONS).get_shape()[0])
        if not path.is_file():
            return None
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state = state.get("state_dict", state)
        found = next((value for name, value in state.items() if name.removeprefix("module.") == POSITIONS), None)
        return None if found is None else int(found.shape[0])
    except Exception:  # any other file type: the model is already loaded, and this only adds a note
        return None
