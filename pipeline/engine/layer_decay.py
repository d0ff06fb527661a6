"""Layer-wise learning-rate decay: layers closer to the input have smaller learning rates (BEiT, 2106.08254)."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Numbers of a block: `resblocks.3`, `blocks.3`, `layer.3`, ResNet's `layer2.1`, ConvNeXt's `stages.2.blocks.5`.
_BLOCK = re.compile(r"(?:resblocks|blocks|layers|layer|stages)\.?(\d+)(?:\.(?:blocks\.)?(\d+))?")
# What comes before the first block of any of open_clip's towers.
_BEFORE = re.compile(
    r"(conv[123]|bn[123]|class_embedding|positional_embedding|token_embedding|cls_emb|ln_pre|patch_embed|pos_embed|"
    r"cls_token|reg_token|stem|embeddings|embed_tokens|shared)\b"
)


def rate_shares(names: Iterable[str], *, decay: float) -> dict[str, float]:
    """The learning-rate factor of each parameter.

    In both towers the last layers (projection, final norm) have 1, the last block `decay`, the one before it `decay`^2,
    and so on down to the embeddings.

    Args:
        names: Parameters by open_clip's names; those of the image tower begin with `visual.`.
        decay: Factor from one block to the one before it, in (0, 1].
    """
    places = {name: _place(name) for name in names}
    shares = {}
    for image in (True, False):
        tower = {name: place for name, place in places.items() if _is_image(name) == image}
        blocks = sorted({place for place in tower.values() if isinstance(place, tuple)})
        depth = {place: number for number, place in enumerate(blocks, start=1)}
        for name, place in tower.items():
            number = depth[place] if isinstance(place, tuple) else (0 if place == "before" else len(blocks) + 1)
            shares[name] = decay ** (len(blocks) + 1 - number)
    return shares


def in_block(name: str) -> bool:
    """Whether a parameter belongs to one of the blocks of a tower."""
    return isinstance(_place(name), tuple)


def _is_image(name: str) -> bool:
    return "visual" in name.split(".")[:2]  # below `clip.` where the towers' own names are used


def _place(name: str) -> tuple[int, int] | str:
    found = _BLOCK.search(name)
    if found:
        return int(found.group(1)), int(found.group(2) or 0)
    return "before" if _BEFORE.search(name) else "after"
