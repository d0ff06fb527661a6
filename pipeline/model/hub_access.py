"""The Hugging Face hub: what a model needs from it is found missing before anything is loaded, in one line."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import UserError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.txt")
SECONDS = 10.0
"""How long the hub may take to answer."""


def why_offline() -> str:
    """Why the hub cannot be asked; empty if it can."""
    from huggingface_hub import constants

    return "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)


@functools.cache
def _unreachable(endpoint: str) -> str:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # of whichever HTTP library the client has
        return f"{endpoint} cannot be reached ({type(error).__name__})"
    return ""


@contextmanager
def hub_or_cache(what: str, *, instead: str) -> Iterator[None]:
    """Inside, the hub's client takes files from its cache at once where the hub cannot be asked; it would try for long.

    Raises:
        UserError: They are not in the cache either. `what` is missing, `instead` says what to give.
    """
    from huggingface_hub import constants

    why, before = why_offline(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(why)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not why:
            raise
        raise missing(what, why=why, instead=instead) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def missing(what: str, *, why: str, instead: str) -> UserError:
    """The error for what is in no cache while the hub cannot be asked."""
    return UserError(f"{what} is not in this machine's cache, and {why}. {instead}")


def check_cached(model_cfg: Mapping[str, Any], *, tokenizer: bool) -> None:
    """Check what towers fetch from the hub beside weights: descriptions of towers, and a tokenizer.

    Raises:
        UserError: It is not in the cache, and the hub cannot be asked.
    """
    from huggingface_hub import try_to_load_from_cache

    text, vision = model_cfg.get("text_cfg") or {}, model_cfg.get("vision_cfg") or {}
    timm = str(vision.get("timm_model_name") or "").replace("hf_hub:", "hf-hub:")
    needed = {
        "text tower": (text.get("hf_model_name"), ("config.json",)),
        "vision tower": (timm.removeprefix("hf-hub:") if timm.startswith("hf-hub:") else None, ("config.json",)),
        "tokenizer": (text.get("hf_tokenizer_name") if tokenizer else None, TOKENIZER_FILES),
    }
    for what, (repository, names) in needed.items():
        if not repository or Path(repository).is_dir():
            continue
        cached = any(isinstance(try_to_load_from_cache(repository, name), str) for name in names)
        if not cached and (why := why_offline()):
            instead = "Give its folder as model.tokenizer." if what == "tokenizer" else "Choose another model.arch."
            raise missing(f"The {what} {repository}", why=why, instead=instead)
