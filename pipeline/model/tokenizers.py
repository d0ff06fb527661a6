"""Tokenizers of all of open_clip's architectures: its own, and Hugging Face's from a folder, a cache or the hub.

49 of open_clip's architectures (SigLIP, SigLIP 2, CLIPA, XLM-R and others) read text with a tokenizer from Hugging
Face. open_clip expects its files inside a model folder, so checkpoints of such models carry them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt")


def needs_files(model_cfg: Mapping[str, Any]) -> bool:
    """Whether the architecture's tokenizer is one of Hugging Face's."""
    return bool(model_cfg["text_cfg"].get("hf_tokenizer_name"))


def build_tokenizer(model_cfg: Mapping[str, Any], *, name: str, folder: Path | None = None) -> Any:
    """The tokenizer of an architecture: a callable from texts to int64 [b, L].

    Args:
        model_cfg: open_clip's description.
        name: the architecture's name, for open_clip's choice of its own tokenizer and for messages.
        folder: where the files of a Hugging Face tokenizer are; None: the cache or the hub, by the architecture's name
            for it.

    Raises:
        UserError: the files are not there and cannot be downloaded.
    """
    from open_clip import tokenizer as own

    text = model_cfg["text_cfg"]
    length = int(text.get("context_length", own.DEFAULT_CONTEXT_LENGTH))
    if not needs_files(model_cfg):
        return own.SimpleTokenizer(context_length=length, **text.get("tokenizer_kwargs", {}))
    source = str(folder) if folder is not None else str(text["hf_tokenizer_name"])
    if folder is not None and not any((folder / file).is_file() for file in FILES):
        raise UserError(f"{folder} has no tokenizer ({FILES[0]}): {name} needs that of {text['hf_tokenizer_name']}.")
    try:
        return own.HFTokenizer(
            source, context_length=length, tokenizer_mode=text.get("tokenizer_mode"), **text.get("tokenizer_kwargs", {})
        )
    except ImportError as error:
        raise UserError(
            f"{name} reads text with a tokenizer from Hugging Face, and {error.name or 'transformers'} is not "
            "installed: pip install -c constraints.txt -e '.[transformers]'."
        ) from error
    except Exception as error:  # transformers raises many kinds
        first = str(error).strip().splitlines()[0]
        raise UserError(
            f"The tokenizer of {name}, {source}, cannot be loaded ({type(error).__name__}: {first}). Without network, "
            "download it elsewhere and give its folder as model.tokenizer."
        ) from error


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """Write the files of a Hugging Face tokenizer into a model folder, so that open_clip finds them there.

    Returns:
        The files written; none for open_clip's own tokenizer.
    """
    plain = getattr(tokenizer, "tokenizer", None)
    if plain is None or not hasattr(plain, "save_pretrained"):
        return []
    before = set(folder.iterdir())
    plain.save_pretrained(str(folder))
    return sorted(path for path in folder.iterdir() if path not in before)
