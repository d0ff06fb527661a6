"""From the encoded bytes of a sample's image to pixels, the same for training and for everything that looks at data."""

from __future__ import annotations

import io

from PIL import Image

from pipeline.data.shards.manifest_format import FORMATS
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.pixels import eight_bits


def rgb_image(data: bytes, *, max_pixels: int | None = None) -> Image.Image:
    """Decode an image of one of `FORMATS` to RGB; 16-bit grey is scaled to 8 bits.

    Pillow's warnings about large sizes and odd metadata are passed on: only the caller knows whether other threads run,
    whose warnings a filter here would change.

    Args:
        data: The encoded image.
        max_pixels: `data.max_pixels`; Pillow's own limit applies, too.

    Raises:
        CorruptSample: Pillow cannot decode all of the image, or it has too many pixels.
    """
    too_large = "image has too many pixels" if max_pixels is None else "image is larger than data.max_pixels"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if max_pixels is not None and image.height * image.width > max_pixels:
                raise CorruptSample(too_large)
            return eight_bits(image).convert("RGB")
    except CorruptSample:
        raise
    except Image.DecompressionBombError as error:
        raise CorruptSample(too_large) from error
    except Exception as error:  # Pillow's plugins raise exceptions of many types on broken files
        raise CorruptSample("image cannot be decoded") from error
