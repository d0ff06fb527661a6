"""The URL table of the corpus, like the metadata of CC3M or DataComp. Depends only on the config and the base URL."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.scenes import faults
from data_prep.scenes.caption import web
from data_prep.scenes.scenes_config import ScenesConfig
from data_prep.scenes.server import url
from pipeline.files import replacing

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


def write_url_table(config: ScenesConfig, base: str, path: str | Path, *, processes: int = 1) -> int:
    """Write the table of all `config.pairs` training pairs as parquet; row k is scene k.

    Columns: `uid` (32 hex digits, independent of the address), `url`, `caption` (web style), `sha256` of the bytes as
    published (so it is wrong for a URL with the wrong-hash fault), `original_width` and `original_height` in pixels.

    Args:
        config: The corpus.
        base: Base URL of the server.
        path: The parquet file.
        processes: Number of processes that render the images.

    Returns:
        The number of rows.
    """
    with replacing(path, unique=False) as temporary, pq.ParquetWriter(temporary, SCHEMA) as writer:
        for columns in _chunks(config, base, processes):
            writer.write_table(pa.table(columns, schema=SCHEMA))
    return config.pairs


def uid(config: ScenesConfig, index: int) -> str:
    """The permanent id of a sample: 32 hex digits."""
    return hashlib.sha256(f"scenes/{config.seed}/{index}".encode()).hexdigest()[:32]


def _chunks(config: ScenesConfig, base: str, processes: int) -> Iterable[dict[str, list]]:
    starts = range(0, config.pairs, CHUNK)
    if processes == 1:
        yield from map(_rows, itertools.repeat(config), itertools.repeat(base), starts)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_rows, itertools.repeat(config), itertools.repeat(base), starts)


def _rows(config: ScenesConfig, base: str, start: int) -> dict[str, list]:
    indices = range(start, min(start + CHUNK, config.pairs))
    sides = [
        faults.OVERSIZE_SIDE if faults.fault_of(config, index) is faults.Fault.OVERSIZE else config.image_size
        for index in indices
    ]
    return {
        "uid": [uid(config, index) for index in indices],
        "url": [url(base, config, index) for index in indices],
        "caption": [web(config, index) for index in indices],
        "sha256": [faults.sha256(config, index) for index in indices],
        "original_width": sides,
        "original_height": sides,
    }
