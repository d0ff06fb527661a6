"""The HTTP side of the playground: one page, a few JSON routes, and the gallery's thumbnails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.playground.explorer import Explorer

PAGE = Path(__file__).with_name("page.html")
LARGEST_UPLOAD = 20 << 20
LARGEST_REQUEST = 1 << 20
MOST_RESULTS = 60
MOST_CLIENTS = 32
"""Connections at a time."""
MOST_SECONDS = 60.0
"""To receive a request: a client that is slower would keep its connection from others."""
IMAGES, JSON, ANY = ("image/", "application/octet-stream"), ("application/json",), ("",)
"""Beginnings of the content types of requests."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; connect-src 'self'; style-src "
    "'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class Refused(UserError):
    """A request that is not answered, with its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def make_app(explorer: Explorer, *, title: str, local: bool) -> Any:
    """The Starlette application.

    With `local`, it serves requests for this machine's own name only, so that other web pages cannot reach the server
    by a name of their own that resolves to it. Requests of other pages are refused; the others are computed one at a
    time, and not at all where the client is gone. `title` is what the page calls the model.

    Raises:
        UserError: Starlette is not installed.
    """
    try:
        from anyio import from_thread
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise UserError(
            f"The playground needs the extra `playground` ({error.name} is missing): "
            "pip install -c constraints.txt -e '.[playground]'"
        ) from error

    one_at_a_time = asyncio.Lock()

    async def compute(request: Request) -> Response:
        action = ACTIONS[request.url.path]
        limit, kinds = (LARGEST_UPLOAD, IMAGES) if action is _upload else (LARGEST_REQUEST, JSON)
        _check_sender(request.headers, kinds)
        body = await _body(request, limit)
        asked = body if action is _upload else _json(body)
        async with one_at_a_time:
            if await request.is_disconnected():
                raise ClientDisconnect
            is_gone = partial(from_thread.run, request.is_disconnected)
            return JSONResponse(await run_in_threadpool(action, explorer, asked, is_gone), headers=HEADERS)

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status if isinstance(error, Refused) else 400
        late = {"Connection": "close"} if status == 408 else {}  # else what comes of its body is read, and not kept
        return JSONResponse({"error": str(error)}, status_code=status, headers=HEADERS | late)

    async def page(request: Request) -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=HEADERS)

    async def info(request: Request) -> Response:
        _check_sender(request.headers, ANY)
        return JSONResponse(_info(explorer, title), headers=HEADERS)

    async def thumbnail(request: Request) -> Response:
        number = explorer.gallery_number(request.path_params["number"])
        if number is None:
            raise Refused(404, "There is no such image.")
        cached = {**HEADERS, "Cache-Control": "private, max-age=3600"}
        return Response(explorer.thumbnails[number], media_type="image/jpeg", headers=cached)

    routes = [Route("/", page), Route("/api/info", info), Route("/image/{number}", thumbnail)]
    routes += [Route(path, compute, methods=["POST"]) for path in ACTIONS]
    hosts = [*LOOPBACK, "[::1]"] if local else ["*"]
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return Starlette(
        routes=routes, middleware=[trusted], exception_handlers={UserError: refuse, ClientDisconnect: refuse}
    )


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


def serve(app: Any, listening: socket.socket) -> None:
    """Serve until interrupted."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, limit_concurrency=MOST_CLIENTS
    )
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        return


def _check_sender(headers: Any, kinds: tuple[str, ...]) -> None:
    """Refuse requests of other web pages: their origin is another, or a form or a script could send them unasked.

    Raises:
        Refused: The origin is not this server's, or the content is not of one of these kinds.
    """
    origin, kind = headers.get("origin"), headers.get("content-type", "").partition(";")[0].strip().lower()
    if origin is not None and origin.lower().partition("://")[2] != headers.get("host", "").lower():
        raise Refused(403, f"Requests of other web pages are refused (Origin: {origin[:100]}).")
    if not kind.startswith(kinds):
        raise Refused(415, f"The content type is {kind[:100] or 'missing'}: send {' or '.join(kinds)}.")


async def _body(request: Any, limit: int) -> bytes:
    """The request's body; reading stops as soon as it is too large or takes too long.

    Raises:
        Refused: It is or does.
    """
    body, length = bytearray(), int(request.headers.get("content-length") or 0)
    try:
        async with asyncio.timeout(MOST_SECONDS):
            stream = request.stream()
            while max(length, len(body)) <= limit:
                body += await anext(stream)
            raise Refused(413, f"The file has more than {limit >> 20} MiB: make it smaller.")
    except StopAsyncIteration:
        return bytes(body)
    except TimeoutError as error:
        raise Refused(408, f"The request did not arrive within {MOST_SECONDS:g} s.") from error


def _info(explorer: Explorer, title: str) -> dict[str, Any]:
    model = explorer.model
    return {
        "title": title,
        "architecture": model.architecture.name,
        "imageSize": model.image_size,
        "temperature": 1 / explorer.scale,
        "images": len(explorer.names),
        "captions": len(explorer.captions),
        "ideas": [caption for caption in explorer.image_captions if caption][:3],
        "classSets": [asdict(each) for each in explorer.class_sets],
    }


def _search(explorer: Explorer, asked: dict[str, Any], is_gone: Callable[[], bool]) -> Any:
    if not explorer.names:
        raise UserError("There are no images to search: start with --images FOLDER.")
    text, count = asked.get("text", ""), _count(asked)
    return {"results": explorer.some_images(count=count) if text is None else explorer.search(text, count=count)}


def _upload(explorer: Explorer, body: bytes, is_gone: Callable[[], bool]) -> Any:
    if not body:
        raise UserError("The file is empty.")
    return {"image": explorer.add_upload(body)}


def _classify(explorer: Explorer, asked: dict[str, Any], is_gone: Callable[[], bool]) -> Any:
    classes, templates = asked.get("classes"), asked.get("templates")
    if not isinstance(classes, list) or not isinstance(templates, list):
        raise UserError("classes and templates must be lists of texts.")
    return {"results": explorer.classify(str(asked.get("image", "")), classes, templates, is_gone=is_gone)}


def _captions(explorer: Explorer, asked: dict[str, Any], is_gone: Callable[[], bool]) -> Any:
    if not explorer.captions:
        raise UserError("There are no captions: start with --captions FILE, or --images with a folder of shards.")
    return {"results": explorer.nearest_captions(str(asked.get("image", "")), count=_count(asked))}


ACTIONS: dict[str, Callable[[Explorer, Any, Callable[[], bool]], Any]] = {
    "/api/search": _search,
    "/api/image": _upload,
    "/api/classify": _classify,
    "/api/captions": _captions,
}


def _json(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character, such as "\ud800"
        raise UserError("The request has text that is not Unicode.") from error
    except (ValueError, RecursionError) as error:
        raise UserError("The request is not JSON.") from error
    if not isinstance(parsed, dict):
        raise UserError("The request must be a JSON object.")
    return parsed


def _count(asked: dict[str, Any]) -> int:
    count = asked.get("count", 12)
    if type(count) is not int or not 1 <= count <= MOST_RESULTS:
        raise UserError(f"count must be a number from 1 to {MOST_RESULTS}.")
    return count
