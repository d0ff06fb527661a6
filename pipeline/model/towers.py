"""open_clip's two towers, as features only: temperature and bias belong to the objective, outside the engine.

A saved model is always a folder that open_clip itself can load (`local-dir:`): `open_clip_config.json` beside
`open_clip_model.safetensors`. Our checkpoints are such folders with training state beside them.

Shape legend: B images or texts, L tokens, d feature dimension.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from pipeline.config import section
from pipeline.errors import UserError
from pipeline.model.architectures import (
    CONFIG_NAME,
    check_same_towers,
    check_tag,
    check_tokenizer,
    load_open_clip,
    register,
)
from pipeline.model.batchnorm import use_fp32_batch_norms

WEIGHTS_NAME = "open_clip_model.safetensors"
LOGIT_KEYS = ("logit_scale", "logit_bias")


@section
class ModelConfig:
    """Which towers to train. `arch` is an open_clip name, one of pipeline/model/model_configs/, or a JSON file."""

    arch: str = "ViT-B-32"
    pretrained: str | None = None
    """Start from these weights: an open_clip tag, a weights file or a folder such as a checkpoint of ours."""
    image_size: int | None = Field(default=None, ge=8)
    patch_dropout: float | None = Field(default=None, ge=0.0, lt=1.0)
    grad_checkpointing: bool = False
    sync_batchnorm: bool = False
    """Batch norms use the statistics of all ranks' rows (with engine.micro_batch: of all ranks' micro-batches)."""
    compile: bool = False


class Towers(nn.Module):
    """Both encoders behind one forward; features are unit-norm fp32."""

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        for name in LOGIT_KEYS:  # a 0-dim parameter would crash the engine, and bf16 would round it
            if getattr(clip, name, None) is not None:
                delattr(clip, name)
                setattr(clip, name, None)
        self.clip = clip

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] normalised images and [B, L] tokens -> two [B, d] unit-norm fp32 features."""
        return self.encode_image(image), self.encode_text(text)

    def encode_image(self, image: Tensor) -> Tensor:
        return F.normalize(self.clip.encode_image(image).float(), dim=-1)  # type: ignore[operator]

    def encode_text(self, text: Tensor) -> Tensor:
        return F.normalize(self.clip.encode_text(text).float(), dim=-1)  # type: ignore[operator]


@dataclass(frozen=True)
class Architecture:
    """Everything about a model that is known without its weights."""

    name: str
    model_cfg: Mapping[str, Any]
    preprocess_cfg: Mapping[str, Any]
    tokenize: Callable[[list[str]], Tensor]

    @property
    def dim(self) -> int:
        return int(self.model_cfg["embed_dim"])

    @property
    def image_size(self) -> int:
        size = self.preprocess_cfg["size"]
        return int(size if isinstance(size, int) else size[0])

    @property
    def mean(self) -> tuple[float, float, float]:
        return tuple(self.preprocess_cfg["mean"])

    @property
    def std(self) -> tuple[float, float, float]:
        return tuple(self.preprocess_cfg["std"])


def build_towers(config: ModelConfig, *, seed: int, device: str | torch.device = "cpu") -> tuple[Towers, Architecture]:
    """The fp32 towers of a recipe with weights drawn from `seed` (or `config.pretrained`), and their description.

    `device="meta"` builds shapes only. Raises: UserError for an unknown architecture or pretrained weights.
    """
    open_clip = load_open_clip()
    name = register(config.arch)
    check_tokenizer(name)
    pretrained = config.pretrained
    folder = Path(pretrained) if pretrained else None
    kwargs: dict[str, Any] = {"force_image_size": config.image_size, "force_patch_dropout": config.patch_dropout}
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        if folder is not None and folder.is_dir():
            clip = _load_folder(folder, **kwargs)
            check_same_towers(folder, name)
        else:
            if pretrained and not folder.is_file():  # type: ignore[union-attr]
                check_tag(name, pretrained)
            # Towers start from `pretrained` or from scratch, never from a half: no base text weights.
            clip = _create(name, pretrained=pretrained, pretrained_text=False, device=device, **kwargs)
    model_cfg = open_clip.get_model_config(name)
    architecture = _describe(name, clip, model_cfg, source=name)
    use_fp32_batch_norms(clip, synchronised=config.sync_batchnorm)
    towers = Towers(clip)
    if config.grad_checkpointing:
        towers.clip.set_grad_checkpointing(True)  # type: ignore[operator]
    return towers, architecture


@dataclass(frozen=True)
class EvaluationModel:
    """A model to be evaluated: fp32, in eval mode, with its own preprocessing and tokenizer."""

    towers: Towers
    architecture: Architecture
    preprocess: Callable[[Any], Tensor]
    digest: str
    source: str

    @property
    def tokenize(self) -> Callable[[list[str]], Tensor]:
        return self.architecture.tokenize

    @property
    def image_size(self) -> int:
        return self.architecture.image_size

    @property
    def dim(self) -> int:
        return self.architecture.dim

    @torch.no_grad()
    def encode_image(self, image: Tensor) -> Tensor:
        """[B, 3, H, W] preprocessed images -> [B, d] unit-norm fp32."""
        return self.towers.encode_image(image)

    @torch.no_grad()
    def encode_text(self, text: Tensor) -> Tensor:
        """[B, L] tokens -> [B, d] unit-norm fp32."""
        return self.towers.encode_text(text)


