"""A small web server for ingestion tests, whose responses are functions by path, and images to serve."""

import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from PIL import Image

from tests.images import encoded

Answer = Callable[[BaseHTTPRequestHandler], None]


class Site:
    """A web server on 127.0.0.1 whose responses are functions by path."""

    def __init__(self):
        self.answers: dict[str, Answer] = {}
        self.fallback: Answer = lambda handler: send(handler, 404, b"")
        self.agents: list[str] = []
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                site.agents.append(self.headers["User-Agent"])
                with suppress(BrokenPipeError, ConnectionResetError):
                    site.answers.get(self.path, site.fallback)(self)

            do_HEAD = do_POST = do_PUT = do_GET

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 256  # of connections that wait to be accepted; with the usual 5 some wait for seconds

        self.server = Server(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def image(self, path, body, **headers):
        self.answers[path] = lambda handler: send(handler, 200, body, **headers)
        return self.base + path

    def redirect(self, path, to):
        self.answers[path] = lambda handler: send(handler, 302, b"", Location=to)
        return self.base + path


def send(handler, status, body, **headers):
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


@contextmanager
def serve():
    """Run a site for the duration of the `with` block."""
    site = Site()
    try:
        yield site
    finally:
        site.server.shutdown()
        site.server.server_close()


def picture(side=40):
    pixels = np.random.default_rng(side).integers(0, 255, (side, side, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def jpeg(side=40, **options):
    return encoded(picture(side), "JPEG", **options)
