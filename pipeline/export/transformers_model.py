"""Export as a `transformers` model: `CLIPModel` or `SiglipModel`, refused if the features differ.

`CLIPModel` is for open_clip's own ViTs: pre-norm transformers, class-token pooling, causal text pooled at the end
token, projections without bias. `SiglipModel` is for SigLIP's family, SigLIP 2's models of fixed size among them:
timm's ViT with attention pooling, and a text tower without causal mask. Names and settings follow transformers
(models/clip/modeling_clip.py and models/siglip/modeling_siglip.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import UserError
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.model.foreign_weights import BLOCK_PARTS, NAMES
from pipeline.model.model_folder import allow_by_umask

# Settings of open_clip's towers that transformers' CLIP has no counterpart for -> the value that it implies.
_IMAGE = {
    "timm_model_name": None, "attentional_pool": False, "attn_pooler_queries": 256, "ls_init_value": None,
    "no_ln_pre": False, "pool_type": "tok", "final_ln_after_pool": False, "pos_embed_type": "learnable",
    "output_tokens": False, "block_type": None, "qk_norm": False, "scaled_cosine_attn": False,
}  # fmt: skip
_TEXT = {
    "hf_model_name": None, "hf_tokenizer_name": "", "embed_cls": False, "no_causal_mask": False, "pool_type": "argmax",
    "proj_type": "linear", "proj_bias": False, "final_ln_after_pool": False, "ls_init_value": None,
}  # fmt: skip
# Names of SigLIP's image tower in timm -> in transformers.
_TRUNK = {
    "pos_embed": "embeddings.position_embedding.weight",
    "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
    "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
    "norm.weight": "post_layernorm.weight", "norm.bias": "post_layernorm.bias",
    "attn_pool.latent": "head.probe",
    "attn_pool.proj.weight": "head.attention.out_proj.weight", "attn_pool.proj.bias": "head.attention.out_proj.bias",
    "attn_pool.norm.weight": "head.layernorm.weight", "attn_pool.norm.bias": "head.layernorm.bias",
    "attn_pool.mlp.fc1.weight": "head.mlp.fc1.weight", "attn_pool.mlp.fc1.bias": "head.mlp.fc1.bias",
    "attn_pool.mlp.fc2.weight": "head.mlp.fc2.weight", "attn_pool.mlp.fc2.bias": "head.mlp.fc2.bias",
}  # fmt: skip
_TIMM_BLOCK = {"norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.in_proj", "attn.proj": "attn.out_proj",
               "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}  # fmt: skip
_POOL = ("attn_pool.q.weight", "attn_pool.q.bias", "attn_pool.kv.weight", "attn_pool.kv.bias")


def is_siglip(model_cfg: Mapping[str, Any]) -> bool:
    """Whether an architecture is of SigLIP's family: a timm image tower with attention pooling and no projection."""
    image = model_cfg["vision_cfg"]
    return bool(image.get("timm_model_name")) and image.get("timm_pool") == "map" and image.get("timm_proj") == "none"


def why_not_clip(model_cfg: Mapping[str, Any]) -> str:
    """Why transformers' `CLIPModel` cannot hold this architecture; empty when it can."""
    image, text = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    if image.get("timm_model_name") or not isinstance(image.get("layers", 12), int):
        kind = image.get("timm_model_name") or "a ResNet"
        return f"its image tower is {kind}, and CLIPModel has open_clip's own ViT only"
    for side, config, implied in (("vision_cfg", image, _IMAGE), ("text_cfg", text, _TEXT)):
        for key, value in implied.items():
            if config.get(key, value) != value and (config.get(key) or value):
                return f"{side}.{key} = {config[key]!r}, and CLIPModel has {value!r}"
    return ""


def why_not_siglip(clip: Any, model_cfg: Mapping[str, Any]) -> str:
    """Why `SiglipModel` cannot hold this model; empty when it can."""
    text = model_cfg["text_cfg"]
    if unknown := _trunk_state(clip.visual.trunk.state_dict())[1]:
        return f"its image tower has {min(unknown)}, and SiglipModel has not"
    for key, value in {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}.items():
        if text.get(key) != value:
            return f"text_cfg.{key} = {text.get(key)!r}, and SiglipModel has {value!r}"
    return "its text tower is one of transformers" if text.get("hf_model_name") else ""


