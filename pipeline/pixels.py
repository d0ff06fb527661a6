"""Pixel depths: what Pillow does not convert as a viewer shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def eight_bits(image: Image) -> Image:
    """16-bit grey as 8-bit grey, and other images as they are: Pillow's own conversion would clip it to white."""
    if not image.mode.startswith("I;16"):
        return image
    import numpy as np
    from PIL.Image import fromarray

    return fromarray((np.asarray(image) / 257).round().astype(np.uint8))
