"""Export as a `transformers` model: `CLIPModel` or `SiglipModel`, refused if weights are left over or features differ.

`CLIPModel` is for open_clip's own ViTs: pre-norm transformers, class-token pooling, causal text pooled at the end
token, projections without bias. `SiglipModel` is for SigLIP's family, SigLIP 2's models of fixed size among them:
timm's ViT with attention pooling, and a text tower without causal mask. Names and settings follow transformers
(models/clip/modeling_clip.py and models/siglip/modeling_siglip.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.errors import UserError, in_a_line
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.model.foreign_weights import BLOCK_PARTS, NAMES
from pipeline.model.model_folder import allow_by_umask

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
"""Names of SigLIP's image tower in timm -> in transformers, outside of the blocks."""
_TIMM_BLOCK = {"norm1": "ln_1", "norm2": "ln_2", "attn.qkv": "attn.in_proj", "attn.proj": "attn.out_proj",
               "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}  # fmt: skip
_POOL = "visual.trunk.attn_pool."
_BLOCK = re.compile(r"(visual\.)?(?:trunk\.)?(?:transformer\.res)?blocks\.(\d+)\.(.+)[._](weight|bias)")


def is_siglip(model_cfg: Mapping[str, Any]) -> bool:
    """Whether an architecture is of SigLIP's family: a timm image tower with attention pooling and no projection."""
    image = model_cfg["vision_cfg"]
    return bool(image.get("timm_model_name")) and image.get("timm_pool") == "map" and image.get("timm_proj") == "none"


def write_transformers(
    model: EvaluationModel, folder: Path, *, examples: tuple[Tensor, Tensor], logit: tuple[float, float | None]
) -> float:
    """Write `config.json`, `model.safetensors`, the image processor's and the tokenizer's files.

    Args:
        model: The trained model.
        folder: An existing folder.
        examples: Images and tokens to compare features on.
        logit: log(1 / tau), and the bias of a sigmoid loss, which `SiglipModel` stores.

    Returns:
        The largest difference of any feature of the written model, loaded by transformers, from the trained one's.

    Raises:
        UserError: transformers is not installed, or its models cannot hold the architecture.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "--format transformers needs transformers: pip install -c constraints.txt -e '.[transformers]'."
        ) from error
    transformers.utils.logging.disable_progress_bar()
    siglip = is_siglip(model.architecture.model_cfg)
    kind = "Siglip" if siglip else "CLIP"
    model_of, config_of, processor_of = (getattr(transformers, kind + s) for s in ("Model", "Config", "ImageProcessor"))
    try:
        converted = model_of(config_of(**_configs(model, siglip=siglip)))
        state, left = _renamed(model.towers.clip.state_dict())
        if siglip:
            state["logit_bias"] = torch.tensor([logit[1] or 0.0])
        state["logit_scale"] = torch.tensor(logit[0]).view_as(converted.logit_scale)
        if not left:
            missing, unexpected = converted.load_state_dict(state, strict=False)
            left = [name for name in (*missing, *unexpected) if not name.endswith("position_ids")]
        why = f"one of them does not have the weight {left[0]}" if left else ""
    except (AttributeError, LookupError, RuntimeError) as error:
        why = f"its towers are of another kind or shape ({in_a_line(error)})"
    if not why:
        converted.save_pretrained(str(folder))
        processor_of(**_preprocessing(model, siglip=siglip)).save_pretrained(str(folder))
        _write_tokenizer(model, folder)
        allow_by_umask(*folder.glob("*.safetensors"))
        difference = _difference(model, folder, *examples)
        why = "" if difference < 1e-3 else f"features differ by {difference:.1e}"
    if why:
        raise UserError(
            f"{model.architecture.name} cannot be a {kind}Model of transformers: {why}. Export it without --format: "
            "open_clip and the hub's open_clip library load that."
        )
    return difference


def _configs(model: EvaluationModel, *, siglip: bool) -> dict[str, Any]:
    """The arguments of transformers' `CLIPConfig` or `SiglipConfig`, read from both towers."""
    clip: Any = model.towers.clip
    text, tower, width = getattr(clip, "text", clip), clip.visual, {"projection_dim": model.dim}
    words = {
        **_sizes(text.transformer.resblocks, text.ln_final),
        "max_position_embeddings": text.positional_embedding.shape[0],
        "vocab_size": text.token_embedding.num_embeddings,
    }
    if siglip:
        image = {**_sizes(tower.trunk.blocks, tower.trunk.norm), "patch_size": tower.trunk.patch_embed.patch_size[0]}
        words["projection_size"], width = model.dim, {}
    else:
        image = {**_sizes(tower.transformer.resblocks, tower.ln_post), "patch_size": tower.conv1.kernel_size[0]}
        words |= {"bos_token_id": 49406, "eos_token_id": 49407}
    return {"vision_config": {**image, **width, "image_size": model.image_size}, "text_config": words | width, **width}


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


def _renamed(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """open_clip's weights under transformers' names, and the names of those that have no counterpart.

    Packed attention projections become three, but not the pooling's of SigLIP, which becomes one.
    """
    names = {ours: theirs for theirs, ours in NAMES.items()}
    names |= {f"visual.trunk.{ours}": f"vision_model.{theirs}" for ours, theirs in _TRUNK.items()}
    names |= {f"text_projection.{kind}": f"text_model.head.{kind}" for kind in ("weight", "bias")}
    state: dict[str, Tensor] = {}
    left = []
    for key, value in weights.items():
        name, block = key.removeprefix("text."), _BLOCK.fullmatch(key.removeprefix("text."))
        if name in names:
            theirs = names[name]
            value = value.T if theirs.endswith("_projection.weight") else value
            state[theirs] = value[0] if name.endswith(".pos_embed") else value
        elif block:
            tower, number, part, kind = block.groups()
            part, place = _TIMM_BLOCK.get(part, part), f"{'vision' if tower else 'text'}_model.encoder.layers.{number}"
            if part == "attn.in_proj":
                for side, one in zip("qkv", value.chunk(3), strict=True):
                    state[f"{place}.self_attn.{side}_proj.{kind}"] = one
            elif part in BLOCK_PARTS:
                state[f"{place}.{BLOCK_PARTS[part]}.{kind}"] = value
            else:
                left.append(key)
        elif name.startswith(f"{_POOL}q."):
            both = torch.cat([value, weights[key.replace(".q.", ".kv.")]])
            state[f"vision_model.head.attention.in_proj_{name.rpartition('.')[2]}"] = both
        elif not name.startswith(f"{_POOL}kv."):
            left.append(key)
    return state, left


def _preprocessing(model: EvaluationModel, *, siglip: bool) -> dict[str, Any]:
    """The settings of an image processor: CLIP's cuts the middle, SigLIP's resizes to a square."""
    preprocess, square = model.architecture.preprocess_cfg, {"height": model.image_size, "width": model.image_size}
    bicubic, bilinear = 3, 2  # PIL's numbers
    return {
        **({"size": square} if siglip else {"size": {"shortest_edge": model.image_size}, "crop_size": square}),
        "resample": bicubic if preprocess.get("interpolation") == "bicubic" else bilinear,
        "image_mean": list(preprocess["mean"]),
        "image_std": list(preprocess["std"]),
        "do_convert_rgb": True,
    }


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