def write_transformers(
    model: EvaluationModel,
    folder: Path,
    *,
    examples: tuple[Tensor, Tensor],
    logit_scale: float,
    logit_bias: float = 0.0,
) -> float:
    """Write `config.json`, `model.safetensors`, the image processor's and the tokenizer's files.

    Args:
        model: The trained model.
        folder: An existing folder.
        examples: Images and tokens to compare features on.
        logit_scale: log(1 / tau).
        logit_bias: The bias of a sigmoid loss, which `SiglipModel` stores.

    Returns:
        The largest difference of any feature of the written model, loaded by transformers, from the trained one's.

    Raises:
        UserError: transformers is not installed, or its models cannot hold the architecture.
    """
    clip: Any = model.towers.clip
    config = model.architecture.model_cfg
    sigmoid = is_siglip(config)
    if problem := why_not_siglip(clip, config) if sigmoid else why_not_clip(config):
        raise UserError(
            f"{model.architecture.name} cannot be a transformers model: {problem}. Export it without --format: "
            "open_clip and the hub's open_clip library load that."
        )
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "--format transformers needs transformers: pip install -c constraints.txt -e '.[transformers]'."
        ) from error
    sides = _configs(model, sigmoid=sigmoid)
    converted: Any
    if sigmoid:
        converted = transformers.SiglipModel(transformers.SiglipConfig(**sides))
        state = {**_siglip_state(clip), "logit_bias": torch.tensor([logit_bias])}
    else:
        converted = transformers.CLIPModel(transformers.CLIPConfig(**sides, projection_dim=model.dim))
        state = _clip_state(clip.state_dict())
    state["logit_scale"] = torch.tensor(logit_scale).view_as(converted.logit_scale)
    missing, unexpected = converted.load_state_dict(state, strict=False)
    lost = [name for name in missing if not name.endswith("position_ids")]
    assert not lost, lost
    assert not unexpected, unexpected
    converted.save_pretrained(str(folder))
    _write_processor(model, folder, kind="SiglipImageProcessor" if sigmoid else "CLIPImageProcessor")
    _write_tokenizer(model, folder)
    allow_by_umask(*folder.glob("*.safetensors"))
    return _difference(model, folder, *examples)


def _configs(model: EvaluationModel, *, sigmoid: bool) -> dict[str, Any]:
    """The arguments of transformers' `CLIPConfig` or `SiglipConfig` for both towers, read from these."""
    clip: Any = model.towers.clip
    text = getattr(clip, "text", clip)
    if sigmoid:
        trunk, text_only = clip.visual.trunk, {"projection_size": model.dim}
        image = {**_sizes(trunk.blocks, trunk.norm), "patch_size": trunk.patch_embed.patch_size[0]}
    else:
        tower, common = clip.visual, {"projection_dim": model.dim}
        text_only = {**common, "bos_token_id": 49406, "eos_token_id": 49407}
        patch = tower.conv1.kernel_size[0]
        image = {**_sizes(tower.transformer.resblocks, tower.ln_post), "patch_size": patch, **common}
    return {
        "vision_config": {**image, "image_size": model.image_size},
        "text_config": {
            **_sizes(text.transformer.resblocks, text.ln_final),
            "max_position_embeddings": text.positional_embedding.shape[0],
            "vocab_size": text.token_embedding.num_embeddings,
            **text_only,
        },
    }


def _sizes(blocks: Any, norm: nn.LayerNorm) -> dict[str, Any]:
    first = blocks[0]
    is_timm = hasattr(first.mlp, "fc1")
    up, act = (first.mlp.fc1, first.mlp.act) if is_timm else (first.mlp.c_fc, first.mlp.gelu)
    exact = "gelu_pytorch_tanh" if getattr(act, "approximate", "") == "tanh" else "gelu"
    return {
        "hidden_size": norm.normalized_shape[0],
        "intermediate_size": up.out_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": first.attn.num_heads,
        "hidden_act": exact if isinstance(act, nn.GELU) else "quick_gelu",
        "layer_norm_eps": norm.eps,
    }


def _clip_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under transformers' names; packed attention projections are split into three."""
    ours = {key.removeprefix("text."): value for key, value in state.items()}
    image = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    named = {
        theirs: ours[name].T.contiguous() if theirs.endswith("_projection.weight") else ours[name]
        for theirs, name in NAMES.items()
        if name != "logit_scale"
    }
    return {**named, **_blocks_state(ours, "text_model"), **_blocks_state(image, "vision_model")}


def _siglip_state(clip: Any) -> dict[str, Tensor]:
    """open_clip's weights under transformers' names, for towers that pass `why_not_siglip`."""
    text = clip.text.state_dict()
    named = {theirs: text[name] for theirs, name in NAMES.items() if theirs.startswith("text_model.")}
    head = {f"text_model.head.{kind}": text[f"text_projection.{kind}"] for kind in ("weight", "bias")}
    image, _ = _trunk_state(clip.visual.trunk.state_dict())
    return {**image, **named, **_blocks_state(text, "text_model"), **head}


