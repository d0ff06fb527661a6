"""One opener of images for every command: each format and mode gives the right pixels or a reason, and none hangs."""

from __future__ import annotations

import ast
import io
import struct
import time
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from PIL import Image, ImageCms

from data_prep.fetching import served_image
from data_prep.fetching.served_image import decode as served
from data_prep.pairs.pair import convert
from data_prep.reasons import FetchError
from pipeline import pictures
from pipeline.data.data_config import CropConfig
from pipeline.data.loading.decode import ImageDecoder
from pipeline.data.shards.tar_reader import CorruptSample
from pipeline.errors import UserError
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.datasets.task_data import decode as evaluated
from pipeline.model.evaluation_model import _open
from pipeline.pictures import ImageError, jpeg, pixels
from pipeline.pictures.pixels import read_rgb
from pipeline.playground.explorer import open_image as shown
from tests.images import HEIC, JPEG_XL, encoded
from tests.unit.test_imports import MODULES, name_of

WIDTH, HEIGHT = 40, 24
RAMP = np.tile(np.linspace(0, 1, WIDTH), (HEIGHT, 1))
"""Grey from black on the left to white on the right, so that inverted, white, black and dark pictures all differ."""


def ramp(kind, largest):
    return (RAMP * largest).round().astype(kind)


def pnm(largest, *, channels=1):
    values = np.repeat(ramp(np.uint16, largest)[..., None], channels, axis=2)
    data = values.astype(np.uint8).tobytes() if largest < 256 else values.astype(">u2").tobytes()
    return b"P%d %d %d %d\n" % (5 if channels == 1 else 6, WIDTH, HEIGHT, largest) + data


def tiff(values, *, bits, sample_format=1, interpretation=1):
    """An uncompressed grey TIFF, for pixel types that Pillow does not write."""
    tags = [(256, WIDTH), (257, HEIGHT), (258, bits), (259, 1), (262, interpretation), (273, 8), (277, 1),
            (278, HEIGHT), (279, len(values)), (339, sample_format)]  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(values)) + values + directory + b"\0" * 4


def twelve_bits():
    first, second = ramp(np.uint16, 4095).reshape(-1, 2).T
    return np.stack([first >> 4, (first & 15) << 4 | second >> 8, second & 255], axis=1).astype(np.uint8).tobytes()


GREY = Image.fromarray(ramp(np.uint8, 255))
RGB = GREY.convert("RGB")
RGBA = RGB.copy()
RGBA.putalpha(128)
DEEP = Image.fromarray(ramp(np.uint16, 65535))
WIDE = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def after_another_chunk(png):
    """As the PNGs in iPhone apps begin."""
    body = b"CgBI\x50\0\x20\x06"
    return png[:8] + (4).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big") + png[8:]


