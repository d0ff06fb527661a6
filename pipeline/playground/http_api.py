"""The HTTP side of the playground: one page, three JSON routes, and the gallery's thumbnails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import uvicorn
from anyio import from_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.errors import UserError
from pipeline.playground.explorer import Explorer

PAGE = Path(__file__).with_name("page.html")
MOST_CLIENTS = 32
"""Connections at a time."""
HEADER_SECONDS, MOST_SECONDS = 5, 60.0
"""To receive a request's headers and its body: a client that is slower would keep its connection from others."""
REQUESTS = {
    "/api/search": (1 << 20, ("application/json",)),
    "/api/classify": (1 << 20, ("application/json",)),
    "/api/image": (20 << 20, ("image/", "application/octet-stream")),
}
"""Path -> the largest request in bytes, and beginnings of its content types."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; connect-src 'self'; style-src "
    "'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def make_app(explorer: Explorer, *, local: bool) -> Starlette:
    """The application, which computes one request at a time, and none whose client is gone.

    With `local`, it serves requests for this machine's own name only, so that other web pages cannot reach the server
    by a name of their own that resolves to it.
    """
    one_at_a_time = asyncio.Lock()

    async def compute(request: Request) -> Response:
        limit, kinds = REQUESTS[request.url.path]
        # Other web pages have another origin, or a form or a script of theirs could send such a request unasked.
        host, kind = (request.headers.get(name, "").lower() for name in ("host", "content-type"))
        origin = request.headers.get("origin", f"://{host}")
        if origin.lower().partition("://")[2] != host:
            raise HTTPException(403, f"Requests of other web pages are refused (Origin: {origin[:100]}).")
        if not kind.strip().startswith(kinds):
            raise HTTPException(415, f"The content type is {kind[:100] or 'missing'}: send {' or '.join(kinds)}.")
        body = await _body(request, limit)
        async with one_at_a_time:
            if await request.is_disconnected():
                raise ClientDisconnect
            is_gone = partial(from_thread.run, request.is_disconnected)
            answer = await run_in_threadpool(_answer, explorer, request.url.path, body, is_gone)
            return JSONResponse(answer, headers=HEADERS)

    async def refuse(_: Request, error: Exception) -> Response:
        status, message = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
        headers = HEADERS | (getattr(error, "headers", None) or {})
        return JSONResponse({"error": message}, status_code=status, headers=headers)

    async def page(_: Request) -> Response:
        architecture, model = explorer.model.architecture, explorer.model
        facts = (architecture.name, f"{model.image_size} px", f"temperature {1 / explorer.scale:.2g}")
        html = jinja2.Template(PAGE.read_text(encoding="utf-8"), autoescape=True)
        title = "/".join(Path(model.source).parts[-3:])  # of a run RUN/checkpoints/STEP; others may see the page
        return HTMLResponse(html.render(title=title, facts=facts, images=len(explorer.names)), headers=HEADERS)

    async def thumbnail(request: Request) -> Response:
        number = explorer.gallery_number(request.path_params["number"])
        if number is None:
            raise HTTPException(404, "There is no such image.")
        cached = {**HEADERS, "Cache-Control": "private, max-age=3600"}
        return Response(explorer.thumbnails[number], media_type="image/jpeg", headers=cached)

    routes = [Route("/", page), Route("/image/{number}", thumbnail)]
    routes += [Route(path, compute, methods=["POST"]) for path in REQUESTS]
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=[*LOOPBACK, "[::1]"] if local else ["*"])
    handlers: Any = dict.fromkeys((UserError, HTTPException, ClientDisconnect), refuse)
    return Starlette(routes=routes, middleware=[trusted], exception_handlers=handlers)


def listen(host: str, port: int) -> socket.socket:
    """Bind the address before the model is loaded.

    Raises:
        UserError: The port is in use, or the host is not an address of this machine.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{host}:{port} cannot be listened on ({reason}): choose another --port or --host.") from error


class Connection(H11Protocol):
    """Is closed when a request's headers have not arrived within `HEADER_SECONDS`; uvicorn waits for their first byte
    only, and only between two requests."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.timeout_keep_alive = HEADER_SECONDS
        self.timeout_keep_alive_task = self.loop.call_later(HEADER_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        self.conn.receive_data(data)
        self.handle_events()  # ends the waiting when it has a request


def make_server(app: Starlette) -> uvicorn.Server:
    """The server of the application."""
    settings: Any = {"http": Connection, "limit_concurrency": MOST_CLIENTS, "timeout_graceful_shutdown": 2}
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, **settings))


def serve(app: Starlette, listening: socket.socket) -> None:
    """Serve until interrupted."""
    try:
        make_server(app).run(sockets=[listening])
    except KeyboardInterrupt:
        return


async def _body(request: Request, limit: int) -> bytes:
    """The request's body; reading stops as soon as it is too large or takes too long."""
    body, length = bytearray(), int(request.headers.get("content-length") or 0)
    try:
        async with asyncio.timeout(MOST_SECONDS):
            async for part in request.stream():
                body += part
                if max(length, len(body)) > limit:
                    raise HTTPException(413, f"The file has more than {limit >> 20} MiB: make it smaller.")
    except TimeoutError as error:
        closing = {"Connection": "close"}  # otherwise what comes of the body is read, and not kept
        raise HTTPException(408, f"The request did not arrive within {MOST_SECONDS:g} s.", closing) from error
    return bytes(body)


def _answer(explorer: Explorer, path: str, body: bytes, is_gone: Callable[[], bool]) -> Any:
    if path == "/api/image":
        return explorer.add_upload(body)
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()  # half a character, such as "\ud800", is refused
    except (ValueError, RecursionError) as error:
        raise UserError("The request is not JSON in Unicode.") from error
    if not isinstance(asked, dict):
        raise UserError("The request must be a JSON object.")
    image = asked.get("image")
    if path == "/api/search":
        return explorer.search(text=asked.get("text"), image=None if image is None else str(image))
    lines: Any = asked.get("classes"), asked.get("templates")
    return explorer.classify(str(image), *lines, is_gone=is_gone)
