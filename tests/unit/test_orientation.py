"""Every command turns pictures in the same way: by EXIF, as browsers do, and not by XMP."""

import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from data_prep.download_config import ImageConfig
from data_prep.fetching.decoder import ImageConverter
from data_prep.pairs.pair import convert
from pipeline.model.evaluation_model import _open
from pipeline.pictures.pixels import WHITE
from pipeline.playground.explorer import open_image
from tests import images

KINDS = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
OPTIONS = {"JPEG": {"quality": 98, "subsampling": 0}, "WEBP": {"lossless": True}, "AVIF": {"quality": 100}}


def picture():
    across, down = np.meshgrid(np.linspace(0, 255, 80), np.linspace(0, 255, 60))
    return Image.fromarray(np.stack([across, down, (across + down) / 2], axis=2).astype(np.uint8))


def exif_data(orientation):
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    if orientation is not None:
        exif[0x0112] = orientation
    return exif.tobytes()


def encoded(kind, *, orientation, xmp=b""):
    info = {"tiffinfo": {700: xmp}} if kind == "TIFF" and xmp else {"xmp": xmp} if xmp else {}
    exif = {} if info and kind == "TIFF" else {"exif": exif_data(orientation)}
    body = images.encoded(picture(), kind, **OPTIONS.get(kind, {}), **info, **exif)
    if kind == "PNG" and xmp:
        return chunk_added(body, b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp, place=33)
    return body


def chunk_added(png, name, data, *, place):
    return png[:place] + images.png_chunk(name, data) + png[place:]


def everywhere(body, folder):
    """The picture that each command sees or stores."""
    file = folder / "picture"
    file.write_bytes(body)
    image = ImageConfig(resize_mode="no", encode_format="png", encode_quality=1)
    keeping = replace(image, skip_reencode=True)  # an image that is not upright is re-encoded all the same
    stored, kept = (ImageConverter(config, max_pixels=10**6)(io.BytesIO(body))[0] for config in (image, keeping))
    found = {
        "download": Image.open(io.BytesIO(stored)),
        "download, kept": Image.open(io.BytesIO(kept)),
        "pairs, not turned by readers": Image.open(io.BytesIO(convert(body).body)),
        "playground": open_image(body, name="x"),
        "score, a file": _open(file, WHITE),
        "score, an opened file": _open(Image.open(file), WHITE),
    }
    return {name: np.asarray(image.convert("RGB")).astype(int) for name, image in found.items()}


def assert_all(body, folder, wanted):
    for name, found in everywhere(body, folder).items():
        assert found.shape == np.asarray(wanted).shape, name
        assert np.abs(found - np.asarray(wanted)).mean() < 3, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("orientation", "turn"), [
    (1, None), (2, Image.Transpose.FLIP_LEFT_RIGHT), (3, Image.Transpose.ROTATE_180),
    (4, Image.Transpose.FLIP_TOP_BOTTOM), (5, Image.Transpose.TRANSPOSE), (6, Image.Transpose.ROTATE_270),
    (7, Image.Transpose.TRANSVERSE), (8, Image.Transpose.ROTATE_90),
])  # fmt: skip
def test_pictures_are_turned_as_exif_says(kind, orientation, turn, tmp_path):
    wanted = picture() if turn is None else picture().transpose(turn)
    assert_all(encoded(kind, orientation=orientation), tmp_path, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_an_orientation_in_xmp_is_ignored_as_by_browsers(kind, tmp_path):
    """Regression test: `pairs` and the playground followed it, `download` did not."""
    body = encoded(kind, orientation=None, xmp=XMP)
    assert XMP in body
    if kind == "TIFF":  # what the caller opens with Pillow is Pillow's to turn
        found = everywhere(body, tmp_path)
        assert {name for name, pixels in found.items() if pixels.shape != (60, 80, 3)} <= {"score, an opened file"}
    else:
        assert_all(body, tmp_path, picture())


def test_invalid_and_damaged_orientations_count_as_none_and_late_ones_count(tmp_path):
    for kind, orientation in itertools.product(("JPEG", "PNG", "WEBP", "TIFF"), (0, 9, 77)):  # AVIF has no such values
        body = encoded(kind, orientation=orientation)
        assert_all(body, tmp_path, picture())
        assert kind == "TIFF" or convert(body).body == body
    png = images.encoded(picture(), "PNG")
    late = chunk_added(png, b"eXIf", exif_data(6)[6:], place=len(png) - 12)  # after the pixels: it counts
    assert_all(late, tmp_path, picture().transpose(Image.Transpose.ROTATE_270))
    for data in (b"Exif\0\0", b"Exif\0\0II*\0", b"Exif\0\0" + b"\xff" * 40, b"\0" * 9):
        assert_all(images.encoded(picture(), "JPEG", quality=98, exif=data), tmp_path, picture())
