"""Export as `transformers.SiglipModel`: timm's ViT with attention pooling, and a text tower without causal mask.

Names and settings follow transformers' SigLIP (models/siglip/modeling_siglip.py). SigLIP 2's models of fixed size have
the same architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.model.evaluation_model import EvaluationModel
from pipeline.model.foreign_weights import BLOCK_PARTS


def is_siglip(model_cfg: Mapping[str, Any]) -> bool:
    """Whether an architecture is of SigLIP's family: a timm image tower with attention pooling and no projection."""
    image = model_cfg["vision_cfg"]
    return bool(image.get("timm_model_name")) and image.get("timm_pool") == "map" and image.get("timm_proj") == "none"


def why_not_siglip(clip: Any, model_cfg: Mapping[str, Any]) -> str:
    """Why `SiglipModel` cannot hold this model; empty when it can."""
    trunk, text = clip.visual.trunk, model_cfg["text_cfg"]
    unknown = set(_image_state(trunk.state_dict())[1])
    if unknown:
        return f"its image tower has {min(unknown)}, and SiglipModel has not"
    wanted = {"no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    for key, value in wanted.items():
        if text.get(key) != value:
            return f"text_cfg.{key} = {text.get(key)!r}, and SiglipModel has {value!r}"
    return "its text tower is one of transformers" if text.get("hf_model_name") else ""


def siglip_state(clip: Any) -> dict[str, Tensor]:
    """open_clip's weights under transformers' names, for towers that pass `why_not_siglip`."""
    image, unknown = _image_state(clip.visual.trunk.state_dict())
    assert not unknown, unknown
    text = clip.text.state_dict()
    head = {f"text_model.head.{kind}": text[f"text_projection.{kind}"] for kind in ("weight", "bias")}
    return {**image, **text_state(text), **head}


def siglip_config(model: EvaluationModel) -> dict[str, Any]:
    """The arguments of transformers' `SiglipConfig`, read from the towers."""
    clip: Any = model.towers.clip
    trunk, text = clip.visual.trunk, clip.text
    first, lowest = trunk.blocks[0], text.transformer.resblocks[0]
    return {
        "vision_config": {
            "hidden_size": trunk.embed_dim,
            "intermediate_size": first.mlp.fc1.out_features,
            "num_hidden_layers": len(trunk.blocks),
            "num_attention_heads": first.attn.num_heads,
            "image_size": model.image_size,
            "patch_size": trunk.patch_embed.patch_size[0],
            "hidden_act": _activation(first.mlp.act),
            "layer_norm_eps": trunk.norm.eps,
        },
        "text_config": {
            "hidden_size": text.ln_final.normalized_shape[0],
            "intermediate_size": lowest.mlp.c_fc.out_features,
            "num_hidden_layers": len(text.transformer.resblocks),
            "num_attention_heads": lowest.attn.num_heads,
            "max_position_embeddings": text.positional_embedding.shape[0],
            "vocab_size": text.token_embedding.num_embeddings,
            "projection_size": model.dim,
            "hidden_act": _activation(lowest.mlp.gelu),
            "layer_norm_eps": text.ln_final.eps,
        },
    }


def _activation(module: nn.Module) -> str:
    assert isinstance(module, nn.GELU), module
    return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"


_IMAGE = {
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
_TIMM_BLOCK = {"norm1": "ln_1", "norm2": "ln_2", "attn.proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc",
               "mlp.fc2": "mlp.c_proj"}  # fmt: skip
_POOL = ("attn_pool.q.weight", "attn_pool.q.bias", "attn_pool.kv.weight", "attn_pool.kv.bias")


def _image_state(trunk: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """timm's weights under transformers' names, and the names of those that have no counterpart."""
    state: dict[str, Tensor] = {}
    unknown = []
    for key, value in trunk.items():
        if key in _IMAGE:
            state["vision_model." + _IMAGE[key]] = value[0] if key == "pos_embed" else value
        elif key.startswith("blocks."):
            number, _, part = key.removeprefix("blocks.").partition(".")
            module, _, kind = part.rpartition(".")
            named = f"attn.in_proj_{kind}" if module == "attn.qkv" else f"{_TIMM_BLOCK.get(module, '?')}.{kind}"
            if named.startswith("?"):
                unknown.append(key)
                continue
            state |= {f"vision_model.encoder.layers.{number}.{k}": v for k, v in _block(named, value).items()}
        elif key not in _POOL:
            unknown.append(key)
    if all(key in trunk for key in _POOL):
        for kind in ("weight", "bias"):
            parts = [trunk[f"attn_pool.{name}.{kind}"] for name in ("q", "kv")]
            state[f"vision_model.head.attention.in_proj_{kind}"] = torch.cat(parts)
    else:
        unknown.append("no attention pooling with a projection of its query")
    return state, unknown


def text_state(text: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's text tower without its projection under transformers' names."""
    return {
        "text_model.embeddings.token_embedding.weight": text["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": text["positional_embedding"],
        "text_model.final_layer_norm.weight": text["ln_final.weight"],
        "text_model.final_layer_norm.bias": text["ln_final.bias"],
        **blocks_state(text, "text_model"),
    }


def blocks_state(tower: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The blocks of one of open_clip's own towers under transformers' names."""
    state: dict[str, Tensor] = {}
    for key, value in tower.items():
        if key.startswith("transformer.resblocks."):
            number, _, part = key.removeprefix("transformer.resblocks.").partition(".")
            state |= {f"{name}.encoder.layers.{number}.{k}": v for k, v in _block(part, value).items()}
    return state


def write_tokenizer(model: EvaluationModel, folder: Path) -> None:
    """Write the Hugging Face tokenizer, with the length to which open_clip pads."""
    plain = model.tokenize.tokenizer  # type: ignore[attr-defined]
    plain.model_max_length = model.architecture.model_cfg["text_cfg"].get("context_length", 64)
    plain.save_pretrained(str(folder))


def _block(part: str, value: Tensor) -> dict[str, Tensor]:
    """One parameter of open_clip's block under transformers' names; packed projections become three."""
    if part.startswith("attn.in_proj_"):
        kind = part.removeprefix("attn.in_proj_")
        return {f"self_attn.{name}_proj.{kind}": one for name, one in zip("qkv", value.chunk(3), strict=True)}
    module, _, kind = part.rpartition(".")
    return {f"{BLOCK_PARTS[module]}.{kind}": value}
