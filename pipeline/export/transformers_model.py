"""Export as a `transformers` model: `CLIPModel` or `SiglipModel`, refused if the features differ.

`CLIPModel` is for open_clip's own ViTs, `SiglipModel` for SigLIP's family. Names and settings of the former follow
transformers' CLIP (models/clip/modeling_clip.py), which is OpenAI's architecture: pre-norm transformers, class-token
pooling, causal text pooled at the end token, projections without bias.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from pipeline.errors import UserError
from pipeline.export.siglip_model import (
    blocks_state,
    is_siglip,
    siglip_config,
    siglip_state,
    text_state,
    why_not_siglip,
    write_tokenizer,
)
from pipeline.model.evaluation_model import EvaluationModel
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
    if image.get("head_width", 64) * (image["width"] // image.get("head_width", 64)) != image["width"]:
        return "its width is no multiple of its head width"
    return ""


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
        logit_scale: 1 / tau.
        logit_bias: The bias of a sigmoid loss, which `SiglipModel` stores.

    Returns:
        The largest difference of any feature of the written model, loaded by transformers, from the trained one's.

    Raises:
        UserError: transformers is not installed, or its models cannot hold the architecture.
    """
    config = model.architecture.model_cfg
    sigmoid = is_siglip(config)
    problem = why_not_siglip(model.towers.clip, config) if sigmoid else why_not_clip(config)
    if problem:
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
    towers = model.towers.clip
    converted: Any
    if sigmoid:
        converted = transformers.SiglipModel(transformers.SiglipConfig(**siglip_config(model)))
        state = {**siglip_state(towers), "logit_bias": torch.tensor([logit_bias])}
    else:
        converted = transformers.CLIPModel(transformers.CLIPConfig(**clip_config(model)))
        state = clip_state(towers.state_dict())
    state["logit_scale"] = torch.tensor(logit_scale).log().view_as(converted.logit_scale)
    missing, unexpected = converted.load_state_dict(state, strict=False)
    lost = [name for name in missing if not name.endswith("position_ids")]
    assert not lost, lost
    assert not unexpected, unexpected
    converted.save_pretrained(str(folder))
    _write_processor(model, folder, kind="SiglipImageProcessor" if sigmoid else "CLIPImageProcessor")
    (write_tokenizer if sigmoid else _write_tokenizer)(model, folder)
    allow_by_umask(*folder.glob("*.safetensors"))
    return _difference(model, folder, *examples)


def clip_config(model: EvaluationModel) -> dict[str, Any]:
    """The arguments of transformers' `CLIPConfig`."""
    cfg = model.architecture.model_cfg
    image, text = cfg["vision_cfg"], cfg["text_cfg"]
    common = {"hidden_act": "quick_gelu" if cfg.get("quick_gelu") else "gelu", "layer_norm_eps": 1e-5}
    return {
        "projection_dim": cfg["embed_dim"],
        "vision_config": {
            "hidden_size": image["width"],
            "intermediate_size": int(image["width"] * image.get("mlp_ratio", 4.0)),
            "num_hidden_layers": image["layers"],
            "num_attention_heads": image["width"] // image.get("head_width", 64),
            "image_size": model.image_size,
            "patch_size": image["patch_size"],
            "projection_dim": cfg["embed_dim"],
            **common,
        },
        "text_config": {
            "hidden_size": text["width"],
            "intermediate_size": int(text["width"] * text.get("mlp_ratio", 4.0)),
            "num_hidden_layers": text["layers"],
            "num_attention_heads": text["heads"],
            "max_position_embeddings": text.get("context_length", 77),
            "vocab_size": text.get("vocab_size", 49408),
            "bos_token_id": 49406,
            "eos_token_id": 49407,
            "projection_dim": cfg["embed_dim"],
            **common,
        },
    }


def clip_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's weights under transformers' names; packed attention projections are split into three."""
    text = {key.removeprefix("text."): value for key, value in state.items() if not key.startswith("visual.")}
    image = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    return {
        **text_state(text),
        **blocks_state(image, "vision_model"),
        "text_projection.weight": text["text_projection"].T.contiguous(),
        "visual_projection.weight": image["proj"].T.contiguous(),
        "vision_model.embeddings.class_embedding": image["class_embedding"],
        "vision_model.embeddings.position_embedding.weight": image["positional_embedding"],
        "vision_model.embeddings.patch_embedding.weight": image["conv1.weight"],
        "vision_model.pre_layrnorm.weight": image["ln_pre.weight"],
        "vision_model.pre_layrnorm.bias": image["ln_pre.bias"],
        "vision_model.post_layernorm.weight": image["ln_post.weight"],
        "vision_model.post_layernorm.bias": image["ln_post.bias"],
    }


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


def transformers_preprocessing(folder: Path) -> Callable[[Image], Tensor]:
    """What transformers does to a picture before the model in a folder sees it."""
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(str(folder))
    return lambda picture: torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"][0])


def _write_tokenizer(model: EvaluationModel, folder: Path) -> None:
    """CLIP's byte-pair vocabulary and merges, as transformers' CLIPTokenizer reads them."""
    own = model.tokenize
    (folder / "vocab.json").write_text(json.dumps(dict(own.encoder), ensure_ascii=False), encoding="utf-8")  # type: ignore[attr-defined]
    merges = "\n".join(" ".join(pair) for pair in own.bpe_ranks)  # type: ignore[attr-defined]
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
    length = model.architecture.model_cfg["text_cfg"].get("context_length", 77)
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
    return float(torch.stack([(torch.nn.functional.normalize(a, dim=-1) - b).abs().max() for a, b in pairs]).max())
