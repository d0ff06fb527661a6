"""Response bodies that are not one complete image are recognised without decoding them."""

from __future__ import annotations

import base64
import struct

import pytest

from data_prep import reasons
from data_prep.fetching.served_image import check_image, extension
from data_prep.reasons import FetchError
from tests.images import encoded, png
from tests.pair_files import dropped, make, write_csv, write_images
from tests.web import jpeg, picture


def reason_of(body: bytes, max_pixels: int = 10_000) -> str:
    with pytest.raises(FetchError) as caught:
        check_image(body, content_type="image/jpeg", max_pixels=max_pixels)
    return caught.value.reason


def with_thumbnail(body: bytes) -> bytes:
    thumbnail = jpeg(side=8)
    return body[:2] + b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 8) + b"Exif\0\0" + thumbnail + body[2:]


# Phones append a video, whose bytes contain the markers of a JPEG by accident.
VIDEO = b"video \xff\xd9 of \xff\xda megabytes" + b"x" * 100


def test_whole_images_pass_and_incomplete_ones_are_truncated():
    kinds = {kind: encoded(picture(), kind) for kind in ("JPEG", "PNG", "GIF", "WEBP")}
    whole = [*kinds.values(), encoded(picture(), "BMP"), with_thumbnail(jpeg()), jpeg() + VIDEO]
    whole += [jpeg(progressive=True) + VIDEO, *(kinds[kind] + b"x" * 9_000 for kind in ("PNG", "GIF"))]
    for body in whole:
        check_image(body, content_type="", max_pixels=10_000)
    cut = [body[: int(len(body) * share)] for body in kinds.values() for share in (0.3, 0.6, 0.95)]
    cut += [with_thumbnail(jpeg())[: -len(jpeg()) // 2], jpeg(progressive=True)[: len(jpeg()) // 2] + b"x" * 100]
    for number, body in enumerate(cut):
        assert reason_of(body) == reasons.TRUNCATED, number


def test_non_image_bodies_are_refused():
    for body, reason in (
        (b"", reasons.EMPTY),
        (b"<!DOCTYPE html><p>gone", reasons.NOT_AN_IMAGE),
        (b"  \n<svg xmlns='x'/>", reasons.NOT_AN_IMAGE),
        (b"just words", reasons.NOT_AN_IMAGE),
        (b"%PDF-1.4", reasons.UNSUPPORTED),
        (png(60_000, 60_000, data=b"", colour=2), reasons.TOO_MANY_PIXELS),  # from its header
    ):
        assert reason_of(body) == reason


# A ramp of 24 x 16 pixels, by libheif and libjxl.
HEIC = base64.b64decode(
    "AAAAHGZ0eXBoZWljAAAAAG1pZjFoZWljbWlhZgAAAXxtZXRhAAAAAAAAACFoZGxyAAAAAAAAAABwaWN0AAAAAAAAAAAAAAAAAAAAACJpbG9jAAAA"
    "AERAAAEAAQAAAAABoAABAAAAAAAAAEMAAAAjaWluZgAAAAAAAQAAABVpbmZlAgAAAAABAABodmMxAAAAAA5waXRtAAAAAAABAAAA/GlwcnAAAADc"
    "aXBjbwAAAHVodmNDAQNwAAAAkAAAAAAAHvAA/P34+AAADwNgAAEAGEABDAH//wNwAAADAJAAAAMAAAMAHroCQGEAAQApQgEBA3AAAAMAkAAAAwAA"
    "AwAeoCCBBZbqrprm4CGgwIAAAAyAAAADAIRiAAEABkQBwXPBiQAAABNjb2xybmNseAABAA0ABoAAAAAUaXNwZQAAAAAAAABAAAAAQAAAAChjbGFw"
    "AAAAGAAAAAEAAAAQAAAAAf///9gAAAAC////0AAAAAIAAAAQcGl4aQAAAAADCAgIAAAAGGlwbWEAAAAAAAAAAQABBYECAwWEAAAAS21kYXQAAAA/"
    "KAGvEyFdo0D2tFWmg6c9g3nwMmhzSg3Co6c7N1AiCU0i+Gg01YdQfp3ACPBgKyYPhMW6kHAaduZAh6822he4"
)
JPEG_XL = base64.b64decode(
    "/woDBwATiAIARAG1nyAAABUqo4wbvJzr+fJDh8W0jesMbbVtYQljs70wSEg4Q+aNgv7mkPC4jGF0AJChCJGauq0kkZDI273ZSFCExv0XoE4A0AAA"
    "Yew3ZAEFEAA="
)


@pytest.mark.parametrize(
    ("body", "name"), [(HEIC, "HEIC, which needs: pip install 'neuclip[heif]'"), (JPEG_XL, "JPEG XL")]
)
def test_real_files_of_other_formats_are_counted_by_name(body, name, tmp_path):
    assert reason_of(body) == reasons.UNSUPPORTED
    folder = tmp_path / "in"
    write_images(folder, 2)
    (folder / "photo.jpg").write_bytes(body)
    write_csv(folder / "pairs.csv", [("image", "caption"), ("photo.jpg", "a photo"), ("000.jpg", "fine")])
    outcome = make(folder / "pairs.csv", tmp_path / "out")
    assert dict(outcome.manifest.failures) == {reasons.UNSUPPORTED: 1}
    assert dropped(tmp_path / "out") == [["pairs.csv:2", reasons.UNSUPPORTED, name]]


def test_a_png_without_its_last_bytes_is_refused():
    """Regression test: `neuclip pairs` accepted what `neuclip download` refused."""
    png = encoded(picture(), "PNG")
    for cut in range(1, 12):
        assert reason_of(png[:-cut]) == reasons.TRUNCATED, cut
    longer = bytearray(png)
    longer[png.index(b"IDAT") - 3] = 200
    assert reason_of(bytes(longer)) == reasons.TRUNCATED


def test_extension_follows_the_bytes():
    for kind, name in (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif")):
        assert extension(encoded(picture(), kind), "jpg") == name


def test_row_messages_map_to_reasons():
    assert reasons.of_message("hash mismatch") == reasons.HASH_MISMATCH, "img2dataset's own message"
    assert reasons.of_message("undecodable: bad Huffman code") == reasons.UNDECODABLE
    assert reasons.of_message("http 503: Busy") == "http 503"
    assert reasons.of_message("unknown url type: ''") == reasons.BAD_URL
    assert reasons.of_message("Invalid IPv6 URL") == reasons.BAD_URL
    assert reasons.is_transient("http 503")
    assert not reasons.is_transient("http 404")
    assert reasons.meaning_of("http 418") == "the server's answer"
