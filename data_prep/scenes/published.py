"""What the corpus publishes: the bytes of every URL with its simulated failure, the URL table, and a digest of it all.

The fault of a URL is a pure function of (config, index), so that the expected failures can be counted. The table is
like the metadata of CC3M or DataComp, and depends only on the config and the base URL.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from data_prep.evalsets import write_sets
from data_prep.scenes.caption import web
from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import Draws, ScenesConfig
from pipeline.files import replacing

OVERSIZE_SIDE = 6_000  # pixels; a few hundred kB as JPEG, 108 MB once decoded


Fault = enum.StrEnum(
    "Fault",
    "NOT_FOUND FORBIDDEN GONE TRUNCATED INCOMPLETE HTML WRONG_HASH OVERSIZE DISCONNECT TRANSIENT SLOW STALL NOAI NONE",
)
"""What the server does with a URL, as `FaultRates` describes it; NONE: it serves what is published."""


def fault_of(config: ScenesConfig, index: int) -> Fault:
    """The one fault of a URL, or `Fault.NONE`."""
    left = Draws(config.seed, index, "fault").unit()
    for name, rate in vars(config.faults).items():
        left -= rate
        if left < 0:
            return Fault(name)
    return Fault.NONE


def published(config: ScenesConfig, index: int) -> bytes:
    """The bytes whose SHA-256 is in the URL table."""
    fault = fault_of(config, index)
    if fault is Fault.TRUNCATED:
        whole = jpeg(config, index)
        return whole[: len(whole) // 3]
    if fault is Fault.OVERSIZE:
        return _oversize()
    return jpeg(config, index)


def served(config: ScenesConfig, index: int) -> bytes:
    """The body that the server sends when it answers with 200."""
    fault = fault_of(config, index)
    if fault is Fault.WRONG_HASH:
        return jpeg(config, index + 1)
    if fault is Fault.HTML:
        return b"<!doctype html><title>Moved</title><p>This picture is no longer available.</p>\n"
    return published(config, index)


def sha256(config: ScenesConfig, index: int) -> str:
    return hashlib.sha256(published(config, index)).hexdigest()


@functools.cache
def _oversize() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (OVERSIZE_SIDE, OVERSIZE_SIDE), (90, 120, 160)).save(buffer, "JPEG", quality=40)
    return buffer.getvalue()


CHUNK = 1_000
SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("url", pa.string()),
        ("caption", pa.string()),
        ("sha256", pa.string()),
        ("original_width", pa.int32()),
        ("original_height", pa.int32()),
    ]
)


def write_url_table(config: ScenesConfig, base: str, path: str | Path, *, processes: int = 1) -> None:
    """Write the table of all `config.pairs` training pairs as parquet; row k is scene k.

    Columns: `uid` (32 hex digits, independent of the address), `url`, `caption` (web style), `sha256` of the bytes as
    published (so it is wrong for a URL with the wrong-hash fault), `original_width` and `original_height` in pixels.
    URLs begin with `base`, that of the server; `processes` processes render the images.
    """
    with replacing(path) as temporary, pq.ParquetWriter(temporary, SCHEMA) as writer:
        for columns in _chunks(config, base, processes):
            writer.write_table(pa.table(columns, schema=SCHEMA))


def url(base: str, config: ScenesConfig, index: int) -> str:
    """The URL of a scene's image."""
    return f"{base}/scenes/{config.seed}/{index}.jpg"


def uid(config: ScenesConfig, index: int) -> str:
    """The permanent id of a sample: 32 hex digits."""
    return hashlib.sha256(f"scenes/{config.seed}/{index}".encode()).hexdigest()[:32]


def _chunks(config: ScenesConfig, base: str, processes: int) -> Iterable[dict[str, list]]:
    rows, starts = functools.partial(_rows, config, base), range(0, config.pairs, CHUNK)
    if processes == 1:
        yield from map(rows, starts)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(rows, starts)


def _rows(config: ScenesConfig, base: str, start: int) -> dict[str, list]:
    indices = range(start, min(start + CHUNK, config.pairs))
    sides = [OVERSIZE_SIDE if fault_of(config, index) is Fault.OVERSIZE else config.image_size for index in indices]
    return {
        "uid": [uid(config, index) for index in indices],
        "url": [url(base, config, index) for index in indices],
        "caption": [web(config, index) for index in indices],
        "sha256": [sha256(config, index) for index in indices],
        "original_width": sides,
        "original_height": sides,
    }


def corpus_digest(config: ScenesConfig, *further: Path) -> str:
    """SHA-256, 64 hex digits, of the settings, the source files that make the corpus, and the files in `further`.

    Equal digests mean the same images, captions and faults, up to the versions of numpy and Pillow.
    """
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(write_sets.__file__), *further):
        digest.update(f"\n{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
