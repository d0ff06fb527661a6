"""Response bodies that are not one complete image are recognised without decoding them."""

from __future__ import annotations

import struct
import zlib

import pytest

from data_prep import reasons
from data_prep.dataset.ingest_report import meaning_of
from data_prep.fetching.content import check_image, extension
from data_prep.reasons import FetchError
from tests.web import encoded, jpeg


def reason_of(body: bytes, max_pixels: int = 10_000) -> str:
    with pytest.raises(FetchError) as caught:
        check_image(body, content_type="image/jpeg", max_pixels=max_pixels)
    return caught.value.reason


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
def test_whole_images_pass(kind: str) -> None:
    check_image(encoded(kind), content_type="", max_pixels=10_000)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_incomplete_images_are_truncated(kind: str, share: float) -> None:
    body = encoded(kind)
    assert reason_of(body[: int(len(body) * share)]) == reasons.TRUNCATED


def test_progressive_jpeg_with_trailing_bytes_passes() -> None:
    check_image(jpeg(progressive=True) + b"camera notes", content_type="", max_pixels=10_000)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_file_appended_to_a_jpeg_does_not_hide_its_end(progressive: bool) -> None:
    """Phones append a video, whose bytes contain the markers of a JPEG by accident."""
    body = jpeg(progressive=progressive)
    check_image(body + b"video \xff\xd9 of \xff\xda megabytes" + b"x" * 100, content_type="", max_pixels=10_000)
    assert reason_of(body[: len(body) // 2] + b"x" * 100) == reasons.TRUNCATED


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_bytes_after_the_end_are_allowed(kind: str) -> None:
    check_image(encoded(kind) + b"x" * 9_000, content_type="", max_pixels=10_000)


def test_thumbnail_does_not_hide_a_truncated_jpeg() -> None:
    thumbnail = jpeg(side=8)
    segment = b"\xff\xe1" + struct.pack(">H", len(thumbnail) + 8) + b"Exif\0\0" + thumbnail
    body = jpeg()
    whole = body[:2] + segment + body[2:]
    check_image(whole, content_type="", max_pixels=10_000)
    assert reason_of(whole[: len(whole) - len(body) // 2]) == reasons.TRUNCATED


def test_decompression_bomb_is_refused_from_its_header() -> None:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + header, b"IDAT" + zlib.compress(b"")]
    png = b"".join(struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    assert reason_of(b"\x89PNG\r\n\x1a\n" + png) == reasons.TOO_MANY_PIXELS


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", reasons.EMPTY),
        (b"<!DOCTYPE html><p>gone", reasons.NOT_AN_IMAGE),
        (b"  \n<svg xmlns='x'/>", reasons.NOT_AN_IMAGE),
        (b"just words", reasons.NOT_AN_IMAGE),
        (b"%PDF-1.4", reasons.NOT_AN_IMAGE),
    ],
)
def test_non_image_bodies_are_refused(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


@pytest.mark.parametrize(("kind", "name"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif")])
def test_extension_follows_the_bytes(kind: str, name: str) -> None:
    assert extension(encoded(kind), "jpg") == name


def test_row_messages_map_to_reasons() -> None:
    assert reasons.of_message("hash mismatch") == reasons.HASH_MISMATCH, "img2dataset's own message"
    assert reasons.of_message("undecodable: bad Huffman code") == reasons.UNDECODABLE
    assert reasons.of_message("http 503: Busy") == "http 503"
    assert reasons.of_message("unknown url type: ''") == reasons.BAD_URL
    assert reasons.of_message("Invalid IPv6 URL") == reasons.BAD_URL
    assert reasons.is_transient("http 503")
    assert not reasons.is_transient("http 404")


def test_every_reason_is_explained() -> None:
    assert not [reason for reason in reasons.KNOWN if not meaning_of(reason)]
    assert meaning_of("http 418") == "the server's answer"
