"""Names of weights in transformers' blocks."""

from __future__ import annotations

from torch import Tensor

_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}


def block(part: str, value: Tensor) -> dict[str, Tensor]:
    """One parameter of open_clip's block under transformers' names; packed projections become three."""
    if part.startswith("attn.in_proj_"):
        kind = part.removeprefix("attn.in_proj_")
        return {f"self_attn.{name}_proj.{kind}": one for name, one in zip("qkv", value.chunk(3), strict=True)}
    module, _, kind = part.rpartition(".")
    return {f"{_PARTS[module]}.{kind}": value}
