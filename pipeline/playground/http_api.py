"""The HTTP side of the playground: one page, a few JSON routes, and the gallery's thumbnails."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
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

    def answered(
        action: Callable[[bytes, threading.Event], Any], limit: int, kinds: tuple[str, ...] = ()
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route that runs `action` on the request's body in a thread; the event is set when the client is gone."""

        async def route(request: Request) -> Response:
            gone = threading.Event()

            async def watch() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                gone.set()

            try:
                _check_sender(request.headers, kinds)
                async with asyncio.timeout(MOST_SECONDS):
                    body = await _body(request, limit)
                watching = asyncio.create_task(watch())
                try:
                    async with one_at_a_time:
                        answer = await run_in_threadpool(action, body, gone)
                finally:
                    watching.cancel()
                return JSONResponse(answer, headers=HEADERS)
            except UserError as error:
                status = error.status if isinstance(error, Refused) else 400
                return JSONResponse({"error": str(error)}, status_code=status, headers=HEADERS)
            except TimeoutError:
                message = f"The request did not arrive within {MOST_SECONDS:g} s."
                return JSONResponse({"error": message}, status_code=408, headers={**HEADERS, "Connection": "close"})
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it

        return route

    async def page(request: Request) -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html; charset=utf-8", headers=HEADERS)

    async def thumbnail(request: Request) -> Response:
        number = explorer.gallery_number(request.path_params["number"])
        if number is None:
            return JSONResponse({"error": "There is no such image."}, status_code=404, headers=HEADERS)
        cached = {**HEADERS, "Cache-Control": "private, max-age=3600"}
        return Response(explorer.thumbnails[number], media_type="image/jpeg", headers=cached)

    actions = {
        "/api/search": (partial(_search, explorer), LARGEST_REQUEST),
        "/api/image": (partial(_upload, explorer), LARGEST_UPLOAD),
        "/api/classify": (partial(_classify, explorer), LARGEST_REQUEST),
        "/api/captions": (partial(_captions, explorer), LARGEST_REQUEST),
    }
    routes = [Route("/", page), Route("/image/{number}", thumbnail)]
    routes.append(Route("/api/info", answered(lambda body, gone: _info(explorer, title), LARGEST_REQUEST)))
    for path, (action, limit) in actions.items():
        kinds = ("image/", "application/octet-stream") if path == "/api/image" else ("application/json",)
        routes.append(Route(path, answered(action, limit, kinds), methods=["POST"]))
    hosts = [*LOOPBACK, "[::1]"] if local else ["*"]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


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
    if kinds and not kind.startswith(kinds):
        raise Refused(415, f"The content type is {kind[:100] or 'missing'}: send {' or '.join(kinds)}.")


async def _body(request: Any, limit: int) -> bytes:
    """The request's body; reading stops as soon as it is too large."""
    message = f"The file has more than {limit >> 20} MiB: make it smaller."
    if int(request.headers.get("content-length") or 0) > limit:
        raise Refused(413, message)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise Refused(413, message)
    return bytes(body)


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


def _search(explorer: Explorer, body: bytes, gone: threading.Event) -> Any:
    if not explorer.names:
        raise UserError("There are no images to search: start with --images FOLDER.")
    asked = _json(body)
    if asked.get("text", "") is None:
        return {"results": explorer.some_images(count=_count(asked))}
    return {"results": explorer.search(asked.get("text", ""), count=_count(asked))}


def _upload(explorer: Explorer, body: bytes, gone: threading.Event) -> Any:
    if not body:
        raise UserError("The file is empty.")
    if gone.is_set():
        raise UserError("The client is gone.")
    return {"image": explorer.add_upload(body)}


def _classify(explorer: Explorer, body: bytes, gone: threading.Event) -> Any:
    asked = _json(body)
    classes, templates = asked.get("classes"), asked.get("templates")
    if not isinstance(classes, list) or not isinstance(templates, list):
        raise UserError("classes and templates must be lists of texts.")
    return {"results": explorer.classify(str(asked.get("image", "")), classes, templates, gone=gone)}


def _captions(explorer: Explorer, body: bytes, gone: threading.Event) -> Any:
    if not explorer.captions:
        raise UserError("There are no captions: start with --captions FILE, or --images with a folder of shards.")
    asked = _json(body)
    return {"results": explorer.nearest_captions(str(asked.get("image", "")), count=_count(asked))}


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
