"""Response bodies that are not one complete image are recognised without decoding them."""

import struct

import pytest

from data_prep import reasons
from data_prep.fetching.served_image import check_image, extension
from data_prep.reasons import FetchError
from tests.images import encoded, png
from tests.web import jpeg, picture


def reason_of(body, max_pixels=10_000):
    with pytest.raises(FetchError) as caught:
        check_image(body, content_type="image/jpeg", max_pixels=max_pixels)
    return caught.value.reason


def with_thumbnail(body):
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