def load_for_evaluation(spec: str, *, device: str | torch.device = "cpu") -> EvaluationModel:
    """Load any checkpoint for evaluation.

    Args: spec: a checkpoint folder of ours or any folder with `open_clip_config.json` (a hub download); a run's
      folder (its latest checkpoint is taken); or `ARCH:PRETRAINED`, where PRETRAINED is an open_clip tag or a file.
    Raises: UserError when nothing can be loaded from it, or the weights do not fit the architecture.
    """
    open_clip = load_open_clip()
    folder = _find_folder(Path(spec))
    if folder is not None:
        clip, source, name = _load_folder(folder), str(folder), f"local-dir:{folder}"
        stored = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        architecture = _describe(stored.get("architecture", folder.name), clip, stored["model_cfg"], source=name)
    else:
        arch, colon, pretrained = spec.partition(":")
        if not colon or not pretrained:
            raise UserError(
                f"{spec!r} is neither a folder with {CONFIG_NAME}, nor a run with checkpoints, nor ARCH:PRETRAINED "
                "(for example ViT-B-32-quickgelu:openai or ViT-B-32:/path/to/weights.safetensors)."
            )
        name = register(arch)
        if not Path(pretrained).is_file():
            check_tag(name, pretrained)
        clip = _create(name, pretrained=pretrained)
        source = spec
        architecture = _describe(name, clip, open_clip.get_model_config(name), source=name)
    return for_evaluation(Towers(clip).to(device), architecture, source=source)


def for_evaluation(towers: Towers, architecture: Architecture, *, source: str) -> EvaluationModel:
    """Towers in memory as an `EvaluationModel`; the same weights give the same digest as their checkpoint."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    transform = image_transform_v2(PreprocessCfg(**architecture.preprocess_cfg), is_train=False)
    return EvaluationModel(towers.eval(), architecture, transform, weights_digest(towers.clip.state_dict()), source)


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and fp32 values of all weights that features depend on (not the logit scale)."""
    digest = hashlib.sha256()
    for name in sorted(set(state) - set(LOGIT_KEYS)):
        value = state[name].detach().cpu()
        value = value.float() if value.is_floating_point() else value
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_open_clip(
    folder: Path,
    *,
    state: Mapping[str, Tensor],
    architecture: Architecture,
    logit_scale: float,
    logit_bias: float | None,
) -> list[Path]:
    """Write a folder that `open_clip.create_model("local-dir:FOLDER")` loads; returns the files written.

    Args: state: fp32 weights by open_clip's names. logit_scale: log(1/tau). logit_bias: SigLIP's, else None.
    """
    from safetensors.torch import save_file

    model_cfg = copy.deepcopy(dict(architecture.model_cfg))
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    tensors["logit_scale"] = torch.tensor(logit_scale, dtype=torch.float32)
    if logit_bias is not None:
        model_cfg["init_logit_bias"] = logit_bias
        tensors["logit_bias"] = torch.tensor(logit_bias, dtype=torch.float32)
    config = {
        "architecture": architecture.name,
        "model_cfg": model_cfg,
        "preprocess_cfg": dict(architecture.preprocess_cfg),
    }
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_NAME)
    return [folder / CONFIG_NAME, folder / WEIGHTS_NAME]


def _find_folder(path: Path) -> Path | None:
    if (path / CONFIG_NAME).is_file():
        return path
    checkpoints = sorted((path / "checkpoints").glob("step-*")) if path.is_dir() else []
    return next((c for c in reversed(checkpoints) if (c / CONFIG_NAME).is_file()), None)


def _load_folder(folder: Path, **kwargs: Any) -> nn.Module:
    if not (folder / CONFIG_NAME).is_file():
        raise UserError(f"{folder} has no {CONFIG_NAME}: it is not a model folder.")
    return _create(f"local-dir:{folder}", **kwargs)


def _create(name: str, **kwargs: Any) -> nn.Module:
    """open_clip's `create_model`, its failures told as the user's, its remarks to the root logger silenced."""
    required = name.startswith("local-dir:") or kwargs.get("pretrained") is not None
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        model: nn.Module = load_open_clip().create_model(name, require_pretrained=required, **kwargs)
    except (RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(
            f"open_clip cannot load {name} {kwargs.get('pretrained') or ''}: {' '.join(lines[:4])}"
        ) from error
    finally:
        logging.disable(disabled)
    return model


def _describe(name: str, clip: nn.Module, model_cfg: Mapping[str, Any], *, source: str) -> Architecture:
    preprocess = dict(clip.visual.preprocess_cfg)  # type: ignore[union-attr, arg-type]
    size = preprocess["size"]
    described: dict[str, Any] = copy.deepcopy(dict(model_cfg))
    described["vision_cfg"] = {**described["vision_cfg"], "image_size": size}
    described["vision_cfg"].pop("patch_dropout", None)  # a training setting, not part of the trained model
    try:
        tokenize = load_open_clip().get_tokenizer(source)
    except ImportError as error:
        raise UserError(
            f"{name} reads text with a tokenizer from Hugging Face, and {error.name or 'transformers'} is not "
            "installed: pip install transformers."
        ) from error
    return Architecture(name, described, preprocess, tokenize)
