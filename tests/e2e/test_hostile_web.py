"""Hundreds of URLs with known outcomes over real sockets: exactly the expected samples are stored, unchanged.

A shuffled list contains every class of response that has been observed on the web. Afterwards each row's reason and
each sample's pixels, caption and hash are compared with what the server sent.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.ingest_report import take_census, write_report
from data_prep.dataset.verification import verify
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.data.shards.tar_reader import CaptionField
from tests.downloads import command_of, download_config
from tests.images import encoded, see_through, sixteen_bits
from tests.launch import environment
from tests.web import send, serve

URLS, SHARD, SIZE = 300, 50, 64
_SOME = 2  # URLs of each class that is not an ordinary image
Answer = Callable[[BaseHTTPRequestHandler], None]


@dataclass
class Case:
    """One row of the list: the server's behaviour, the expected outcome, and the expected appearance of the sample."""

    kind: str
    answer: Answer | None
    reason: str | None = None
    body: bytes = b""
    url: str = ""
    caption: str = ""
    digest: str | None = None


def photograph(seed, width=96, height=80):
    small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC))


def encoded_jpeg(image, **options):
    return encoded(image, "JPEG", **{"quality": 95, **options})


def turned(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded_jpeg(image, exif=exif)


def serves(body, status=200, **headers):
    return lambda handler: send(handler, status, body, **headers)


# Encoders of good images; each must be stored as it appears.
GOOD: dict[str, Callable[[Image.Image], bytes]] = {
    "grey": lambda image: encoded_jpeg(image.convert("L")),
    "1 bit": lambda image: encoded(image.convert("1"), "PNG"),
    "palette": lambda image: encoded(image.quantize(32), "PNG"),
    "transparent palette": lambda image: encoded(image.quantize(32), "PNG", transparency=5),
    "alpha": lambda image: encoded(see_through(image), "PNG"),
    "grey alpha": lambda image: encoded(see_through(image).convert("LA"), "PNG"),
    "16-bit colour": sixteen_bits,
    "16-bit grey": lambda image: sixteen_bits(image.convert("L")),
    "cmyk": lambda image: encoded_jpeg(image.convert("CMYK")),
    "progressive": lambda image: encoded_jpeg(image, progressive=True),
    "gif": lambda image: encoded(image.quantize(64), "GIF"),
    "webp": lambda image: encoded(image, "WEBP", quality=95),
    "transparent webp": lambda image: encoded(see_through(image), "WEBP", lossless=True),
    "bmp": lambda image: encoded(image, "BMP"),
    "tiff": lambda image: encoded(image, "TIFF"),
    "transparent tiff": lambda image: encoded(see_through(image), "TIFF"),
    **{f"orientation {n}": lambda image, n=n: turned(image, n) for n in range(2, 9)},
}
OPT_OUTS = ("noai", "otherbot: nofollow, *: noindex")
NOT_OPTED_OUT = ("otherbot: noai", "max-image-preview: none")


def cut(handler):
    body = encoded_jpeg(photograph(0))
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])


