"""open_clip's architectures by name, whether weights fit them, and their tokenizers.

49 of them (SigLIP, CLIPA, XLM-R and others) read text with a tokenizer from Hugging Face, whose files open_clip expects
inside a model folder: checkpoints of such models carry them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeline.config import suggest
from pipeline.errors import UserError, in_a_line
from pipeline.files import parse_mapping, read_bounded
from pipeline.model.foreign_weights import check_types
from pipeline.pictures.pixels import WHITE, Colour

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt")
OUR_CONFIGS = Path(__file__).parent / "model_configs"
HARMLESS = frozenset({"additional_special_tokens", "clean", "language", "reduction_mask", "strip_sep_token"})
"""Options of open_clip's tokenizers; others go to transformers, which has some that run code or write files."""


@dataclass(frozen=True)
class Architecture:
    """A model's description: everything but its weights."""

    name: str
    model_cfg: Mapping[str, Any]
    """As in open_clip's model configs, with the image size of this model."""
    preprocess_cfg: Mapping[str, Any]
    """open_clip's `PreprocessCfg` as a mapping: size, mean, std, interpolation, resize mode."""
    tokenize: Callable[[list[str]], Tensor]
    background: Colour = WHITE
    """Behind what is transparent in the pictures that it is trained on."""

    @property
    def dim(self) -> int:
        """Dimension of the features."""
        return int(self.model_cfg["embed_dim"])

    @property
    def context_length(self) -> int:
        """Tokens of a text."""
        return int(self.model_cfg["text_cfg"].get("context_length", 77))

    @property
    def image_size(self) -> int:
        """Side of the square input image in pixels."""
        size = self.preprocess_cfg["size"]
        return int(size if isinstance(size, int) else size[0])

    @property
    def mean(self) -> tuple[float, float, float]:
        return tuple(self.preprocess_cfg["mean"])

    @property
    def own_background(self) -> dict[str, list[int]]:
        """The background for descriptions, in which white is left out."""
        return {} if self.background == WHITE else {"background": [*self.background]}

    @property
    def std(self) -> tuple[float, float, float]:
        return tuple(self.preprocess_cfg["std"])


def register(arch: str) -> str:
    """The name by which open_clip knows `arch`, which is registered there if it is one of our configs or a JSON file.

    Raises:
        UserError: There is no such architecture.
    """
    import open_clip

    path = Path(arch) if arch.endswith(".json") else OUR_CONFIGS / f"{arch}.json"
    if path.is_file():
        try:  # open_clip passes over such files
            check_types({"model_cfg": parse_mapping(read_bounded(path))}, file=path)
        except (OSError, RecursionError, ValueError) as error:
            raise UserError(f"model.arch = {path} is not in open_clip's format: {in_a_line(error)}.") from error
        open_clip.add_model_config(path)
        return path.stem
    if arch.endswith(".json"):
        raise UserError(f"model.arch = {arch!r}: there is no such file. Give a JSON file in open_clip's format.")
    if arch not in open_clip.list_models():
        names = [*sorted(path.stem for path in OUR_CONFIGS.glob("*.json")), *open_clip.list_models()]
        raise UserError(f"model.arch = {arch!r} is not known. {suggest(arch, tuple(dict.fromkeys(names)))}")
    return arch


def check_tag(name: str, pretrained: str) -> None:
    """Check that architecture `name` has published weights `pretrained`, trained with the activation it computes.

    Raises:
        UserError: The tag does not exist, or its weights need the other kind of GELU.
    """
    import open_clip

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
            f"{name} computes the other one, which would make every feature slightly wrong: {take}."
        )


def build_tokenizer(model_cfg: Mapping[str, Any], *, name: str, folder: Path | None = None) -> Any:
    """The tokenizer of an architecture: a callable from texts to int64 [b, L].

    Args:
        model_cfg: open_clip's description.
        name: The architecture's name, for messages.
        folder: Where the files of a Hugging Face tokenizer are; None: the cache or the hub, by the description's name.

    Raises:
        UserError: The files are not there and cannot be downloaded, or the tokenizer would run Python code of others.
    """
    from open_clip import tokenizer as own

    text = model_cfg["text_cfg"]
    length = int(text.get("context_length", own.DEFAULT_CONTEXT_LENGTH))
    options = dict(text.get("tokenizer_kwargs") or {})
    if odd := options.keys() - HARMLESS:
        raise UserError(_refusal(name, f"its description has the tokenizer options {', '.join(sorted(odd))}"))
    if not text.get("hf_tokenizer_name"):
        if options:
            return own.SimpleTokenizer(context_length=length, **options)
        plain = copy.copy(own._tokenizer)  # reading its vocabulary again would take a quarter of a second
        plain.context_length = length
        return plain
    source = str(folder) if folder is not None else str(text["hf_tokenizer_name"])
    if folder is not None and not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer ({TOKENIZER_FILES[0]}): {name} needs that of {text['hf_tokenizer_name']}."
        )
    try:
        options |= {"tokenizer_mode": text.get("tokenizer_mode"), "trust_remote_code": False}
        tokenizer = own.HFTokenizer(source, context_length=length, **options)
        tokenizer(["a caption"])  # fails for one that cannot pad
        return tokenizer
    except ImportError as error:
        raise UserError(
            f"{name} reads text with a tokenizer from Hugging Face, and {error.name or 'transformers'} is not "
            "installed: pip install -c constraints.txt -e '.[transformers]'."
        ) from error
    except Exception as error:  # transformers raises many kinds
        if "trust_remote_code" in str(error):
            raise UserError(_refusal(name, f"its tokenizer, {source}, comes with Python code")) from error
        raise UserError(
            f"The tokenizer of {name}, {source}, cannot be loaded ({type(error).__name__}: {in_a_line(error)}). "
            "Without network, download it elsewhere and give its folder as model.tokenizer."
        ) from error


def _refusal(name: str, why: str) -> str:
    return f"{name} could run code of others on this machine: {why}. Take a model whose tokenizer needs none."


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """Write the files of a Hugging Face tokenizer into a model folder, where open_clip looks for them. Returns them."""
    before = set(folder.iterdir())
    if hasattr(tokenizer, "tokenizer"):
        tokenizer.tokenizer.save_pretrained(str(folder))
    return sorted(set(folder.iterdir()) - before)
