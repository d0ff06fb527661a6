"""A small web server on 127.0.0.1 that serves the corpus with the failures of the real web.

`GET /scenes/<seed>/<index>.jpg` renders the scene on request, with the fault that `published` has for it. The server
runs in its own process, exits with its parent, and reports request counts under `/stats`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

from data_prep.scenes.published import Fault, fault_of, served
from data_prep.scenes.scene import Draws, ScenesConfig
from pipeline.config import to_tree
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
        process.stdin.write(json.dumps({"port": port, "config": to_tree(config)}) + "\n")
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


class SceneServer:
    """Answers requests on one event loop; its only state is the transient URLs requested so far, and counts."""

    def __init__(self, config: ScenesConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._asked: set[int] = set()

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until the client closes it or asks to (HTTP/1.1 keep-alive)."""
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                keep = b"connection: close" not in request.lower()
                answer = await self.answer(request.split(b"\r\n", 1)[0].decode("latin-1"))
                if answer is None:
                    break
                head, body = answer
                connection = "keep-alive" if keep else "close"
                writer.write(f"{head}Connection: {connection}\r\n\r\n".encode() + body)
                await writer.drain()
                if not keep or len(body) != int(head.split("Content-Length: ")[1].split("\r\n")[0]):
                    break
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError, ConnectionError):
            pass  # the client disconnected or does not speak HTTP, or the server is stopping
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def answer(self, line: str) -> tuple[str, bytes] | None:
        """Head (without the final blank line) and body for a request line; None closes without an answer."""
        self.counts["requests"] += 1
        parts = line.split(" ")
        path = parts[1] if len(parts) == 3 and parts[0] == "GET" else ""
        if path == "/stats":
            return _head(HTTPStatus.OK, body := json.dumps(self.counts).encode(), kind="application/json"), body
        index = self._index(path)
        if index is None:
            return _error(HTTPStatus.NOT_FOUND)
        fault = fault_of(self.config, index)
        self.counts[fault.value] += 1
        return await self._scene(index, fault)

    def _index(self, path: str) -> int | None:
        prefix, _, name = path.rpartition("/")
        stem, _, suffix = name.partition(".")
        good = prefix == f"/scenes/{self.config.seed}" and suffix == "jpg" and stem.isascii() and stem.isdigit()
        return int(stem) if good else None

    async def _scene(self, index: int, fault: Fault) -> tuple[str, bytes] | None:
        if fault in _STATUS:
            return _error(_STATUS[fault])
        if fault is Fault.DISCONNECT:
            return None
        if fault is Fault.TRANSIENT and index not in self._asked:
            self._asked.add(index)
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "Retry-After: 0\r\n")
        if fault is Fault.STALL:
            await asyncio.sleep(self.config.stall_seconds)
        if fault is Fault.SLOW:
            await asyncio.sleep(self.config.slow_seconds * Draws(self.config.seed, index, "delay").unit())
        body = served(self.config, index)
        kind = "text/html" if fault is Fault.HTML else "image/jpeg"
        extra = "X-Robots-Tag: noai, noimageai\r\n" if fault is Fault.NOAI else ""
        head = _head(HTTPStatus.OK, body, kind=kind, extra=extra)
        return head, body[: len(body) // 2] if fault is Fault.INCOMPLETE else body


def _head(status: HTTPStatus, body: bytes, *, kind: str = "text/plain", extra: str = "") -> str:
    return (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"Cache-Control: no-store\r\n{extra}"
    )


def _error(status: HTTPStatus, extra: str = "") -> tuple[str, bytes]:
    body = f"{status.value} {status.phrase}\n".encode()
    return _head(status, body, extra=extra), body
