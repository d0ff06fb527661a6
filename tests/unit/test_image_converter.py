"""Stored images are upright, 8-bit and blended onto white; ordinary images get the same bytes as from img2dataset."""

import io
import struct

import cv2
import numpy as np
import pytest
from img2dataset.blurrer import BoundingBoxBlurrer
from img2dataset.resizer import Resizer
from PIL import Image, ImageOps

from data_prep import reasons
from data_prep.download_config import ImageConfig
from data_prep.fetching import served_image as decoding
from data_prep.fetching.decoder import ImageConverter
from data_prep.fetching.served_image import check_image, decode
from data_prep.pairs.pair import convert
from data_prep.reasons import FetchError
from pipeline.pictures.pixels import read_rgb
from tests.images import encoded, png, see_through, sixteen_bits

PIXELS = 10_000_000


def photograph(width=80, height=60):
    small = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC))


def stored(body, **image):
    """Return the stored pixels as RGB, encoded losslessly and without resizing."""
    settings = {"resize_mode": "no", "encode_format": "png", "encode_quality": 1, **image}
    body, *sizes, error = ImageConverter(ImageConfig(**settings), max_pixels=PIXELS)(io.BytesIO(body))
    assert error is None
    array = np.asarray(Image.open(io.BytesIO(body)).convert("RGB"))
    assert tuple(sizes[:2]) == (array.shape[1], array.shape[0])
    return array


def seen(image):
    """Return the image as it appears on a white page."""
    page = Image.new("RGBA", image.size, "white")
    page.alpha_composite(ImageOps.exif_transpose(image).convert("RGBA"))
    return np.asarray(page.convert("RGB"))


def test_deeper_images_become_8_bit():
    photo = photograph()
    images = {"L": photo.convert("L"), "RGB": photo, "RGBA": see_through(photo)}
    tiff = encoded(Image.fromarray(np.asarray(images["L"]).astype(np.uint16) * 257), "TIFF")
    for image, body in [*((image, sixteen_bits(image)) for image in images.values()), (images["L"], tiff)]:
        assert np.abs(stored(body).astype(int) - seen(image)).max() <= 1
    array = np.asarray(photo)[..., ::-1].astype(np.uint16) * 4
    done, body = cv2.imencode(".avif", array, [cv2.IMWRITE_AVIF_DEPTH, 10, cv2.IMWRITE_AVIF_QUALITY, 95])
    assert done
    assert np.abs(stored(bytes(body)).astype(int) - np.asarray(photo)).mean() < 4


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000"])
def test_damaged_images_are_judged_as_by_pairs(kind):
    """Regression test: `neuclip pairs` took damaged GIF, PNG and AVIF that `neuclip download` refused."""
    whole, draw = encoded(photograph(), kind), np.random.default_rng(0)

    def judged(how, body):
        try:
            check_image(body, content_type="", max_pixels=PIXELS)
            how(body)
        except FetchError:
            return False
        return True

    for _ in range(40):
        body = bytearray(whole)
        body[draw.integers(40, len(whole))] ^= 1 << int(draw.integers(8))
        assert judged(decode, bytes(body)) == judged(convert, bytes(body))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
@pytest.mark.parametrize("size", [(1, 1), (1, 900), (900, 2), (7, 9), (161, 147)])
def test_thin_and_dithered_images_are_stored_in_every_format(kind, size):
    image = photograph(*size).convert("1")
    options = ImageConfig(resize_mode="no", encode_format=kind, encode_quality=3 if kind == "png" else 100)
    outcome = ImageConverter(options, max_pixels=PIXELS)(io.BytesIO(encoded(image, "PNG")))
    assert outcome[0] is not None, outcome[-1]
    assert outcome[1:5] == (*size, *size)
    found = np.asarray(Image.open(io.BytesIO(outcome[0])).convert("L")).astype(int)
    assert np.abs(found - seen(image)[..., 0]).mean() < 12


def test_the_transparent_level_of_a_grey_png_becomes_white():
    """Its left half has level 1, which a tRNS chunk declares transparent, and its right half has level 0."""
    for bits in (1, 2, 4, 8, 16):
        line = int("".join(f"{level:0{bits}b}" for level in [1] * 8 + [0] * 8), 2).to_bytes(2 * bits, "big")
        body = png(16, 8, data=(b"\0" + line) * 8, bits=bits, transparent=struct.pack(">H", 1))
        for found in (stored(body), np.asarray(read_rgb(body))):
            assert (found[:, :8] == 255).all(), "the level declared transparent"
            assert (found[:, 8:] == 0).all()
        assert (stored(body, skip_reencode=True)[:, :8] == 255).all()


