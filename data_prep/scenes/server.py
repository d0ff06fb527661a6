"""What the corpus publishes, and a small web server on 127.0.0.1 that serves it with the failures of the real web.

The fault of a URL is a pure function of (config, index), so that the expected failures can be counted. The table of
URLs is like the metadata of CC3M or DataComp. `GET /scenes/<seed>/<index>.jpg` renders the scene on request; the server
runs in its own process and exits with its parent.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import io
import json
import os
import re
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from data_prep.scenes.caption import web
from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import Draws, ScenesConfig
from pipeline.errors import UserError
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
    if fault is Fault.OVERSIZE:
        return _oversize()
    whole = jpeg(config, index)
    return whole[: len(whole) // 3] if fault is Fault.TRUNCATED else whole


def served(config: ScenesConfig, index: int) -> bytes:
    """The body that the server sends when it answers with 200."""
    fault = fault_of(config, index)
    if fault is Fault.WRONG_HASH:
        return jpeg(config, index + 1)
    if fault is Fault.HTML:
        return b"<!doctype html><title>Moved</title><p>This picture is no longer available.</p>\n"
    return published(config, index)


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


def write_url_table(config: ScenesConfig, base: str, path: str | Path, *, processes: int = 1) -> None:
    """Write the table of all `config.pairs` training pairs as parquet; row k is scene k.

    Columns: `uid` (32 hex digits, independent of the address), `url`, `caption` (web style), `sha256` of the bytes as
    published (so it is wrong for a URL with the wrong-hash fault), `original_width` and `original_height` in pixels.
    URLs begin with `base`, that of the server; `processes` processes render the images.
    """
    rows, starts = functools.partial(_rows, config, base), range(0, config.pairs, _CHUNK)
    with replacing(path) as temporary, pq.ParquetWriter(temporary, _SCHEMA) as writer, ExitStack() as stack:
        each: Callable[..., Iterable[dict[str, list]]] = map
        if processes > 1:
            each = stack.enter_context(ProcessPoolExecutor(processes, mp_context=get_context("spawn"))).map
        for columns in each(rows, starts):
            writer.write_table(pa.table(columns, schema=_SCHEMA))


def url(base: str, config: ScenesConfig, index: int) -> str:
    """The URL of a scene's image."""
    return f"{base}/scenes/{config.seed}/{index}.jpg"


def uid(config: ScenesConfig, index: int) -> str:
    """The permanent id of a sample: 32 hex digits."""
    return hashlib.sha256(f"scenes/{config.seed}/{index}".encode()).hexdigest()[:32]


def _rows(config: ScenesConfig, base: str, start: int) -> dict[str, list]:
    indices = range(start, min(start + _CHUNK, config.pairs))
    sides = [OVERSIZE_SIDE if fault_of(config, index) is Fault.OVERSIZE else config.image_size for index in indices]
    return {
        "uid": [uid(config, index) for index in indices],
        "url": [url(base, config, index) for index in indices],
        "caption": [web(config, index) for index in indices],
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
_STATUS = {
    Fault.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Fault.FORBIDDEN: HTTPStatus.FORBIDDEN,
    Fault.GONE: HTTPStatus.GONE,
}


@contextmanager
def serve_scenes(config: ScenesConfig, *, port: int = 0) -> Iterator[str]:
    """Run the server in its own process while the block runs.

    Args:
        config: The corpus.
        port: The port to listen on; 0 picks a free one. With a fixed port, the URLs of an earlier table keep working.

    Yields:
        The base URL, `http://127.0.0.1:<port>`; image URLs are `url(base, config, index)`.

    Raises:
        UserError: The server cannot start, for example because the port is in use.
    """
    context = get_context("spawn")
    connection, other = context.Pipe()
    process = context.Process(target=_serve, args=(config, port, other), daemon=True)
    process.start()
    other.close()
    try:
        try:
            listening, reason = connection.recv()
        except EOFError:
            process.join()
            listening, reason = port, f"exit code {process.exitcode}"
        if reason:
            raise UserError(
                f"The scenes server could not start on {_HOST}:{port}: {reason}. Use port 0 for a free one."
            )
        yield f"http://{_HOST}:{listening}"
    finally:
        connection.close()
        process.join(timeout=5)
        process.kill()


def _serve(config: ScenesConfig, port: int, connection: Any) -> None:
    """Serve until the other end of the connection is closed, as when its process was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when to stop
    try:
        server = SceneServer(config, port)
    except OSError as error:
        return connection.send((port, os.strerror(error.errno or 0)))
    connection.send((server.server_address[1], ""))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with suppress(EOFError, ConnectionError):
        connection.recv()
    return None


class SceneServer(socketserver.ThreadingTCPServer):
    """A thread for each connection; its only state is the transient URLs requested so far."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, config: ScenesConfig, port: int) -> None:
        super().__init__((_HOST, port), _Handler)
        self.config = config
        self.asked: set[int] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless the client has disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept alive
    disable_nagle_algorithm = True
    server: SceneServer

    def do_GET(self) -> None:
        config = self.server.config
        match = re.fullmatch(rf"/scenes/{config.seed}/([0-9]{{1,9}})\.jpg", self.path)
        index = int(match[1]) if match else 0
        fault = fault_of(config, index) if match else Fault.NOT_FOUND
        if fault in _STATUS:
            return self._answer(_STATUS[fault])
        if fault is Fault.DISCONNECT:
            self.close_connection = True
            return None
        if fault is Fault.TRANSIENT and index not in self.server.asked:
            self.server.asked.add(index)
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "0"})
        if fault is Fault.STALL:
            time.sleep(config.stall_seconds)
        if fault is Fault.SLOW:
            time.sleep(config.slow_seconds * Draws(config.seed, index, "delay").unit())
        headers = {"Content-Type": "text/html" if fault is Fault.HTML else "image/jpeg"}
        if fault is Fault.NOAI:
            headers["X-Robots-Tag"] = "noai, noimageai"
        return self._answer(HTTPStatus.OK, served(config, index), headers=headers, cut=fault is Fault.INCOMPLETE)

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", *, headers: Mapping[str, str] | None = None, cut: bool = False
    ) -> None:
        """Answer with `body`; with `cut` the connection closes half-way."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body)), "Cache-Control": "no-store"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection |= cut

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""