GOOD: dict[str, bytes] = {
    **{f"RGB, {kind}": encoded(RGB, kind, quality=95) for kind in pixels.FORMATS if kind not in ("JPEG2000", "HEIF")},
    "RGB, JPEG2000": encoded(RGB, "JPEG2000"),
    **{f"L, {kind}": encoded(GREY, kind) for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "JPEG2000")},
    **{f"RGBA, {kind}": encoded(RGBA, kind) for kind in ("PNG", "WEBP", "TIFF", "AVIF", "JPEG2000", "BMP")},
    "LA, PNG": encoded(RGBA.convert("LA"), "PNG"),
    "LA, TIFF": encoded(RGBA.convert("LA"), "TIFF"),
    "P, PNG": encoded(RGB.quantize(256), "PNG"),
    "P, TIFF": encoded(RGB.quantize(256), "TIFF"),
    "P, BMP": encoded(RGB.quantize(256), "BMP"),
    "P with a transparent colour": encoded(RGB.quantize(256), "PNG", transparency=3),
    "P with transparencies": encoded(RGB.quantize(256), "PNG", transparency=bytes(range(256))),
    "CMYK, JPEG": encoded(RGB.convert("CMYK"), "JPEG", quality=95),
    "CMYK, TIFF": encoded(RGB.convert("CMYK"), "TIFF"),
    "YCbCr, TIFF": encoded(RGB.convert("YCbCr"), "TIFF"),
    "LAB, TIFF": encoded(RGB.convert("LAB"), "TIFF"),
    "progressive JPEG": encoded(RGB, "JPEG", progressive=True, quality=95),
    "JPEG with a profile, which is ignored": encoded(RGB, "JPEG", quality=95, icc_profile=WIDE),
    "16 bits, PNG": encoded(DEEP, "PNG"),
    "16 bits, TIFF": encoded(DEEP, "TIFF"),
    "16 bits, compressed TIFF": encoded(DEEP, "TIFF", compression="tiff_lzw"),
    "16 bits, JPEG2000": encoded(DEEP, "JPEG2000"),
    "16 bits, white is zero": tiff((65535 - ramp(np.uint16, 65535)).tobytes(), bits=16, interpretation=0),
    "8 bits, white is zero": tiff((255 - ramp(np.uint8, 255)).tobytes(), bits=8, interpretation=0),
    "L, transparent, PNG with another chunk first": after_another_chunk(encoded(GREY, "PNG", transparency=7)),
    "12 bits, TIFF": tiff(twelve_bits(), bits=12),
    **{f"PGM to {largest}": pnm(largest) for largest in (100, 255, 1023, 4095, 65535)},
    **{f"PPM to {largest}": pnm(largest, channels=3) for largest in (100, 255, 1023, 65535)},
}  # fmt: skip
BAD: dict[str, tuple[bytes, str]] = {
    "32 bits, TIFF": (tiff(ramp(np.uint32, 2**32 - 1).tobytes(), bits=32), pictures.UNDECODABLE),
    "signed 32 bits, TIFF": (encoded(Image.fromarray(ramp(np.int32, 70_000)), "TIFF"), pictures.UNDECODABLE),
    "signed 16 bits, TIFF": (tiff(ramp(np.int16, 32767).tobytes(), bits=16, sample_format=2), pictures.UNDECODABLE),
    "signed 8 bits, TIFF": (tiff(ramp(np.int8, 127).tobytes(), bits=8, sample_format=2), pictures.UNDECODABLE),
    "float, TIFF": (encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), pictures.UNDECODABLE),
    "float, PFM": (b"Pf %d %d -1.0\n" % (WIDTH, HEIGHT) + RAMP.astype("<f4").tobytes(), pictures.UNDECODABLE),
    "damaged AVIF": (encoded(RGB, "AVIF")[:-60] + bytes(60), pictures.UNDECODABLE),
    "text": (b"hello", pictures.NOT_AN_IMAGE),
    "nothing": (b"", pictures.NOT_AN_IMAGE),
    "PCX": (encoded(RGB, "PCX"), pictures.NOT_AN_IMAGE),
    "EPS": (encoded(RGB, "EPS"), pictures.UNSUPPORTED),
    "PDF": (encoded(RGB, "PDF"), pictures.UNSUPPORTED),
    "ICO": (encoded(RGB, "ICO"), pictures.UNSUPPORTED),
    "HEIC": (HEIC, pictures.UNSUPPORTED),
    "HEIC of another brand": (b"\0\0\0\x18ftypmif2\0\0\0\0mif1heic" + bytes(99), pictures.UNSUPPORTED),
    "JPEG XL": (JPEG_XL, pictures.UNSUPPORTED),
    "JPEG XL in a container": (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(99), pictures.UNSUPPORTED),
    "JPEG cut off": (encoded(RGB, "JPEG", quality=95)[:-300], pictures.TRUNCATED),
}  # fmt: skip


def grey_levels(image):
    found = np.asarray(image).astype(int)
    return found if found.ndim == 2 else found.mean(axis=2)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", GOOD)