MODES = ["no", "keep_ratio", "keep_ratio_largest"]
SIZES = [(80, 60), (61, 203), (300, 299), (32, 32), (333, 100), (64, 64)]


@pytest.mark.parametrize("mode", MODES)
def test_ordinary_images_are_stored_and_blurred_as_by_img2dataset(mode):
    boxes = [[0.1, 0.2, 0.4, 0.6]]
    theirs = Resizer(64, mode, True, max_image_area=PIXELS, blurrer=BoundingBoxBlurrer())
    ours = ImageConverter(ImageConfig(size=64, resize_mode=mode), max_pixels=PIXELS, blur=True)
    for size in SIZES:
        for body in (
            encoded(photograph(*size), "JPEG"),
            encoded(photograph(*size).convert("L"), "PNG"),
            encoded(see_through(photograph(*size)), "PNG"),
        ):
            for blurred in (None, boxes):
                assert ours(io.BytesIO(body), blurred) == theirs(io.BytesIO(body), blurred), (mode, size)


def test_bytes_that_need_no_change_are_kept():
    keeps = ImageConverter(ImageConfig(size=64, skip_reencode=True), max_pixels=PIXELS)
    for size, kept in (((50, 40), True), ((300, 200), False)):
        body = encoded(photograph(*size), "JPEG")
        assert (keeps(io.BytesIO(body))[0] == body) == kept


def test_alpha_is_blended_exactly():
    alpha, colour = np.meshgrid(np.arange(256), np.arange(256))
    array = np.stack([colour] * 3 + [alpha], axis=-1).astype(np.uint8)
    for background, at in (("white", 255), ("#102030", 16)):
        wanted = np.rint(alpha / 255 * colour + (1 - alpha / 255) * at)
        found = stored(encoded(Image.fromarray(array, "RGBA"), "PNG"), background=background)
        assert np.array_equal(found[..., 0], wanted)


@pytest.mark.parametrize(
    ("body", "image", "reason"),
    [
        (encoded(photograph(), "JPEG"), {"min_size": 61}, reasons.TOO_SMALL),
        (encoded(photograph(160, 30), "JPEG"), {"max_aspect_ratio": 5}, reasons.EXTREME_ASPECT),
        (encoded(photograph(4000, 3000), "JPEG"), {}, reasons.TOO_MANY_PIXELS),
        (encoded(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF"), {}, reasons.UNDECODABLE),
        (encoded(photograph(), "ICO"), {}, reasons.UNSUPPORTED),
        (encoded(photograph(), "PNG")[:900] + b"x" * 200 + encoded(photograph(), "PNG")[1100:], {}, None),
    ],
)
def test_images_that_cannot_be_stored_have_a_reason(body, image, reason):
    outcome = ImageConverter(ImageConfig(**image), max_pixels=PIXELS)(io.BytesIO(body))
    if reason is None:  # a damaged file: any result of the decoder is accepted, as long as it does not crash
        assert outcome[0] is not None or reasons.of_message(outcome[-1] or "") == reasons.UNDECODABLE
        return
    assert outcome[:5] == (None,) * 5
    assert reasons.of_message(outcome[-1] or "") == reason


def test_an_image_that_exceeds_available_memory_fails_with_a_transient_reason(monkeypatch):
    body = encoded(Image.new("RGBA", (4000, 3000)), "PNG")
    monkeypatch.setattr(decoding, "memory_at_hand", lambda: 400_000_000)
    assert decode(body, processes=2).array.shape == (3000, 4000, 3)
    with pytest.raises(FetchError, match="too little memory: 4000 x 3000 RGBA: 192 MB needed, 100 MB free"):
        decode(body, processes=4)
    assert reasons.is_transient(reasons.TOO_LITTLE_MEMORY)


def test_available_memory_is_the_minimum_of_machine_and_container(tmp_path):
    assert 0 < decoding.memory_at_hand() < 1 << 50
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert decoding.memory_at_hand(tmp_path) == 0.6 * 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert decoding.memory_at_hand(tmp_path) > 1_000_000
    assert decoding.memory_at_hand(tmp_path / "none") > 1_000_000
