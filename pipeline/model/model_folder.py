"""A saved model: a folder that open_clip itself can load (`local-dir:`).

It holds `open_clip_config.json` and `open_clip_model.safetensors`. Our checkpoints are such folders with the training
state beside these two files. Weights and the optimizer's moments can be resized for another image size.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import textwrap
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import UserError, explain_file_error, explain_memory_error, need_addresses
from pipeline.files import UMASK, sha256_of
from pipeline.model.architectures import Architecture, build_tokenizer, save_tokenizer
from pipeline.model.foreign_weights import for_open_clip
from pipeline.model.starting_weights import Start
from pipeline.run_files import EMA_NAME, META_NAME, MODEL_CONFIG_NAME, digest_of, read_meta

WEIGHTS_NAME = "open_clip_model.safetensors"
LOGIT_KEYS = ("logit_scale", "logit_bias")
Name = TypeVar("Name", str, tuple[str, str])


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
    """Plain values that determine an image tower's outputs for given images and crops; weights by open_clip's names."""
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

    `state` are fp32 weights by open_clip's names; `logit` is log(1/tau) and a sigmoid loss's bias.
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


def create_from(start: Start, *, tokenizer: Path | None = None, **options: Any) -> tuple[nn.Module, Architecture]:
    """open_clip's model and its description. In a checkpoint, the files are verified.

    Where image size or context length differ from the weights', position embeddings are interpolated (bicubic for
    images, linear for text).

    Args:
        start: What it starts from.
        tokenizer: Folder with the files of a Hugging Face tokenizer, instead of the start's.
        options: Of `open_clip.create_model`.

    Raises:
        UserError: The weights are damaged or not finite, open_clip failed, or the tokenizer is not there or not read.
    """
    if tokenizer and not start.model_cfg["text_cfg"].get("hf_tokenizer_name"):
        raise UserError(
            f"model.tokenizer = {tokenizer} would have no effect: {start.name} reads text with open_clip's own "
            "tokenizer. Leave it out, or choose an architecture with one of Hugging Face."
        )
    clip: Any = _create(start, options)
    if start.has_weights:
        if start.folder is not None:
            _verify(start.folder)
        for key, value in clip.named_parameters():
            if not value.is_meta and not bool(value.isfinite().all()):
                where = start.weights or start.folder
                raise UserError(f"The weights {where} have values that are not finite (NaN or infinite), as in {key}.")
    described: dict[str, Any] = copy.deepcopy(dict(start.model_cfg))
    if options.get("force_context_length") is not None:
        described["text_cfg"]["context_length"] = options["force_context_length"]
    preprocess = dict(clip.visual.preprocess_cfg)
    described["vision_cfg"] = {**described["vision_cfg"], "image_size": preprocess["size"]}
    described["vision_cfg"].pop("patch_dropout", None)  # a training setting, not part of the trained model
    tokenize = build_tokenizer(described, name=start.name, folder=tokenizer or start.folder)
    return clip, Architecture(start.name, described, preprocess, tokenize, start.background)


def _create(start: Start, options: dict[str, Any]) -> nn.Module:
    """Call `open_clip.create_model`, without its messages to the root logger."""
    import open_clip

    thread = threading.get_ident()

    def of_other_threads(record: logging.LogRecord) -> bool:
        return record.thread != thread

    if start.model_cfg["text_cfg"].get("hf_model_name"):
        from transformers import dynamic_module_utils

        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # a tower with code of its own fails instead of asking for leave
    required = start.has_weights
    file = Path(start.weights) if start.weights is not None and Path(start.weights).is_file() else None
    local = start.folder or file
    logging.root.addFilter(of_other_threads)  # applies to what is logged on the root logger itself
    try:
        with for_open_clip(local, weights=required) if local else nullcontext() as path:
            name = start.name if start.folder is None else f"local-dir:{path}"
            # Without weights both towers start from scratch: no weights of the text tower's base model.
            options |= {"pretrained_text": False, "require_pretrained": required, "load_weights": start.load}
            weights = str(path) if file else start.weights
            if required and local:
                _check_size(name, local)
            model: nn.Module = open_clip.create_model(name, pretrained=weights, **options)
    except UserError:
        raise
    except Exception as error:
        # Without weights, an AttributeError is a bug. With them, it may come from a damaged file.
        if explain_memory_error(error) or (not required and isinstance(error, AttributeError | NameError)):
            raise
        # Files of weights fail in many ways: pickle's, safetensors' and assertions of open_clip.
        usual = isinstance(error, RuntimeError | ValueError | OSError)
        hint = "" if usual or not required else ". The weights are damaged, or those of another architecture."
        lines = [textwrap.shorten(line, 240, placeholder=" ...") for line in str(error).strip().splitlines()[:4]]
        raise UserError(
            f"open_clip cannot load {start.folder or start.name} {start.weights or ''}: "
            f"{' '.join(lines) or type(error).__name__}{hint}"
        ) from error
    finally:
        logging.root.removeFilter(of_other_threads)
    return model


def _check_size(name: str, weights: Path) -> None:
    """Refuse a description of more values than its weights have bytes, before memory is taken for them."""
    import open_clip

    with torch.device("meta"):
        options = {"pretrained_text": False, "require_pretrained": False, "load_weights": False}
        clip = open_clip.create_model(name, device="meta", **options)
    values = sum(each.numel() for each in (*clip.parameters(), *clip.buffers()))
    files = weights.iterdir() if weights.is_dir() else [weights]
    if values > (size := sum(file.stat().st_size for file in files if file.is_file())):
        raise UserError(
            f"{weights} has {size:,} bytes, which cannot be the weights of the described model: it has {values:,} "
            "values. The description or the weights are damaged, or of another architecture."
        )


def _verify(folder: Path) -> None:
    remedy = "Take another checkpoint, or copy this one again from where it is whole."
    try:
        stated = stated_files(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"The {META_NAME} of {folder} is damaged: {str(error).rstrip('.')}. {remedy}") from error
    for name, facts in stated.items():
        if "sha256" in facts and sha256_of(folder / name) != facts["sha256"]:
            raise UserError(f"{folder / name} is damaged: its SHA-256 is not the one in {META_NAME}. {remedy}")


def stated_files(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Size and SHA-256 of the two files of a checkpoint, or of the average of the weights in one, from its
    `checkpoint.json`; empty for other folders.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
    """
    prefix, checkpoint = (f"{EMA_NAME}/", folder.parent) if folder.name == EMA_NAME else ("", folder)
    if not (checkpoint / META_NAME).is_file():
        return {}
    meta = read_meta(checkpoint)
    if "digest" in meta and meta["digest"] != digest_of(meta):
        raise ValueError("its contents do not match their SHA-256")
    files = meta.get("files", {})
    if not isinstance(files, Mapping) or not all(isinstance(facts, Mapping) for facts in files.values()):
        raise ValueError("its list of files is none")
    return {name: files[prefix + name] for name in (MODEL_CONFIG_NAME, WEIGHTS_NAME) if prefix + name in files}