def classes():
    """Return the failure classes by name: the server's response, and the reason that must be recorded."""
    jpeg = encoded_jpeg(photograph(1))
    lossless = encoded(photograph(1), "PNG")
    found: dict[str, tuple[Answer, str | None]] = {
        **{f"status {code}": (serves(b"", code), f"http {code}") for code in (401, 403, 404, 410, 418, 429, 500)},
        "retry-after in superscript": (serves(b"", 503, Retry_After="²"), "http 503"),
        "page": (serves(b"<!doctype html><p>gone", Content_Type="image/jpeg"), reasons.NOT_AN_IMAGE),
        "words": (serves(b"just words"), reasons.NOT_AN_IMAGE),
        "empty": (serves(b""), reasons.EMPTY),
        "half a jpeg": (serves(jpeg[: len(jpeg) // 2]), reasons.TRUNCATED),
        "half a png": (serves(lossless[: len(lossless) // 2]), reasons.TRUNCATED),
        "cut connection": (cut, reasons.CUT_OFF),
        "no answer": (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), reasons.CONNECTION),
        "too many bytes": (serves(jpeg + bytes(300_000)), reasons.TOO_MANY_BYTES),
        "too many pixels": (serves(encoded(Image.new("L", (2_100, 2_000)), "PNG")), reasons.TOO_MANY_PIXELS),
        "redirect to itself": (lambda handler: send(handler, 302, b"", Location=handler.path), reasons.REDIRECTS),
        "redirect to a file": (serves(b"", 302, Location="file:///etc/passwd"), reasons.REFUSED_SCHEME),
        "redirect inside": (serves(b"", 302, Location="http://169.254.169.254/x"), reasons.REFUSED_ADDRESS),
        "redirect with a password": (serves(b"", 302, Location="http://a:b@127.0.0.1/x"), reasons.BAD_URL),
    }
    for header in OPT_OUTS:
        found[f"opted out: {header}"] = (serves(jpeg, X_Robots_Tag=header), reasons.OPTED_OUT)
    return found


WRITTEN = {
    "http://user:pass@127.0.0.1/x.jpg": reasons.BAD_URL,
    "no url at all": reasons.BAD_URL,
    "": reasons.BAD_URL,
    "ftp://127.0.0.1/x.jpg": reasons.REFUSED_SCHEME,
    "http://10.0.0.1/x.jpg": reasons.REFUSED_ADDRESS,
    "http://[::ffff:127.0.0.2]/x.jpg": reasons.REFUSED_ADDRESS,
    "http://does-not-exist.invalid/x.jpg": reasons.DNS,
}


def make_cases(site):
    """Return the shuffled list: every class a few times, and ordinary photographs for the rest."""
    cases = [
        Case(kind, serves(body), body=body)
        for kind, encode in GOOD.items()
        for body in (encode(photograph(seed)) for seed in range(_SOME))
    ]
    for header in NOT_OPTED_OUT:
        body = encoded_jpeg(photograph(len(cases)))
        cases.append(Case(f"not opted out: {header}", serves(body, X_Robots_Tag=header), body=body))
    cases += [Case(kind, answer, reason) for kind, (answer, reason) in classes().items() for _ in range(_SOME)]
    cases += [Case("written", None, reason, url=url) for url, reason in WRITTEN.items() for _ in range(2)]
    cases += [Case("stall", lambda handler: time.sleep(6), reasons.TIMEOUT) for _ in range(4)]
    floats = encoded(Image.fromarray(np.zeros((9, 9), np.float32)), "TIFF")
    for seed in range(_SOME):
        body = encoded_jpeg(photograph(seed))
        cases.append(Case("float pixels", serves(floats), reasons.UNDECODABLE, body=floats))
        cases.append(Case("other hash", serves(body), reasons.HASH_MISMATCH, digest=hashlib.sha256(b"x").hexdigest()))
        cases.append(Case("no caption", serves(body), reasons.NO_CAPTION, body=body, caption=" "))
    for seed in range(len(cases), URLS):
        body = encoded_jpeg(photograph(seed, 60 + seed % 90, 60 + seed % 70))
        cases.append(Case("photograph", serves(body), body=body))
    random.Random(0).shuffle(cases)
    for k, case in enumerate(cases):
        case.caption = case.caption or f"{case.kind}, number {k}: “köter” 犬"
        if case.answer is not None:
            case.url = f"{site.base}/{k}"
            site.answers[f"/{k}"] = case.answer
        case.digest = case.digest or hashlib.sha256(case.body).hexdigest()
    return cases


def seen(body):
    """Return the image as it appears on a white page, at the stored size."""
    with Image.open(io.BytesIO(body)) as image:
        if image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
        page = Image.new("RGBA", ImageOps.exif_transpose(image).size, "white")
        page.alpha_composite(ImageOps.exif_transpose(image).convert("RGBA"))
    array = np.asarray(page.convert("RGB"))
    height, width = array.shape[:2]
    factor = SIZE / min(height, width)
    target = (round(width * factor), round(height * factor))
    return cv2.resize(array, target, interpolation=cv2.INTER_AREA) if factor < 1 else array


def wrong_samples(root, cases):
    """Return the differences between the stored samples and the served images."""
    wrong, found = [], set()
    manifest = load_manifest(root)
    for shard in manifest.shards:
        for key, parts in canonical_tar.samples(manifest.url(shard)):
            case, facts = cases[int(key)], json.loads(parts["json"])
            found.add(int(key))
            with Image.open(io.BytesIO(parts["jpg"])) as image:
                pixels = np.asarray(image.convert("RGB")).astype(int)
            wanted = seen(case.body)
            if pixels.shape != wanted.shape or np.abs(pixels - wanted).mean() > 6:
                wrong.append(f"{key} ({case.kind}): pixels {pixels.shape} for {wanted.shape}")
            if parts["txt"].decode() != case.caption or facts["caption"] != case.caption:
                wrong.append(f"{key} ({case.kind}): caption")
            if facts["sha256"] != hashlib.sha256(case.body).hexdigest() or facts["url"] != case.url:
                wrong.append(f"{key} ({case.kind}): hash or URL")
            if facts["uid"] != str(10**12 + int(key)):
                wrong.append(f"{key} ({case.kind}): uid")
    good = {k for k, case in enumerate(cases) if case.reason is None}
    return wrong + [f"{k} ({cases[k].kind}): {'missing' if k in good else 'stored'}" for k in good ^ found]


@pytest.mark.slow
def test_hundreds_of_urls_with_known_outcomes(tmp_path):
    root = tmp_path / "data"
    with serve() as site:
        cases = make_cases(site)
        columns = {
            "url": [case.url for case in cases],
            "caption": [case.caption for case in cases],
            "SAMPLE_ID": list(range(10**12, 10**12 + len(cases))),
            "digest": [case.digest for case in cases],
        }
        pq.write_table(pa.table(columns), tmp_path / "urls.parquet")
        config = download_config(
            root,
            tmp_path / "urls.parquet",
            source={"uid": "SAMPLE_ID", "hash": "digest"},
            guard={"max_pixels": 4_000_000, "max_bytes": 250_000, "backoff": 0.01},
            image={"size": SIZE},
            fetch={"shard_size": SHARD, "processes": 2, "threads": 12, "timeout": 4, "retries": 0},
            monitor={"min_success": 0},
        )
        ended = subprocess.run(command_of(config), env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    rows = [row for path in sorted(root.glob("meta/*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert [row["row"] for row in rows] == list(range(URLS))
    assert len(cases) == URLS
    differ = Counter((cases[row["row"]].kind, cases[row["row"]].reason, row["reason"]) for row in rows)
    assert {key: count for key, count in differ.items() if key[1] != key[2]} == {}
    assert all((row["status"] == "success") == (row["reason"] is None) for row in rows)
    assert wrong_samples(root, cases) == []
    assert load_manifest(root).failures == Counter(case.reason for case in cases if case.reason)
    assert verify(root, decode=SHARD) == []
    # The page and its statistics account for every URL.
    manifest, page = load_manifest(root), write_report(root).read_text()
    for reason, count in manifest.failures.items():
        assert re.search(rf'<td>{reason}<.*?<td class="n">{count}<', page), reason
    assert page.count("<figure>") >= 18
    assert "src=" not in page.replace('src="data:', ""), "the page is self-contained"
    assert manifest.digest in page
    census = take_census(manifest, CaptionField())
    assert len(census.sides) == len(census.words) == manifest.n
