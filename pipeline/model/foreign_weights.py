"""Models that other programs wrote, in the form that open_clip loads: `transformers.CLIPModel` folders, OpenAI's and
trainers' state dicts, DeepSpeed's `mp_rank_*_model_states.pt`.

They come from strangers: nothing but tensors and JSON is read (safetensors, or torch with `weights_only`).
"""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
from torch import Tensor

from pipeline.config import first_problem
from pipeline.errors import UserError, in_a_line, need_addresses
from pipeline.files import parse_mapping, read_bounded
from pipeline.pictures.pixels import WHITE
from pipeline.run_files import MODEL_CONFIG_NAME, TRANSFORMERS_CONFIG_NAME

TRANSFORMERS_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
BLOCK_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
"""Names of the parts of a block in open_clip -> in transformers."""
LARGEST = 10_000
Number = Annotated[int, pydantic.Field(le=LARGEST)]
_WRAPPERS = ("state_dict", "module", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.", "clip.")
_OF_OPENAI = ("input_resolution", "context_length", "vocab_size")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "text": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
             "vocab_size": 49408, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
               "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
}  # fmt: skip
NAMES = {
    "logit_scale": "logit_scale",
    "text_projection.weight": "text_projection",
    "visual_projection.weight": "visual.proj",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
}
"""Names in transformers' CLIPModel -> in open_clip's CLIP, outside of the blocks."""


def stored_description(folder: Path) -> dict[str, Any]:
    """The contents of a folder's `open_clip_config.json`, or what it would be for a `CLIPModel` of transformers.

    Raises:
        UserError: A file is damaged or has values of other types, or it is another model of transformers.
    """
    path = folder / MODEL_CONFIG_NAME
    try:
        if path.is_file():
            tree = parse_mapping(read_bounded(path))
        else:
            path = folder / TRANSFORMERS_CONFIG_NAME
            tree = {"model_cfg": _clip_cfg(path), "preprocess_cfg": _preprocessing(folder)}
        check_types(tree, file=path)
    except UserError:  # a ValueError, too
        raise
    except (AttributeError, OSError, RecursionError, TypeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"The description of the model in {folder} is damaged: {in_a_line(error)}.") from error
    return tree


