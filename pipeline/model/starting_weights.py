"""What a model starts from: an architecture by name, and weights of any published or local form.

`model.pretrained` is one of: an open_clip tag; a weights file; a model folder (ours, any with `open_clip_config.json`,
or a `CLIPModel` of transformers); a run's folder, of which the latest checkpoint is taken; `hf-hub:OWNER/NAME`. Weights
and the optimizer's moments can be resized for another image size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.errors import UserError, in_a_line
from pipeline.model.architectures import check_same_towers, check_tag, load_open_clip, register
from pipeline.model.foreign_weights import stored_description
from pipeline.model.hub_access import check_cached, hub_or_cache, why_offline
from pipeline.model.model_folder import create_clip, load_folder
from pipeline.pictures.pixels import WHITE, Colour
from pipeline.run_files import MODEL_CONFIG_NAME, model_folder_in, no_model

HUB = "hf-hub:"
FROM_WEIGHTS = "pretrained"
"""As `model.arch`: the architecture that is stored with the weights."""
HUB_FILES = ("open_clip_*", "*.json", "*.model", "*.txt", "merges.txt")


@dataclass(frozen=True)
class Start:
    """An architecture and where its weights come from."""

    name: str
    """The architecture's name, under which checkpoints are saved."""
    model_cfg: Mapping[str, Any]
    """open_clip's description of the towers."""
    folder: Path | None = None
    """A model folder with weights."""
    weights: str | None = None
    """A tag or a weights file instead."""
    background: Colour = WHITE
    """As in `Architecture`."""
    load: bool = True
    """Whether the folder's weights are loaded, and not only its architecture built."""

    @property
    def has_weights(self) -> bool:
        return self.weights is not None or (self.folder is not None and self.load)


def find_start(arch: str, pretrained: str | None) -> Start:
    """Resolve `model.arch` and `model.pretrained` for training.

    Raises:
        UserError: As `resolve`, or no objective here trains such a model.
    """
    start = resolve(arch, pretrained)
    if "multimodal_cfg" in start.model_cfg:
        raise UserError(
            f"{start.name} is a CoCa model: its text tower is trained together with a captioning decoder and loss, "
            "which no objective here computes. Take the architecture of the same size without `coca_`."
        )
    return start


def start_of(spec: str) -> Start:
    """What `evaluate`, `export`, `score`, `playground` and `features` load: a model folder, a run, or ARCH:PRETRAINED.

    Raises:
        UserError: There is no model at `spec`, or the weights do not fit the architecture.
    """
    folder = _download(spec.removeprefix(HUB)) if spec.startswith(HUB) else model_folder_in(Path(spec))
    if folder is not None:
        return start_in(folder)
    arch, colon, pretrained = spec.partition(":")
    if not colon or not pretrained:
        raise no_model(spec)
    start = resolve(arch, pretrained)
    return start if start.folder is None else start_in(start.folder)


def resolve(arch: str, pretrained: str | None) -> Start:
    """Resolve an architecture and its weights; a hub model is downloaded into the hub's cache.

    Raises:
        UserError: The architecture or the weights do not exist, or do not fit each other.
    """
    folder = folder_of(pretrained) if pretrained else None
    if arch == FROM_WEIGHTS:
        if folder is None:
            raise UserError(
                f"model.arch = {FROM_WEIGHTS} takes the architecture that is stored with model.pretrained, which must "
                f"then be a model folder, a run or {HUB}OWNER/NAME; it is {pretrained!r}."
            )
        return start_in(folder)
    if model_folder_in(Path(arch)) == Path(arch):
        if pretrained:
            raise UserError(
                f"model.arch = {arch} is a model folder: give it as model.pretrained, with model.arch=pretrained."
            )
        return start_in(Path(arch), load=False)
    name = register(arch)
    model_cfg = load_open_clip().get_model_config(name)
    if folder is not None:
        check_same_towers(folder, name)
    elif pretrained and not Path(pretrained).is_file():
        check_tag(name, pretrained)
    return Start(name, model_cfg, folder=folder, weights=None if folder else pretrained)


def start_in(folder: Path, *, load: bool = True) -> Start:
    """The model in a folder."""
    stored = stored_description(folder)
    red, green, blue = stored.get("background") or WHITE
    name = stored.get("architecture") or folder.name
    return Start(name, stored["model_cfg"], folder=folder, background=(red, green, blue), load=load)


def folder_of(pretrained: str) -> Path | None:
    """The model folder that a `model.pretrained` means; None for files and tags."""
    if pretrained.startswith(HUB):
        return _download(pretrained.removeprefix(HUB))
    path = Path(pretrained)
    if not path.is_dir():
        return None
    folder = model_folder_in(path)
    if folder is None:
        raise UserError(
            f"model.pretrained = {path} is neither a model folder ({MODEL_CONFIG_NAME}, or transformers' config.json) "
            "nor a run with checkpoints."
        )
    return folder


def _download(name: str) -> Path:
    """The folder of a hub model."""
    import huggingface_hub

    try:
        with hub_or_cache(f"{HUB}{name}", instead="Give a local folder."):
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except UserError:
        raise
    except Exception as error:  # the hub's client raises many kinds
        raise UserError(
            f"{HUB}{name} cannot be downloaded ({type(error).__name__}: {in_a_line(error)}). A "
            "private model needs HF_TOKEN; without network, give a local folder."
        ) from error
    if not (folder / MODEL_CONFIG_NAME).is_file():
        raise UserError(f"{HUB}{name} has no {MODEL_CONFIG_NAME}: it is not an open_clip model.")
    return folder


