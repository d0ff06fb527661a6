"""A saved model: a folder that open_clip itself can load (`local-dir:`).

It holds `open_clip_config.json` and `open_clip_model.safetensors`. Our checkpoints are such folders with the training
state beside these two files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import textwrap
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import UserError, explain_file_error, explain_memory_error, need_addresses
from pipeline.files import UMASK, read_bounded, sha256_of
from pipeline.model.architectures import (
    Architecture,
    load_open_clip,
    refuse_hidden_code,
    save_tokenizer,
)
from pipeline.model.foreign_weights import for_open_clip, stored_description
from pipeline.run_files import EMA_NAME, META_NAME, MODEL_CONFIG_NAME, digest_of, model_folder_in, parse_meta

WEIGHTS_NAME = "open_clip_model.safetensors"
LOCAL = "local-dir:"
"""open_clip's prefix for a model folder."""
LOGIT_KEYS = ("logit_scale", "logit_bias")


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, shapes and fp32 values of all weights but logit scale and bias: no feature depends on these."""
    digest = hashlib.sha256()
    for name in sorted(set(state) - set(LOGIT_KEYS)):
        value = state[name].detach().cpu()
        value = value.float() if value.is_floating_point() else value
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def image_tower_identity(weights: Mapping[str, Tensor], architecture: Architecture, *, decoding: str) -> dict[str, Any]:
    """Plain values that determine an image tower's outputs for given images and crops.

    `weights` are by open_clip's names; `decoding` as in `data.decoding`.
    """
    visual = {name: value for name, value in weights.items() if name.startswith("visual.")}
    facts = {
        "weights": weights_digest(visual),
        "architecture": {key: architecture.model_cfg.get(key) for key in ("embed_dim", "vision_cfg", "quick_gelu")},
        "mean and std": [*architecture.mean, *architecture.std],
        "image size": architecture.image_size,
        "data.decoding": decoding,
        **architecture.own_background,
    }
    plain: dict[str, Any] = json.loads(json.dumps(facts))
    return plain


def save_open_clip(
    folder: Path, *, state: Mapping[str, Tensor], architecture: Architecture, logit: tuple[float, float | None]
) -> list[Path]:
    """Fill an existing folder so that `open_clip.create_model("local-dir:FOLDER")` loads it. Returns the files written.

    `state` are fp32 weights by open_clip's names; `logit` is log(1/tau) and the bias of a sigmoid loss, or None.
    """
    scale, bias = logit
    model_cfg = dict(architecture.model_cfg)
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    tensors["logit_scale"] = torch.tensor(scale, dtype=torch.float32)
    if bias is not None:
        model_cfg["init_logit_bias"] = bias
        tensors["logit_bias"] = torch.tensor(bias, dtype=torch.float32)
    config = {
        "architecture": architecture.name,
        "model_cfg": model_cfg,
        "preprocess_cfg": dict(architecture.preprocess_cfg),
        **architecture.own_background,
    }
    (folder / MODEL_CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_tensors(tensors, folder / WEIGHTS_NAME)
    return [folder / MODEL_CONFIG_NAME, folder / WEIGHTS_NAME, *save_tokenizer(architecture.tokenize, folder)]


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file with the permissions that the umask allows; the library's own are the owner's alone."""
    from safetensors.torch import save_file

    need_addresses()
    save_file(dict(tensors), path)
    allow_by_umask(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        UserError: It is forged or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    need_addresses(2 * path.stat().st_size)  # the library and torch map it once each
    try:
        return load_file(path)
    except SafetensorError as error:
        if explain_file_error(error):
            raise
        raise UserError(f"{path} is not a safetensors file: {error}.") from error


def allow_by_umask(*paths: Path) -> None:
    """Give files the permissions that the umask allows."""
    for path in paths:
        path.chmod(0o666 & ~UMASK)


def load_folder(folder: Path, **kwargs: Any) -> nn.Module:
    """open_clip's model from a folder; `kwargs` are `create_clip`'s. In a checkpoint, its files are verified.

    Raises:
        UserError: The folder holds no model, open_clip cannot load it, or it is a checkpoint and damaged.
    """
    if model_folder_in(folder) != folder:
        raise UserError(f"{folder} has no {MODEL_CONFIG_NAME}: it is not a model folder.")
    model = create_clip(f"{LOCAL}{folder}", **kwargs)
    if kwargs.get("load_weights", True):
        _verify(folder)
    return model


def _verify(folder: Path) -> None:
    remedy = "Take another checkpoint, or copy this one again from where it is whole."
    try:
        stated = stated_files(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{_meta_of(folder)} is damaged: {str(error).rstrip('.')}. {remedy}") from error
    for name, facts in stated.items():
        if "sha256" in facts and sha256_of(folder / name) != facts["sha256"]:
            raise UserError(f"{folder / name} is damaged: its SHA-256 is not the one in {META_NAME}. {remedy}")


def _meta_of(folder: Path) -> Path:
    """Where a checkpoint, or the average of the weights in one, is described."""
    return (folder.parent if folder.name == EMA_NAME else folder) / META_NAME


def stated_files(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Size and SHA-256 of a model folder's two files, from a `checkpoint.json`; empty for other folders.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    path = _meta_of(folder)
    if not path.is_file():
        return {}
    meta = parse_meta(read_bounded(path))
    if "digest" in meta and meta["digest"] != digest_of(meta):
        raise ValueError("its contents do not match their SHA-256")
    files = meta.get("files", {})
    if not isinstance(files, Mapping) or not all(isinstance(facts, Mapping) for facts in files.values()):
        raise ValueError("its list of files is none")
    prefix = f"{EMA_NAME}/" if path.parent != folder else ""
    return {name: files[prefix + name] for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME) if prefix + name in files}


def _model_cfg(name: str) -> Mapping[str, Any]:
    if not name.startswith(LOCAL):
        return dict(load_open_clip().get_model_config(name) or {})
    return dict(stored_description(Path(name.removeprefix(LOCAL)))["model_cfg"])


def create_clip(name: str, **kwargs: Any) -> nn.Module:
    """Call `open_clip.create_model` without its messages to the root logger; `foreign_weights` says what is read.

    Raises:
        UserError: The weights cannot be read, or open_clip failed, with the first lines of its message.
    """
    has_weights = name.startswith(LOCAL) or kwargs.get("pretrained") is not None
    required = has_weights and kwargs.get("load_weights", True)

    def of_other_threads(record: logging.LogRecord, thread: int = threading.get_ident()) -> bool:
        return record.thread != thread

    logging.root.addFilter(of_other_threads)  # applies to what is logged on the root logger itself
    model_cfg = _model_cfg(name)
    refuse_hidden_code(model_cfg.get("text_cfg") or {})
    if required and (weights := Path(name.removeprefix(LOCAL), WEIGHTS_NAME)).is_file():
        need_addresses(2 * weights.stat().st_size)
    try:
        open_clip = load_open_clip()
        with ExitStack() as stack:
            given, options = name, dict(kwargs)
            if name.startswith(LOCAL):
                given = LOCAL + str(stack.enter_context(for_open_clip(Path(name[len(LOCAL) :]), weights=required)))
            elif required and (file := Path(kwargs["pretrained"])).is_file():
                options["pretrained"] = str(stack.enter_context(for_open_clip(file, weights=True)))
            model: nn.Module = open_clip.create_model(given, require_pretrained=required, **options)
    except UserError:
        raise
    except Exception as error:
        usual = isinstance(error, RuntimeError | ValueError | OSError)
        if explain_memory_error(error):
            raise
        # Files of weights fail in many ways: pickle's, safetensors' and assertions of open_clip.
        hint = "" if usual else ". The weights are damaged, or those of another architecture."
        lines = [textwrap.shorten(line, 240, placeholder=" ...") for line in str(error).strip().splitlines()[:4]]
        raise UserError(
            f"open_clip cannot load {name} {kwargs.get('pretrained') or ''}: "
            f"{' '.join(lines) or type(error).__name__}{hint}"
        ) from error
    finally:
        logging.root.removeFilter(of_other_threads)
    return model
