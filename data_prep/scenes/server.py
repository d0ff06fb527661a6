"""A small web server on 127.0.0.1 that serves the corpus with the failures of the real web.

`GET /scenes/<seed>/<index>.jpg` renders the scene on request, with the fault that `published` has for it. The server
runs in its own process and exits with its parent.
"""

from __future__ import annotations

import json
import re
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any

from data_prep.scenes.published import Fault, fault_of, served
from data_prep.scenes.scene import Draws, ScenesConfig
from pipeline.errors import UserError

HOST = "127.0.0.1"
SERVE_STDIN = "--serve-stdin"
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
    process = subprocess.Popen(
        [sys.executable, "-m", "data_prep.scenes", SERVE_STDIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps({"port": port, "config": asdict(config)}) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer.startswith("http"):
            reason = answer.strip() or f"exit code {process.wait()}"
            raise UserError(f"The scenes server could not start on {HOST}:{port}: {reason}. Use port 0 for a free one.")
        yield answer.strip()
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()  # the server exits when its standard input is closed
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


class SceneServer(socketserver.ThreadingTCPServer):
    """A thread for each connection; its only state is the transient URLs requested so far."""

    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024

    def __init__(self, config: ScenesConfig, port: int) -> None:
        super().__init__((HOST, port), _Handler)
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
        found = re.fullmatch(rf"/scenes/{config.seed}/([0-9]{{1,9}})\.jpg", self.path)
        index = int(found[1]) if found else 0
        fault = fault_of(config, index) if found else Fault.NOT_FOUND
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
