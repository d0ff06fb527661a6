"""What the corpus publishes, and a small web server on 127.0.0.1 that serves it with the failures of the real web.

The fault of a URL is a pure function of (config, index), so that the expected failures can be counted. Images are
rendered on request. The server runs in its own process and exits with its parent.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from data_prep.scenes.caption import web
from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import Draws, ScenesConfig
from pipeline.errors import UserError
from pipeline.files import replacing

OVERSIZE_SIDE = 6_000  # pixels; a few hundred kB as JPEG, 108 MB once decoded
SLOW, STALL = 0.3, 20.0
"""Seconds: the longest delay of a slow answer, and that of a stalled one, which exceeds the client's time-out."""


def fault_of(config: ScenesConfig, index: int) -> str:
    """What the server does with a URL, one of `config.faults`; empty: it serves what is published."""
    left = Draws(index, "fault").unit()
    for name, rate in config.faults:
        left -= rate
        if left < 0:
            return name
    return ""


def published(config: ScenesConfig, index: int) -> bytes:
    """The bytes whose SHA-256 is in the URL table."""
    fault = fault_of(config, index)
    if fault == "oversize":
        return _oversize()
    whole = jpeg(config, index)
    return whole[: len(whole) // 3] if fault == "truncated" else whole


@functools.cache
def _oversize() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (OVERSIZE_SIDE, OVERSIZE_SIDE), (90, 120, 160)).save(buffer, "JPEG", quality=40)
    return buffer.getvalue()


_CHUNK = 1_000
_SCHEMA = pa.schema(
    [(name, pa.string()) for name in ("uid", "url", "caption", "sha256")]
    + [(name, pa.int32()) for name in ("original_width", "original_height")]
)


def write_url_table(config: ScenesConfig, base: str, path: str | Path) -> None:
    """Write the table of all `config.pairs` training pairs as parquet; row k is scene k.

    Columns: `uid` (32 hex digits, independent of the address), `url`, `caption` (web style), `sha256` of the bytes as
    published (so it is wrong for a URL with the wrong-hash fault), `original_width` and `original_height` in pixels.
    URLs begin with `base`, that of the server. Two processes render the images.
    """
    pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    with pool, replacing(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer:
        for columns in pool.map(functools.partial(_rows, config, base), range(0, config.pairs, _CHUNK)):
            writer.write_table(pa.table(columns, schema=_SCHEMA))


def url(base: str, index: int) -> str:
    """The URL of a scene's image."""
    return f"{base}/scenes/0/{index}.jpg"


def _rows(config: ScenesConfig, base: str, start: int) -> dict[str, list]:
    indices = range(start, min(start + _CHUNK, config.pairs))
    sides = [OVERSIZE_SIDE if fault_of(config, index) == "oversize" else config.image_size for index in indices]
    return {
        "uid": [hashlib.sha256(f"scenes/0/{index}".encode()).hexdigest()[:32] for index in indices],
        "url": [url(base, index) for index in indices],
        "caption": [web(index) for index in indices],
        "sha256": [hashlib.sha256(published(config, index)).hexdigest() for index in indices],
        "original_width": sides,
        "original_height": sides,
    }


def corpus_digest(config: ScenesConfig, *further: Path) -> str:
    """SHA-256, 64 hex digits, of the settings, the source files that make the corpus, and the files in `further`.

    Equal digests mean the same images, captions and faults, up to the versions of numpy and Pillow.
    """
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), *further):
        digest.update(f"\n{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


_HOST = "127.0.0.1"


@contextmanager
def serve_scenes(config: ScenesConfig, *, port: int = 0) -> Iterator[str]:
    """Run the server in its own process while the block runs.

    Args:
        config: The corpus.
        port: The port to listen on; 0 picks a free one. With a fixed port, the URLs of an earlier table keep working.

    Yields:
        The base URL, `http://127.0.0.1:<port>`; image URLs are `url(base, index)`.

    Raises:
        UserError: The port cannot be used.
    """
    try:
        listener = socket.create_server((_HOST, port), backlog=1024)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"{_HOST}:{port} cannot be used: {reason}. Use port 0 for a free one.") from error
    with listener:
        port = listener.getsockname()[1]
        process = get_context("spawn").Process(target=_serve, args=(config, listener), daemon=True)
        process.start()
    try:
        yield f"http://{_HOST}:{port}"
    finally:
        process.kill()
        process.join()


def _serve(config: ScenesConfig, listener: socket.socket) -> None:
    """Serve until the process that started this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    _Handler.config = config
    server = _Server(listener.getsockname(), _Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, daemon=True).start()
    parent = parent_process()
    assert parent is not None
    parent.join()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the client has disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept alive
    disable_nagle_algorithm = True
    config: ScenesConfig
    asked: ClassVar[set[int]] = set()
    """The transient URLs requested so far."""

    def do_GET(self) -> None:
        config = self.config
        match = re.fullmatch(r"/scenes/0/([0-9]{1,9})\.jpg", self.path)
        index = int(match[1]) if match else 0
        fault = fault_of(config, index) if match else "not_found"
        status, body, headers = 200, b"", {"Cache-Control": "no-store"}
        if fault == "disconnect":
            self.close_connection = True
            return
        if fault in ("not_found", "forbidden", "gone"):
            status = {"not_found": 404, "forbidden": 403, "gone": 410}[fault]
        elif fault == "transient" and index not in self.asked:
            self.asked.add(index)
            status, headers["Retry-After"] = 503, "0"
        else:
            time.sleep({"stall": STALL, "slow": SLOW * Draws(index, "delay").unit()}.get(fault, 0))
            if fault == "html":
                body = b"<!doctype html><title>Moved</title><p>This picture is no longer available.</p>\n"
            else:
                body = jpeg(config, index + 1) if fault == "wrong_hash" else published(config, index)
            headers["Content-Type"] = "text/html" if fault == "html" else "image/jpeg"
            if fault == "noai":
                headers["X-Robots-Tag"] = "noai, noimageai"
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection |= fault == "incomplete"
        self.wfile.write(body[: len(body) // 2] if fault == "incomplete" else body)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""
