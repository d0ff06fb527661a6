"""What a model starts from: an architecture by name, and weights of any published or local form; nothing is loaded.

`model.pretrained` is one of: an open_clip tag; a weights file; a model folder (ours, any with `open_clip_config.json`,
or a `CLIPModel` of transformers); a run's folder, of which the latest checkpoint is taken; `hf-hub:OWNER/NAME`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import flatten
from pipeline.errors import UserError, in_a_line
from pipeline.model.architectures import TOKENIZER_FILES, check_tag, register
from pipeline.model.foreign_weights import stored_description
from pipeline.pictures.pixels import WHITE, Colour
from pipeline.run_files import MODEL_CONFIG_NAME, model_folder_in, no_model

HUB = "hf-hub:"
SECONDS = 10.0
"""How long the hub may take to answer."""
FROM_WEIGHTS = "pretrained"
"""As `model.arch`: the architecture that is stored with the weights."""

MAY_DIFFER = {
    "vision_cfg.image_size", "vision_cfg.patch_dropout", "vision_cfg.timm_model_pretrained", "init_logit_bias",
    "init_logit_scale", "text_cfg.context_length", "text_cfg.hf_tokenizer_name", "text_cfg.hf_model_pretrained",
}  # fmt: skip
"""Settings of open_clip's description that do not define the towers; image size and context length may change."""


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
    """Resolve `model.arch` and `model.pretrained` for training; errors as `resolve`, and for models of CoCa."""
    start = resolve(arch, pretrained)
    if "multimodal_cfg" in start.model_cfg:
        raise UserError(
            f"{start.name} is a CoCa model: its text tower is trained together with a captioning decoder and loss, "
            "which no objective here computes. Take the architecture of the same size without `coca_`."
        )
    return start


def start_of(spec: str) -> Start:
    """What `evaluate`, `export` and others load: a model folder, a run, or ARCH:PRETRAINED; errors as `resolve`."""
    if (folder := folder_of(spec)) is not None:
        return start_in(folder)
    arch, _, pretrained = spec.partition(":")
    if not pretrained:
        raise no_model(spec)
    return resolve(arch, pretrained)


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
    import open_clip

    name = register(arch)
    model_cfg = open_clip.get_model_config(name)
    if folder is not None:
        start = start_in(folder)
        theirs, ours = flatten(start.model_cfg), flatten(model_cfg)
        differ = sorted(key for key in (theirs.keys() | ours.keys()) - MAY_DIFFER if theirs.get(key) != ours.get(key))
        if differ:
            raise UserError(
                f"model.pretrained = {folder} holds another architecture than model.arch = {name}: they differ in "
                f"{', '.join(differ)}. model.arch={FROM_WEIGHTS} takes that of the weights."
            )
        return replace(start, name=name)
    if pretrained and not Path(pretrained).is_file():
        check_tag(name, pretrained)
    return Start(name, model_cfg, weights=pretrained)


def start_in(folder: Path, *, load: bool = True) -> Start:
    """The model in a folder."""
    stored = stored_description(folder)
    red, green, blue = stored.get("background") or WHITE
    name = stored.get("architecture") or folder.name
    return Start(name, stored["model_cfg"], folder=folder, background=(red, green, blue), load=load)


def folder_of(pretrained: str) -> Path | None:
    """The model folder that a `model.pretrained` means; None for files and tags. A model of the hub is downloaded.

    Raises:
        UserError: It cannot be downloaded, or a folder is none of a model.
    """
    if pretrained.startswith(HUB):
        import huggingface_hub

        with _hub_or_cache(pretrained, instead="give a local folder."):
            name, files = pretrained.removeprefix(HUB), ["open_clip_*", "*.json", "*.model", "*.txt", "merges.txt"]
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
        if not (folder / MODEL_CONFIG_NAME).is_file():
            raise UserError(f"{pretrained} has no {MODEL_CONFIG_NAME}: it is not an open_clip model.")
        return folder
    path = Path(pretrained)
    if not path.is_dir():
        return None
    if (model := model_folder_in(path)) is None:
        raise no_model(pretrained)
    return model


@functools.cache
def _unreachable(endpoint: str) -> str:
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # of whichever HTTP library the client has
        return f"{endpoint} cannot be reached ({type(error).__name__})"
    return ""


@contextmanager
def _hub_or_cache(what: str, *, instead: str) -> Iterator[str]:
    """Inside, the hub's client takes files from its cache at once where the hub cannot be asked; it would try for long.

    Yields why the hub cannot be asked, empty if it can. Where that fails, a `UserError` says that `what` is missing,
    and `instead` of it what to give.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    why = "HF_HUB_OFFLINE is set" if before else _unreachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = before or bool(why)
    try:
        yield why
    except UserError:
        raise
    except Exception as error:  # the hub's client raises many kinds
        if why:
            raise UserError(f"{what} is not in this machine's cache, and {why}: {instead}") from error
        raise UserError(
            f"{what} cannot be downloaded ({type(error).__name__}: {in_a_line(error)}). A private model needs "
            f"HF_TOKEN; without network, {instead}"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def check_fetched(arch: str, pretrained: str | None, *, tokenizer: str | None) -> None:
    """Check, before anything is loaded, that what a start needs from the hub (descriptions of towers, a tokenizer,
    weights) can be had. What is in the cache is not asked for.

    Raises:
        UserError: As `find_start`; or something is not in the cache, and the hub cannot be asked.
    """
    import open_clip
    from huggingface_hub import try_to_load_from_cache
    from open_clip.pretrained import download_pretrained

    start = find_start(arch, pretrained)
    text, vision = start.model_cfg.get("text_cfg") or {}, start.model_cfg.get("vision_cfg") or {}
    timm = str(vision.get("timm_model_name") or "").replace("hf_hub:", "hf-hub:")
    words = None if tokenizer or start.folder else text.get("hf_tokenizer_name")
    for what, repository, files, instead in (
        ("text tower", text.get("hf_model_name"), ("config.json",), "choose another model.arch."),
        ("vision tower", timm.partition(HUB)[2], ("config.json",), "choose another model.arch."),
        ("tokenizer", words, TOKENIZER_FILES, "give its folder as model.tokenizer."),
    ):
        if not repository or Path(repository).is_dir():
            continue
        if not any(isinstance(try_to_load_from_cache(repository, name), str) for name in files):
            with _hub_or_cache(f"The {what} {repository}", instead=instead) as why:
                if why:
                    raise FileNotFoundError(repository)
    if start.weights is not None and not Path(start.weights).is_file():
        what = f"model.pretrained = {start.weights} of {start.name}"
        with _hub_or_cache(what, instead="give a local file or folder.") as why:
            if why:  # offline, it looks into its caches
                download_pretrained(open_clip.get_pretrained_cfg(start.name, start.weights))
