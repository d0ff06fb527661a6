"""open_clip's architectures by name, and which weights go with which: what can be refused before anything is loaded."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipeline.config import flatten, suggest
from pipeline.errors import UserError

CONFIG_NAME = "open_clip_config.json"
OUR_CONFIGS = Path(__file__).parent / "model_configs"


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


def architecture_names() -> tuple[str, ...]:
    """Every name that `ModelConfig.arch` takes beside a JSON file."""
    open_clip = load_open_clip()
    ours = sorted(path.stem for path in OUR_CONFIGS.glob("*.json"))
    return (*ours, *(name for name in open_clip.list_models() if name not in ours))


def load_open_clip() -> Any:
    """The module."""
    import open_clip  # takes seconds, so only when a model is needed

    return open_clip


def register(arch: str) -> str:
    """Make open_clip know `arch`, and return the name under which it does."""
    open_clip = load_open_clip()
    path = Path(arch) if arch.endswith(".json") else OUR_CONFIGS / f"{arch}.json"
    if path.is_file():
        open_clip.add_model_config(path)
        return path.stem
    if arch not in open_clip.list_models():
        raise UserError(f"model.arch = {arch!r} is not known. {suggest(arch, architecture_names())}")
    return arch


def check_tag(name: str, pretrained: str) -> None:
    """Raises: UserError for a tag that `name` has not, or whose weights were trained with another activation."""
    open_clip = load_open_clip()
    tags = tuple(open_clip.list_pretrained_tags_by_model(name))
    if pretrained not in tags:
        raise UserError(
            f"{pretrained!r} is neither a file or folder nor a pretrained tag of {name}. "
            + (suggest(pretrained, tags) if tags else f"{name} has no published tags.")
        )
    trained = bool((open_clip.get_pretrained_cfg(name, pretrained) or {}).get("quick_gelu"))
    if trained != bool(open_clip.get_model_config(name).get("quick_gelu")):
        other = f"{name}-quickgelu" if trained else name.removesuffix("-quickgelu")
        take = f"take {other}:{pretrained}" if other in open_clip.list_models() else "take a file with its own config"
        raise UserError(
            f"{name}:{pretrained}: these weights were trained with {'QuickGELU' if trained else 'the exact GELU'}, and "
            f"{name} computes the other one. Every feature would be slightly wrong: {take}."
        )


def check_same_towers(folder: Path, name: str) -> None:
    """Raises: UserError when a folder's towers are not those of `name`, which its weights would be saved as."""
    stored = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    theirs, ours = _shape_of(stored["model_cfg"]), _shape_of(load_open_clip().get_model_config(name))
    differ = sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key))
    if differ:
        known = stored.get("architecture")
        remedy = f"Set model.arch={known}." if known else "Set model.arch to a JSON file that holds its model_cfg."
        raise UserError(
            f"model.pretrained = {folder} holds another architecture than model.arch = {name}: they differ in "
            f"{', '.join(differ)}. {remedy}"
        )


def _shape_of(model_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """What decides about the towers, by dotted key: not the image size, which `model.image_size` may change."""
    free = ("vision_cfg.image_size", "vision_cfg.patch_dropout", "init_logit_bias", "init_logit_scale")
    return {key: value for key, value in flatten(model_cfg).items() if key not in free}


def check_tokenizer(name: str) -> None:
    """Raises: UserError for towers whose tokenizer would have to lie in every checkpoint."""
    tokenizer = (load_open_clip().get_model_config(name) or {}).get("text_cfg", {}).get("hf_tokenizer_name")
    if tokenizer:
        raise UserError(
            f"model.arch = {name} reads text with the tokenizer {tokenizer} from Hugging Face, which open_clip expects "
            "inside every checkpoint; this project writes checkpoints without one. Train an architecture with "
            "open_clip's own tokenizer; `neuclip evaluate ARCH:TAG` scores published weights of this one."
        )


def describe(name: str, clip: nn.Module, model_cfg: Mapping[str, Any], *, source: str) -> Architecture:
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
