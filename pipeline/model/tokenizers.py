"""Tokenizers of all of open_clip's architectures: its own, and Hugging Face's from a folder, a cache or the hub.

49 of open_clip's architectures (SigLIP, SigLIP 2, CLIPA, XLM-R and others) read text with a tokenizer from Hugging
Face. open_clip expects its files inside a model folder, so checkpoints of such models carry them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

TRUST_VARIABLE = "NEUCLIP_TRUST_REMOTE_CODE"
"""Environment variable that allows what `model.trust_remote_code` does in commands without a recipe."""
HARMLESS = frozenset({"additional_special_tokens", "clean", "language", "reduction_mask", "strip_sep_token"})
"""Options of open_clip's tokenizers; others go to transformers, which has some that run code or write files."""

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt")


def needs_files(model_cfg: Mapping[str, Any]) -> bool:
    """Whether the architecture's tokenizer is one of Hugging Face's."""
    return bool(model_cfg["text_cfg"].get("hf_tokenizer_name"))


def trusts_remote_code() -> bool:
    """Whether the user's environment allows the code that comes with a model."""
    return os.environ.get(TRUST_VARIABLE, "").lower() in ("1", "true", "yes")


def refuse_hidden_code(text_cfg: Mapping[str, Any]) -> None:
    """Make a text tower of Hugging Face fail if it has code of its own; transformers would ask on the terminal."""
    if text_cfg.get("hf_model_name"):
        from transformers import dynamic_module_utils

        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def build_tokenizer(
    model_cfg: Mapping[str, Any], *, name: str, folder: Path | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer of an architecture: a callable from texts to int64 [b, L].

    Args:
        model_cfg: open_clip's description.
        name: The architecture's name, for open_clip's choice of its own tokenizer and for messages.
        folder: Where the files of a Hugging Face tokenizer are; None: the cache or the hub, by the architecture's name
            for it.
        trust_remote_code: Whether the user allows a tokenizer of Hugging Face to run the Python code that comes with
            it. A description cannot allow that itself.

    Raises:
        UserError: The files are not there and cannot be downloaded, or the tokenizer needs code that is not allowed.
    """
    from open_clip import tokenizer as own

    text = model_cfg["text_cfg"]
    length = int(text.get("context_length", own.DEFAULT_CONTEXT_LENGTH))
    options = dict(text.get("tokenizer_kwargs") or {})
    trusted = trust_remote_code or trusts_remote_code()
    if (odd := options.keys() - HARMLESS) and not trusted:
        raise UserError(_refusal(name, f"its description has the tokenizer options {', '.join(sorted(odd))}"))
    if not needs_files(model_cfg):
        return own.SimpleTokenizer(context_length=length, **options)
    source = str(folder) if folder is not None else str(text["hf_tokenizer_name"])
    if folder is not None and not any((folder / file).is_file() for file in FILES):
        raise UserError(f"{folder} has no tokenizer ({FILES[0]}): {name} needs that of {text['hf_tokenizer_name']}.")
    try:
        return own.HFTokenizer(
            source,
            context_length=length,
            tokenizer_mode=text.get("tokenizer_mode"),
            **{**options, "trust_remote_code": trusted},
        )
    except ImportError as error:
        raise UserError(
            f"{name} reads text with a tokenizer from Hugging Face, and {error.name or 'transformers'} is not "
            "installed: pip install -c constraints.txt -e '.[transformers]'."
        ) from error
    except Exception as error:  # transformers raises many kinds
        first = str(error).strip().splitlines()[0]
        if "trust_remote_code" in str(error):
            raise UserError(_refusal(name, f"its tokenizer, {source}, comes with Python code")) from error
        raise UserError(
            f"The tokenizer of {name}, {source}, cannot be loaded ({type(error).__name__}: {first}). Without network, "
            "download it elsewhere and give its folder as model.tokenizer."
        ) from error


def _refusal(name: str, why: str) -> str:
    return (
        f"{name} could run code of others on this machine: {why}. Use a model without, or read the code and, if you "
        f"trust it, set model.trust_remote_code=true (in commands without a recipe: {TRUST_VARIABLE}=1)."
    )


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