def resized(name: str, value: Tensor, *, shape: torch.Size, nonnegative: bool = False) -> Tensor:
    """A parameter of open_clip's state dict, or a moment of it, in the shape that it has at another image size.

    From [1 + g * g, D] to [1 + G * G, D], by open_clip's bicubic rule, or linearly where it must stay `nonnegative`, as
    second moments do; unchanged if it has this shape.

    Raises:
        UserError: Only position embeddings of square grids can change their shape.
    """
    if value.shape == shape:
        return value
    old, new = (math.isqrt(s[0] - 1) if len(s) == 2 else 0 for s in (value.shape, shape))
    square = len(shape) == 2 and old**2 + 1 == len(value) and new**2 + 1 == shape[0] and value.shape[1] == shape[1]
    if not (name.startswith("visual.") and name.endswith("positional_embedding") and square):
        raise UserError(
            f"The parameter {name} is {tuple(value.shape)} at one image size and {tuple(shape)} at the other. Only "
            "position embeddings of open_clip's own vision towers can change with the image size: keep one size for "
            "this architecture."
        )
    token, grid = value[:1].float(), value[1:].float()
    grid = grid.reshape(1, old, old, -1).permute(0, 3, 1, 2)
    mode = "bilinear" if nonnegative else "bicubic"
    grid = F.interpolate(grid, size=(new, new), mode=mode, antialias=True, align_corners=False)
    if nonnegative:
        grid = grid.clamp_min(0.0)  # rounding
    return torch.cat([token, grid.permute(0, 2, 3, 1).reshape(new * new, -1)]).to(value.dtype)


def resized_state(values: Mapping[Name, Tensor], *, shapes: Mapping[str, torch.Size]) -> dict[Name, Tensor]:
    """Weights by open_clip's names, or optimizer state by (parameter, key), in the shapes of another image size."""
    new = {}
    for key, value in values.items():
        name, kind = (key, "") if isinstance(key, str) else key
        new[key] = resized(name, value, shape=shapes.get(name, value.shape), nonnegative=kind == "exp_avg_sq")
    return new