def check_fetched(arch: str, pretrained: str | None, *, tokenizer: str | None) -> None:
    """Check, before anything is loaded, that what a start needs from the hub can be had.

    Raises:
        UserError: As `find_start`; or it is not in the cache, and the hub cannot be asked.
    """
    start = find_start(arch, pretrained)
    check_cached(start.model_cfg, tokenizer=tokenizer is None and start.folder is None)
    if start.weights is not None and not Path(start.weights).is_file() and why_offline():
        from open_clip.pretrained import download_pretrained

        config = load_open_clip().get_pretrained_cfg(start.name, start.weights)
        with hub_or_cache(
            f"model.pretrained = {start.weights} of {start.name}", instead="Give a local file or folder."
        ):
            download_pretrained(config)  # offline, it looks into its caches


def create_from(start: Start, **options: Any) -> nn.Module:
    """Build the towers with options of `open_clip.create_model`; where image size or context length differ from the
    weights', position embeddings are interpolated (bicubic for images, linear for text); see `interpolated`.

    Raises:
        UserError: open_clip cannot load the weights, or they are not finite.
    """
    if start.folder is not None:
        clip = load_folder(start.folder, load_weights=start.load, **options)
    else:
        # Without weights both towers start from scratch: no weights of the text tower's base model.
        clip = create_clip(start.name, pretrained=start.weights, pretrained_text=False, **options)
    if start.has_weights:
        _check_finite(clip, start.weights or start.folder)
    return clip


def _check_finite(clip: nn.Module, weights: str | Path | None) -> None:
    for name, value in clip.named_parameters():
        if not value.is_meta and not bool(value.isfinite().all()):
            raise UserError(f"The weights {weights} have values that are not finite (NaN or infinite), as in {name}.")


def interpolated(start: Start, *, image_size: int | None, context_length: int | None) -> list[str]:
    """Sentences about the position embeddings that were interpolated when the weights were loaded."""
    if not start.has_weights:
        return []
    stored = start.model_cfg if start.folder is None else start_in(start.folder).model_cfg
    notes = []
    for what, before, now in (
        ("image size", stored["vision_cfg"].get("image_size", 224), image_size),
        ("context length", stored["text_cfg"].get("context_length", 77), context_length),
    ):
        before = before[0] if isinstance(before, list | tuple) else before
        if now is not None and now != before:
            notes.append(f"The weights' {what} is {before}, the model's {now}: position embeddings are interpolated.")
    return notes


def with_sizes(model_cfg: Mapping[str, Any], *, context_length: int | None) -> dict[str, Any]:
    """The description with another context length."""
    if context_length is None:
        return dict(model_cfg)
    return {**model_cfg, "text_cfg": {**model_cfg["text_cfg"], "context_length": context_length}}


def logit_of(clip: nn.Module) -> tuple[float, float | None] | None:
    """`(log(1/tau), bias)` of a model, as its weights have them."""
    scale, bias = (getattr(clip, name, None) for name in ("logit_scale", "logit_bias"))
    if not isinstance(scale, Tensor) or scale.device.type == "meta":
        return None
    return float(scale.detach()), None if bias is None else float(bias.detach())


RESIZABLE = "positional_embedding"
"""How open_clip names position embeddings of a class token and a square grid of patches (ViT) or pixels (ResNet)."""


def resized(name: str, value: Tensor, *, shape: torch.Size, nonnegative: bool = False) -> Tensor:
    """A parameter, or a moment of it, in the shape that it has at another image size.

    Args:
        name: The parameter's name in open_clip's state dict.
        value: [1 + g * g, D], or any tensor of `shape`, which is returned as it is.
        shape: The shape at the new size, [1 + G * G, D].
        nonnegative: Interpolate linearly, which keeps the sign, as second moments need; else by open_clip's
            bicubic rule.

    Raises:
        UserError: Only position embeddings of square grids can change their shape.
    """
    if value.shape == shape:
        return value
    old, new = (math.isqrt(s[0] - 1) if len(s) == 2 else 0 for s in (value.shape, shape))
    square = len(shape) == 2 and old**2 + 1 == len(value) and new**2 + 1 == shape[0] and value.shape[1] == shape[1]
    if not (name.startswith("visual.") and name.endswith(RESIZABLE) and square):
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


def resized_state(values: Mapping[str, Tensor], *, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Weights by open_clip's names in the shapes of a model of another image size."""
    return {name: resized(name, value, shape=shapes.get(name, value.shape)) for name, value in values.items()}


def resized_moments(
    moments: Mapping[tuple[str, str], Tensor], *, shapes: Mapping[str, torch.Size]
) -> dict[tuple[str, str], Tensor]:
    """Optimizer state by (parameter, key) in the shapes of a model of another image size."""
    return {
        (name, key): resized(name, value, shape=shapes.get(name, value.shape), nonnegative=key == "exp_avg_sq")
        for (name, key), value in moments.items()
    }
