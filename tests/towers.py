"""An architecture so small that an engine test takes little more than the engine's start-up."""

from __future__ import annotations

import json
from typing import Any

TINY: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "patch_size": 8, "layers": 1, "width": 32, "head_width": 16, "mlp_ratio": 2.0},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}


def write_tiny(folder, *, image_size=16, name="tiny-towers.json"):
    """Write the architecture to `folder`; return the path of the JSON file for `model.arch`."""
    path = folder / name
    path.write_text(json.dumps({**TINY, "vision_cfg": {**TINY["vision_cfg"], "image_size": image_size}}))
    return str(path)