def test_every_mode_and_format_is_read(name):
    body = GOOD[name]
    resized = read_rgb(convert(body, HEIGHT - 1).body).resize((WIDTH, HEIGHT))
    see_through = ("RGBA" in name and "BMP" not in name) or "LA," in name
    on_white = (255 * RAMP + 255) / 2 if see_through else 255 * RAMP
    served_image.check_image(body, content_type="", max_pixels=WIDTH * HEIGHT)
    for reader, image, tolerance in [
        ("training", read_rgb(body), 6),
        ("evaluation", evaluated(body, name="x"), 6),
        ("pairs", read_rgb(convert(body).body), 6),
        ("pairs, resized", resized, 12),
        ("download", served(body).array, 8),
    ]:
        wanted = 255 * RAMP if reader == "evaluation" else on_white
        if reader == "evaluation" or "transparen" not in name:
            assert np.abs(grey_levels(image) - wanted).max() < tolerance, reader
    for mode in ("fast", "exact"):
        trained(mode)(body, state=0)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_has_a_reason_everywhere(name, tmp_path):
    body, reason = BAD[name]
    with pytest.raises(ImageError) as caught:
        read_rgb(body)
    assert caught.value.reason == reason
    (tmp_path / "file").write_bytes(body)
    with pytest.raises(TaskError, match="Corrupt image x"):
        evaluated(body, name="x")
    with pytest.raises(UserError, match="file cannot be read"):
        _open(tmp_path / "file", pixels.WHITE)
    with pytest.raises(UserError, match=r"^x "):
        shown(body, name="x")
    with pytest.raises(FetchError) as refused:
        convert(body)
    wanted = "empty" if name == "nothing" else reason
    assert refused.value.reason == wanted
    with pytest.raises(FetchError):
        downloaded(body)
    for mode in ("fast", "exact"):
        with pytest.raises(CorruptSample):
            trained(mode)(body, state=0)


def downloaded(body):
    served_image.check_image(body, content_type="", max_pixels=10**6)
    return served(body).array


def trained(mode):
    return ImageDecoder(size=16, crop=CropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0)), mode=mode, max_pixels=10**8)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "LA", "PA", "RGBX",
                                  "RGBa", "La", "I;16", "I;16L", "I;16B", "I;16N", "I", "F"])  # fmt: skip
def test_every_mode_of_an_image_in_memory(mode):
    if mode in ("I", "F"):
        with pytest.raises(ImageError, match=f"undecodable: pixels of mode {mode} have no agreed range"):
            pixels.to_rgb(Image.new(mode, (2, 2)))
        return
    white = {
        "L": 255, "1": 255, "CMYK": (0,) * 4, "YCbCr": (255, 128, 128), "LAB": (255, 128, 128), "HSV": (0, 0, 255),
        "LA": (255, 9), "La": (255, 255), "RGBA": (255, 255, 255, 9),
    }  # fmt: skip
    if mode in ("P", "PA"):
        image = Image.new("RGB", (2, 2), "white").convert("P").convert(mode)
    else:
        image = Image.new(mode, (2, 2), white.get(mode, 65535 if mode.startswith("I") else (255,) * len(mode)))
    assert pixels.to_rgb(image).mode == "RGB"
    assert np.asarray(pixels.to_rgb(image)).min() > 250


def markers(data):
    return dict(reversed(list(jpeg.markers(data))))