def _trunk_state(trunk: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """timm's weights under transformers' names, and the names of those that have no counterpart."""
    state: dict[str, Tensor] = {}
    unknown = []
    for key, value in trunk.items():
        number, _, part = key.removeprefix("blocks.").partition(".")
        module, _, kind = part.rpartition(".")
        if key in _TRUNK:
            state["vision_model." + _TRUNK[key]] = value[0] if key == "pos_embed" else value
        elif key.startswith("blocks.") and module in _TIMM_BLOCK:
            named = _block(_TIMM_BLOCK[module], kind, value)
            state |= {f"vision_model.encoder.layers.{number}.{k}": v for k, v in named.items()}
        elif key not in _POOL:
            unknown.append(key)
    if all(key in trunk for key in _POOL):
        for kind in ("weight", "bias"):
            parts = [trunk[f"attn_pool.{name}.{kind}"] for name in ("q", "kv")]
            state[f"vision_model.head.attention.in_proj_{kind}"] = torch.cat(parts)
    else:
        unknown.append("no attention pooling with a projection of its query")
    return state, unknown


def _blocks_state(tower: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The blocks of one of open_clip's own towers under transformers' names."""
    state: dict[str, Tensor] = {}
    for key, value in tower.items():
        if key.startswith("transformer.resblocks."):
            number, _, part = key.removeprefix("transformer.resblocks.").partition(".")
            module, _, kind = part.replace("in_proj_", "in_proj.").rpartition(".")
            state |= {f"{name}.encoder.layers.{number}.{k}": v for k, v in _block(module, kind, value).items()}
    return state


def _block(module: str, kind: str, value: Tensor) -> dict[str, Tensor]:
    """One parameter of open_clip's block under transformers' names; packed projections become three."""
    if module == "attn.in_proj":
        return {f"self_attn.{name}_proj.{kind}": one for name, one in zip("qkv", value.chunk(3), strict=True)}
    return {f"{BLOCK_PARTS[module]}.{kind}": value}


def _write_processor(model: EvaluationModel, folder: Path, *, kind: str) -> None:
    """Write the settings of an image processor: CLIP's cuts the middle, SigLIP's resizes to a square."""
    preprocess = model.architecture.preprocess_cfg
    bicubic, square = 3, {"height": model.image_size, "width": model.image_size}  # PIL's number
    resize: dict[str, Any] = {"size": square}
    if kind == "CLIPImageProcessor":
        resize = {"size": {"shortest_edge": model.image_size}, "do_center_crop": True, "crop_size": square}
    tree = {
        "image_processor_type": kind,
        "do_resize": True,
        **resize,
        "resample": bicubic if preprocess.get("interpolation") == "bicubic" else 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess["mean"]),
        "image_std": list(preprocess["std"]),
        "do_convert_rgb": True,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(model: EvaluationModel, folder: Path) -> None:
    """The Hugging Face tokenizer with the length to which open_clip pads, or CLIP's, as CLIPTokenizer reads it."""
    own: Any = model.tokenize
    length = model.architecture.context_length
    if hasattr(own, "tokenizer"):
        own.tokenizer.model_max_length = length
        own.tokenizer.save_pretrained(str(folder))
        return
    (folder / "vocab.json").write_text(json.dumps(dict(own.encoder), ensure_ascii=False), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in own.bpe_ranks)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    start, end = "<start_of_text>", "<end_of_text>"
    specials = {"bos_token": start, "eos_token": end, "unk_token": end, "pad_token": end}
    tree = {"tokenizer_class": "CLIPTokenizer", "model_max_length": length, "do_lower_case": True, **specials}
    (folder / "tokenizer_config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def _difference(model: EvaluationModel, folder: Path, image: Tensor, text: Tensor) -> float:
    """Largest difference of unit-norm features between the folder, as transformers loads it, and the trained model."""
    import transformers

    theirs = transformers.AutoModel.from_pretrained(str(folder)).eval()
    vision = theirs.vision_model(pixel_values=image).pooler_output
    words = theirs.text_model(input_ids=text).pooler_output
    if isinstance(theirs, transformers.CLIPModel):
        vision, words = theirs.visual_projection(vision), theirs.text_projection(words)
    pairs = ((vision, model.encode_image(image)), (words, model.encode_text(text)))
    return float(torch.stack([(nn.functional.normalize(a, dim=-1) - b).abs().max() for a, b in pairs]).max())
