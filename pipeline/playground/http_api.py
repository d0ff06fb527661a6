"""The HTTP side of the playground: one page, a few JSON routes, and the gallery's thumbnails."""

from __future__ import annotations

import json
import socket
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
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src 'self' blob: data:; connect-src 'self'; style-src "
    "'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class TooLarge(UserError):
    """A request has more bytes than are allowed."""


def make_app(explorer: Explorer, *, title: str, local: bool) -> Any:
    """The Starlette application.

    With `local`, it serves requests for this machine's own name only, so that other web pages cannot reach the server
    by a name of their own that resolves to it. `title` is what the page calls the model.

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

    def answered(action: Callable[[bytes], Any], limit: int) -> Callable[[Request], Awaitable[Response]]:
        """A route that runs `action` on the request's body in a thread."""

        async def route(request: Request) -> Response:
            try:
                body = await _body(request, limit)
                return JSONResponse(await run_in_threadpool(action, body), headers=HEADERS)
            except UserError as error:
                status = 413 if isinstance(error, TooLarge) else 400
                return JSONResponse({"error": str(error)}, status_code=status, headers=HEADERS)
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
    routes.append(Route("/api/info", answered(lambda body: _info(explorer, title), LARGEST_REQUEST)))
    routes += [Route(path, answered(*action), methods=["POST"]) for path, action in actions.items()]
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

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        return


async def _body(request: Any, limit: int) -> bytes:
    """The request's body; reading stops as soon as it is too large."""
    message = f"The file has more than {limit >> 20} MiB: make it smaller."
    if int(request.headers.get("content-length") or 0) > limit:
        raise TooLarge(message)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise TooLarge(message)
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


def _search(explorer: Explorer, body: bytes) -> Any:
    if not explorer.names:
        raise UserError("There are no images to search: start with --images FOLDER.")
    asked = _json(body)
    if asked.get("text", "") is None:
        return {"results": explorer.some_images(count=_count(asked))}
    return {"results": explorer.search(asked.get("text", ""), count=_count(asked))}


def _upload(explorer: Explorer, body: bytes) -> Any:
    if not body:
        raise UserError("The file is empty.")
    return {"image": explorer.add_upload(body)}


def _classify(explorer: Explorer, body: bytes) -> Any:
    asked = _json(body)
    classes, templates = asked.get("classes"), asked.get("templates")
    if not isinstance(classes, list) or not isinstance(templates, list):
        raise UserError("classes and templates must be lists of texts.")
    return {"results": explorer.classify(str(asked.get("image", "")), classes, templates)}


def _captions(explorer: Explorer, body: bytes) -> Any:
    if not explorer.captions:
        raise UserError("There are no captions: start with --captions FILE, or --images with a folder of shards.")
    asked = _json(body)
    return {"results": explorer.nearest_captions(str(asked.get("image", "")), count=_count(asked))}


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character, such as "\ud800"
        raise UserError("The request has text that is not Unicode.") from error
    except (ValueError, RecursionError) as error:
        raise UserError("The request is not JSON.") from error
    if not isinstance(found, dict):
        raise UserError("The request must be a JSON object.")
    return found


def _count(asked: dict[str, Any]) -> int:
    count = asked.get("count", 12)
    if type(count) is not int or not 1 <= count <= MOST_RESULTS:
        raise UserError(f"count must be a number from 1 to {MOST_RESULTS}.")
    return count