def many_scans(count, *, progressive=True, side=2000):
    """A small JPEG that repeats one of its scans; in a baseline one, of one component only."""
    options = {"progressive": True} if progressive else {"subsampling": 0}
    plain = encoded(Image.new("RGB", (side, side)), "JPEG", **options)
    if not progressive:  # one scan of all three components becomes a scan of the first
        place = markers(plain)[0xDA]
        header = plain[: place - 2]
        scan = b"\xff\xda\0\x08\x01\x01\0\0\x3f\0" + b"\0" * (side * side // 64 // 4)
        return header + scan * count + b"\xff\xd9"
    starts = [place - 2 for marker, place in jpeg.markers(plain) if marker == 0xDA]
    last = plain[starts[-1] : -2]
    return plain[:-2] + last * count + b"\xff\xd9"


@pytest.mark.parametrize("progressive", [True, False])
def test_a_jpeg_with_too_many_scans_is_refused_before_it_is_decoded(progressive):
    body = many_scans(12_000, progressive=progressive, side=512)
    started = time.monotonic()
    readers: list[Callable[[], object]] = [
        partial(read_rgb, body),
        partial(evaluated, body, name="x"),
        partial(shown, body, name="x"),
        partial(convert, body),
        partial(served_image.check_image, body, content_type="", max_pixels=10**9),
        partial(served, body),
        *(partial(trained(mode), body, state=0) for mode in ("fast", "exact")),
    ]
    for reader in readers:
        with pytest.raises((ImageError, FetchError, TaskError, CorruptSample, UserError), match="too many scans"):
            reader()
    assert time.monotonic() - started < 60, "minutes to hours, if one of them decodes it"


def test_scans_of_ordinary_jpegs_are_counted_exactly_and_grey_corners_are_no_damage():
    read_rgb(encoded(Image.new("RGB", (33, 17), (128, 128, 128)), "JPEG"))
    read_rgb(encoded(Image.new("L", (33, 17), 128), "JPEG", progressive=True))
    whole = encoded(RGB, "JPEG", quality=95)
    read_rgb(whole[:-2] + b"\0\x01\x02" + whole[-2:])  # a few bytes too many, which some cameras write
    thumbnail = encoded(RGB, "JPEG", progressive=True)
    exif = b"Exif\0\0" + thumbnail * 20
    for body, scans in (
        (encoded(RGB, "JPEG"), 1),
        (encoded(RGB, "JPEG", progressive=True), 10),
        (encoded(GREY, "JPEG", progressive=True), 6),
        (encoded(RGB, "JPEG", progressive=True, exif=exif), 10),
        (encoded(RGB, "JPEG", progressive=True) + thumbnail * 20, 10),
    ):
        assert jpeg.count_scans(body, limit=50) == scans
        read_rgb(body)
    assert jpeg.count_scans(many_scans(90, side=64), limit=100) == 100
    read_rgb(many_scans(90, side=64))
    jpeg.check_scans(b"\x89PNG" + b"\xff\xda\0" * 200)


@pytest.mark.parametrize(("side", "allowed"), [(64, 100), (4000, 100), (9400, 24), (13_000, 12), (60_000, 12)])
def test_large_jpegs_may_have_fewer_scans(side, allowed):
    """Regression test: 100 scans of 88 million pixels, which take 40 s, were allowed."""
    for count in (allowed, allowed + 1):
        body = bytearray(many_scans(count - 10, side=64))
        frame = markers(body)[0xC2]
        body[frame + 3 : frame + 7] = side.to_bytes(2, "big") * 2
        if count == allowed:
            jpeg.check_scans(bytes(body))
        else:
            with pytest.raises(ImageError, match=f"too many scans: more than {allowed}"):
                jpeg.check_scans(bytes(body))


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.88])
def test_a_jpeg_whose_data_end_before_its_end_marker_is_refused(share, mode, progressive):
    """Decoders make the rest grey and report nothing, so it used to count as good."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    body = encoded(Image.fromarray(noise).convert(mode), "JPEG", progressive=progressive)
    read_rgb(body)
    cut = body[: int(share * len(body))].rstrip(b"\xff") + b"\xff\xd9"
    if progressive and markers(cut).get(0xDA, len(cut)) >= len(cut) - 2:
        return
    Image.open(io.BytesIO(cut)).load()  # Pillow finds nothing
    served_image.check_image(cut, content_type="", max_pixels=10**6)
    for reader in (read_rgb, served, convert):
        with pytest.raises((ImageError, FetchError), match="truncated"):
            reader(cut)
    for decoder in ("fast", "exact"):
        with pytest.raises(CorruptSample, match="image cannot be decoded"):
            trained(decoder)(cut, state=0)


def test_no_other_module_opens_images():
    """Also not through the libraries that open them themselves."""
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        found = {f"{ast.unparse(call.value)}.{call.attr}" for call in calls if isinstance(call, ast.Attribute)}
        names = {"Image.open", "PIL.Image.open", "cv2.imread", "imageio.imread", "simplejpeg.decode_jpeg"}
        allowed = {
            "pipeline.pictures.pixels": names,
            "pipeline.pictures.jpeg": {"simplejpeg.decode_jpeg"},
            "pipeline.data.loading.decode": {"simplejpeg.decode_jpeg"},
        }
        assert not found & names - allowed.get(name_of(path), set()), path
