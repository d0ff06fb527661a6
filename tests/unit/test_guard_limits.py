"""The guard's limits: bytes, pixels, seconds, connections, and pauses between requests."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest

from data_prep import reasons
from data_prep.fetching import opener as opener_module
from data_prep.fetching.opener import retry_after
from data_prep.reasons import FetchError
from tests.guarded import opener, refusal, site  # noqa: F401
from tests.web import Site, jpeg, send


def test_the_body_of_a_redirect_is_not_read(site: Site) -> None:
    sent = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", site.base + "/image")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(bytes(1 << 16))
            sent.append(1)
            time.sleep(0.03)

    site.answers["/a"] = endless
    site.image("/image", jpeg())
    assert opener(total=1).open(site.base + "/a").read() == jpeg()
    assert len(sent) < 100, "the connection must be closed instead"


def test_sizes_are_bounded(site: Site) -> None:
    body = jpeg(side=64)
    url = site.image("/a", body)
    assert refusal(opener(max_bytes=len(body) - 1), url) == reasons.TOO_MANY_BYTES
    assert refusal(opener(max_pixels=64 * 64 - 1), url) == reasons.TOO_MANY_PIXELS
    assert opener(max_bytes=len(body), max_pixels=64 * 64).open(url).read() == body

    def unannounced(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    site.answers["/b"] = unannounced
    assert refusal(opener(max_bytes=len(body) - 1), site.base + "/b") == reasons.TOO_MANY_BYTES


def test_slow_body_times_out(site: Site) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b"\xff")
            time.sleep(0.05)

    site.answers["/a"] = drip
    started = time.monotonic()
    assert refusal(opener(total=0.3), site.base + "/a") == reasons.TIMEOUT
    assert time.monotonic() - started < 2


def test_slow_headers_and_slow_redirects_time_out(site: Site) -> None:
    def headers(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
        for _ in range(100):
            handler.wfile.write(b"x")
            time.sleep(0.05)
        handler.wfile.write(b"\r\n\r\n" + jpeg())

    def onwards(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.2)
        send(handler, 302, b"", Location=f"{site.base}{handler.path}x")

    site.answers["/a"] = headers
    site.answers.update({"/b" + "x" * k: onwards for k in range(20)})
    for path in ("/a", "/b"):
        assert refusal(opener(total=0.5), site.base + path) == reasons.TIMEOUT
    assert len(site.agents) < 10, "not all twenty redirects may be followed"


def test_endless_tls_handshake_times_out() -> None:
    """The server sends a long TLS record byte by byte, so that no single read times out."""
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"\x16\x03\x03\x40\x00")
            for _ in range(30):
                connection.sendall(b"\x02")
                time.sleep(0.05)
            ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        assert refusal(opener(total=0.3), f"https://127.0.0.1:{listener.getsockname()[1]}/a") == reasons.TIMEOUT
        assert not ended.is_set()


def test_interrupted_body_times_out_even_if_it_looks_complete(site: Site) -> None:
    def unannounced(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(jpeg())
        time.sleep(1)

    site.answers["/a"] = unannounced
    assert refusal(opener(total=0.3), site.base + "/a") == reasons.TIMEOUT


def test_connections_to_one_host_are_limited(site: Site) -> None:
    body, lock, busy, seen = jpeg(), threading.Lock(), [0], [0]

    def slow(handler: BaseHTTPRequestHandler) -> None:
        with lock:
            busy[0] += 1
            seen.append(busy[0])
        time.sleep(0.05)
        with lock:  # before the response, after which the client may open the next connection
            busy[0] -= 1
        send(handler, 200, body)

    site.answers["/a"] = slow
    shared = opener(connections=3)
    threads = [threading.Thread(target=shared.open, args=(site.base + "/a",)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 13
    assert max(seen) == 3


def test_busy_host_is_retried_with_backoff(site: Site) -> None:
    body, asked = jpeg(), []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        asked.append(time.monotonic())
        if len(asked) < 3:
            send(handler, 429, b"", Retry_After="0")
        else:
            send(handler, 200, body)

    site.answers["/a"] = busy
    assert opener(retries=2, backoff=0.1).open(site.base + "/a").read() == body
    first, second = asked[1] - asked[0], asked[2] - asked[1]
    assert first >= 0.1
    assert second >= 0.2, "the pause doubles"


def test_retry_after_is_honoured_up_to_the_limit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opener_module, "MAX_BACKOFF", 0.3)
    asked = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        asked.append(time.monotonic())
        send(handler, 503, b"", Retry_After="3600")

    site.answers["/a"] = busy
    assert refusal(opener(retries=1), site.base + "/a") == "http 503"
    assert 0.3 <= asked[1] - asked[0] < 2


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
def test_retry_after_dates_without_a_zone_are_utc(monkeypatch: pytest.MonkeyPatch, zone: str) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert 900 < retry_after(time.asctime(time.gmtime(time.time() + 1_000))) < 1_100
    finally:
        monkeypatch.undo()
        time.tzset()


def test_chunks_override_the_announced_length(site: Site) -> None:
    body = jpeg()

    def chunked(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000000")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    site.answers["/a"] = chunked
    assert opener().open(site.base + "/a").read() == body


def test_permanent_failures_are_not_retried(site: Site) -> None:
    asked = []

    def gone(handler: BaseHTTPRequestHandler) -> None:
        asked.append(1)
        send(handler, 404, b"")

    site.answers["/a"] = gone
    assert refusal(opener(retries=5), site.base + "/a") == "http 404"
    assert asked == [1]


def test_numbers_in_headers_are_ascii_digits(site: Site) -> None:
    site.answers["/busy"] = lambda handler: send(handler, 503, b"", Retry_After="\u00b2")
    assert refusal(opener(), site.base + "/busy") == "http 503"

    def odd(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "\u00b2")
        handler.end_headers()
        handler.wfile.write(jpeg())

    site.answers["/odd"] = odd
    assert opener().open(site.base + "/odd").read() == jpeg()


def test_closed_opener_sends_no_requests_until_the_next_shard(site: Site) -> None:
    url = site.image("/a", jpeg())
    given = opener()
    given.close()
    assert refusal(given, url) == reasons.INTERNAL
    assert site.agents == []
    given.begin({})
    assert given.open(url).read() == jpeg()


def test_interim_answers_are_skipped(site: Site) -> None:
    body = jpeg()

    def hints(handler: BaseHTTPRequestHandler) -> None:
        for status in (b"100 Continue", b"102 Processing", b"103 Early Hints"):
            handler.wfile.write(b"HTTP/1.1 " + status + b"\r\nLink: </style.css>; rel=preload\r\n\r\n")
        send(handler, 404 if handler.path == "/gone" else 200, body)

    site.answers.update({"/a": hints, "/gone": hints})
    assert opener().open(site.base + "/a").read() == body
    assert refusal(opener(), site.base + "/gone") == "http 404"
    site.answers["/b"] = lambda handler: send(handler, 101, b"", Upgrade="h2c")  # nobody asked for that
    assert refusal(opener(), site.base + "/b") == "http 101"


def test_endless_interim_answers_time_out(site: Site) -> None:
    def hints(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(100):
            handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            time.sleep(0.05)

    site.answers["/a"] = hints
    assert refusal(opener(total=0.3), site.base + "/a") == reasons.TIMEOUT


def test_a_failure_closes_its_connection_at_once(site: Site) -> None:
    """Regression test: the connection of a 404 used to stay open as long as its exception."""
    given, errors = opener(), []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(FetchError, match="http 404") as caught:
            given.open(site.base + "/gone", timeout=2)
        errors.append(caught.value)
    assert len(os.listdir("/proc/self/fd")) < before + 10
