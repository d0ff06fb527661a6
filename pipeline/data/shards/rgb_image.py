"""From the encoded bytes of a sample's image to pixels, the same for training and for everything that looks at data."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.pictures import image_error
from pipeline.pictures.image_error import ImageError
from pipeline.pictures.pixels import WHITE, Colour, read_rgb

_MESSAGES = {
    image_error.TOO_MANY_PIXELS: "image has too many pixels",
    image_error.TOO_MANY_SCANS: "image has too many scans",
}


def rgb_image(data: bytes, *, max_pixels: int | None = None, background: Colour = WHITE) -> Image.Image:
    """Decode an image to RGB as `pixels.read_rgb` does.

    Raises:
        CorruptSample: The image cannot be used; samples are counted under the message.
    """
    with counted_errors():
        return read_rgb(data, max_pixels=max_pixels, background=background)


def thumbnail_url(image: Image.Image, size: tuple[int, int]) -> str:
    """A data URL of an image, reduced in place to fit into `size`."""
    image.thumbnail(size)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def counted_errors() -> Iterator[None]:
    """Raise an ImageError of this block as the CorruptSample under which samples are counted.

    Raises:
        CorruptSample: With one of a few messages.
    """
    try:
        yield
    except ImageError as error:
        raise CorruptSample(_MESSAGES.get(error.reason, "image cannot be decoded")) from error
