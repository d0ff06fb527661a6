"""Pictures for tests, and their bytes in the formats of files."""

import base64
import io
import struct
import zlib

import cv2
import numpy as np
from PIL import Image

HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAXxtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAACJpbG9jAAAA"
    "AERAAAEAAQAAAAABoAABAAAAAAAAAEMAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/GlwcnAAAADc"
    "aXBjbwAAAHVodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQApQgEBA3AAAAMAkAAAAwAA"
    "AwAeoCCBBZbqrprm4CGgwIAAAAyAAAADAIRiAAEABkQBwXPBiQAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABAAAAAQAAAAChjbGFw"
    "AAAAGAAAAAEAAAAQAAAAAf///9gAAAAC////0AAAAAIAAAAQcGl4aQAAAAADCAgIAAAAGGlwbWEAAAAAAAAAAQABBYECAwWEAAAAS21kYXQAAAA/"
    "KAGvEyFdo0D2tFWmg6c9g3nwMmhzSg3Co6c7N1AiCU0i+Gg01YdQfp3ACPBgKyYPhMW6kHAaduZAh6822he4"
)
"""A ramp of 24 x 16 pixels, by libheif."""
JPEG_XL = base64.b64decode(
    "/woDBwATiAIARAG1nyAAABUqo4wbvJzr+fJDh8W0jesMbbVtYQljs70wSEg4Q+aNgv7mkPC4jGF0AJChCJGauq0kkZDI273ZSFCExv0XoE4A0AAA"
    "Yew3ZAEFEAA="
)
"""The same, by libjxl."""


def encoded(image, kind, **options):
    """Return the bytes of a file of this format."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def see_through(image):
    """Return the image with an alpha channel that rises from left to right."""
    image = image.copy()
    image.putalpha(Image.fromarray(np.tile(np.linspace(0, 255, image.width).astype(np.uint8), (image.height, 1))))
    return image


def sixteen_bits(image):
    """Return a PNG of the image with 16 bits for each value."""
    array = np.asarray(image).astype(np.uint16) * 257
    array = array[..., [2, 1, 0, 3][: array.shape[2]]] if array.ndim == 3 else array
    return bytes(cv2.imencode(".png", array)[1])


def png_chunk(kind, body):
    """Return a chunk of a PNG with its length and checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width, height, *, data, bits=8, colour=0, transparent=b""):
    """Return a PNG of these dimensions with this image data, which need not fit them, and with this tRNS chunk."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    extra = [(b"tRNS", transparent)] if transparent else []
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(data, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)