def check_types(description: Mapping[str, Any], *, file: Path) -> None:
    """Raise a ValueError if a value of a model's description is missing, has another type than open_clip's, or is a
    number of layers, tokens or pixels above `LARGEST`: those take time and memory whatever the weights are."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg
    from open_clip.transform import PreprocessCfg

    @dataclass
    class Preprocess(PreprocessCfg):  # open_clip asserts these
        interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
        resize_mode: Literal["shortest", "longest", "squash"] = "shortest"

    @dataclass
    class Vision(CLIPVisionCfg):
        layers: tuple[Number, Number, Number, Number] | Number = 12
        image_size: tuple[Number, Number] | Number = 224

    @dataclass
    class Text(CLIPTextCfg):
        layers: Number = 12
        context_length: Number = 77

    @dataclass
    class Towers:
        embed_dim: int
        vision_cfg: Vision
        text_cfg: Text

    @dataclass
    class Description:
        model_cfg: Towers
        preprocess_cfg: Preprocess = field(default_factory=Preprocess)
        architecture: str = ""
        background: tuple[int, int, int] = WHITE

    def without_none(tree: Any) -> Any:
        """open_clip's own files have null where its types allow none."""
        return {k: without_none(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else tree

    try:
        pydantic.TypeAdapter(Description).validate_json(json.dumps(without_none(description)), strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(first_problem(error, file=str(file))) from error


def _clip_cfg(path: Path) -> dict[str, Any]:
    """open_clip's description of a `CLIPModel`, with the defaults of transformers' CLIPConfig."""
    config = parse_mapping(read_bounded(path))
    if (kind := config.get("model_type")) != "clip":
        raise UserError(
            f"{path.parent} holds a transformers model of the type {kind!r}, and only CLIPModel (type 'clip') is read. "
            f"Give the same model in open_clip's layout ({MODEL_CONFIG_NAME}), as a tag or hf-hub:OWNER/NAME."
        )
    text, image = ({**_DEFAULTS[side], **(config.get(f"{side}_config") or {})} for side in ("text", "vision"))
    norms = {(side["hidden_act"], side["layer_norm_eps"]) for side in (text, image)}
    if not (len(norms) == 1 and norms <= {("gelu", 1e-5), ("quick_gelu", 1e-5)}):
        raise UserError(
            f"{path}: open_clip has one activation for both towers, gelu or quick_gelu, and layer_norm_eps = 1e-05; "
            f"these have {sorted(norms, key=str)}."
        )
    head_width = image["hidden_size"] // image["num_attention_heads"]
    ratios = [side["intermediate_size"] / side["hidden_size"] for side in (image, text)]
    return {
        "embed_dim": config.get("projection_dim", 512),
        "vision_cfg": {
            "image_size": image["image_size"],
            "layers": image["num_hidden_layers"],
            "width": image["hidden_size"],
            "patch_size": image["patch_size"],
            **({"head_width": head_width} if head_width != 64 else {}),
            **({"mlp_ratio": ratios[0]} if ratios[0] != 4 else {}),
        },
        "text_cfg": {
            "context_length": text["max_position_embeddings"],
            "vocab_size": text["vocab_size"],
            "width": text["hidden_size"],
            "heads": text["num_attention_heads"],
            "layers": text["num_hidden_layers"],
            **({"mlp_ratio": ratios[1]} if ratios[1] != 4 else {}),
        },
        **({"quick_gelu": True} if image["hidden_act"] == "quick_gelu" else {}),
    }


def _preprocessing(folder: Path) -> dict[str, Any]:
    """open_clip's form of the image processor's settings; OpenAI's where there are none."""
    files = [folder / f"{name}_config.json" for name in ("preprocessor", "processor")]
    path = next((path for path in files if path.is_file()), None)
    stored = parse_mapping(read_bounded(path)) if path else {}
    stored = (stored.get("image_processor") or {}) if path == files[1] else stored
    preprocessing = {key: stored[f"image_{key}"] for key in ("mean", "std") if stored.get(f"image_{key}")}
    return {**preprocessing, "interpolation": "bilinear" if stored.get("resample") == 2 else "bicubic"}


def _check_file(path: Path) -> None:
    if not path.is_file():  # a pipe would be waited for without end
        raise UserError(f"{path} is not a file of weights, nor a link to one.")
    need_addresses(2 * (size := path.stat().st_size))
    with suppress(zipfile.BadZipFile):  # or no zip at all; PyTorch compresses the code of programs only
        if (unpacked := sum(member.file_size for member in zipfile.ZipFile(path).infolist())) > 10 * size:
            raise UserError(f"{path}, of {size:,} bytes, would take {unpacked:,}: it is compressed, as no weights are.")


def _load(path: Path) -> Mapping[str, Any]:
    _check_file(path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if zipfile.is_zipfile(path) and any(n.endswith("/constants.pkl") for n in zipfile.ZipFile(path).namelist()):
            raise UserError(
                f"{path} is a TorchScript program, as OpenAI publishes its models, which could run code of others. "
                "For OpenAI's weights take the tag, such as ViT-B-32-quickgelu:openai. To convert a file that you "
                f"trust: python -c \"import torch; torch.save(torch.jit.load({str(path)!r}, 'cpu').state_dict(), "
                "'weights.pt')\"."
            )
        # Not mapped: torch maps files of its newer format only.
        tree = torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # pickle's, zip's and safetensors' are of many types; torch's text advises to run code
        raise UserError(
            f"{path} cannot be loaded: it is damaged, or neither safetensors nor a PyTorch file of tensors alone. A "
            "DeepSpeed checkpoint is converted by the zero_to_fp32.py in its folder; of another trainer's, save the "
            "model's state_dict()."
        ) from error
    if not isinstance(tree, Mapping):
        raise UserError(f"{path} holds a {type(tree).__name__}, not weights by name: save the model's state_dict().")
    return tree


def _unwrapped(tree: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Weights by open_clip's names, without what trainers wrap them in."""
    for _ in _WRAPPERS:  # each once: a forged file may hold itself
        tree = next((tree[key] for key in _WRAPPERS if isinstance(tree.get(key), Mapping)), tree)
    state = {str(name): value for name, value in tree.items() if isinstance(value, Tensor)}
    while prefix := next((p for p in _PREFIXES if state and all(name.startswith(p) for name in state)), None):
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    placeholders = any(value.numel() == 0 for value in state.values())  # as ZeRO 3 writes them
    if not state or placeholders:
        of_deepspeed = placeholders or "ds_version" in tree or "mp_rank" in path.name or "optim_states" in path.name
        hint = " It is a part of a DeepSpeed checkpoint: run the zero_to_fp32.py beside it, and give its result."
        raise UserError(f"{path} holds no weights of a model.{hint if of_deepspeed else ''}")
    if "vision_model.embeddings.class_embedding" in state:
        try:
            state = from_transformers(state)
        except (KeyError, RuntimeError) as error:  # a part is missing, or has another shape
            raise UserError(f"{path} is not whole, as a CLIPModel of transformers: {in_a_line(error)}.") from error
    if "visual.proj" in state or "text_projection" in state:
        state = {name: value for name, value in state.items() if name not in _OF_OPENAI}
    return state


def from_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a `CLIPModel` by open_clip's names; three attention projections become one.

    Raises:
        UserError: There are weights that open_clip's CLIP does not have.
    """
    ours = {theirs: part for part, theirs in BLOCK_PARTS.items()}
    weights: dict[str, Tensor] = {}
    for name, value in state.items():
        block = re.fullmatch(r"(text|vision)_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        tower, number, part, kind = block.groups() if block else ("", "", "", "")
        place = f"{'visual.' if tower == 'vision' else ''}transformer.resblocks.{number}"
        if name in NAMES:
            weights[NAMES[name]] = value.T if name.endswith("_projection.weight") else value
        elif part == "self_attn.q_proj":
            beside = (name.replace("q_proj", f"{x}_proj") for x in "qkv")
            weights[f"{place}.attn.in_proj_{kind}"] = torch.cat([state[each] for each in beside])
        elif part in ours:
            weights[f"{place}.{ours[part]}.{kind}"] = value
        elif part not in ("self_attn.k_proj", "self_attn.v_proj") and not name.endswith("position_ids"):
            raise UserError(f"The transformers model has the weight {name}, which open_clip's CLIP has not.")
    return weights


@contextmanager
def for_open_clip(path: Path, *, weights: bool) -> Iterator[Path]:
    """A file of weights, or a model folder, as open_clip loads it: itself, or a temporary copy in open_clip's form.

    Raises:
        UserError: It holds no weights, or none that are read without running code; the message says what it is.
    """
    from safetensors.torch import save_file

    if path.suffix in (".npz", ".npy") or (path / MODEL_CONFIG_NAME).is_file():
        for file in path.glob("open_clip_*") if weights else ():
            _check_file(file)
        yield path
        return
    state, is_folder = None, path.is_dir()
    if weights:
        file = next((path / name for name in TRANSFORMERS_WEIGHTS if (path / name).is_file()), path)
        if file.is_dir():
            raise UserError(f"{path} has no weights ({' or '.join(TRANSFORMERS_WEIGHTS)}): copy them there.")
        tree = _load(file)
        state = _unwrapped(tree, file)
        if not is_folder and state.keys() == tree.keys():
            yield path
            return
    with tempfile.TemporaryDirectory(prefix="neuclip-weights-") as temporary:
        copied = Path(temporary) / "model.safetensors"
        if state is not None:
            save_file({name: value.contiguous().clone() for name, value in state.items()}, copied)
        if is_folder:
            (Path(temporary) / MODEL_CONFIG_NAME).write_text(json.dumps(stored_description(path)), encoding="utf-8")
        yield Path(temporary) if is_folder else copied
