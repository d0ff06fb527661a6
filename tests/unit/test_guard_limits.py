"""The guard's limits: bytes, pixels, seconds, connections, and pauses between requests."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import contextlib
import os
import socket
import threading
import time
from multiprocessing.pool import ThreadPool

import pytest

from data_prep import reasons
from data_prep.fetching import opener as opener_module
from data_prep.reasons import FetchError
from tests.downloads import opener, refusal, site  # noqa: F401
from tests.web import jpeg, send


def test_the_body_of_a_redirect_is_not_read(site):
    sent = []

    def endless(handler):
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


def test_sizes_are_bounded(site):
    body = jpeg(side=64)
    url = site.image("/a", body)
    assert refusal(opener(max_bytes=len(body) - 1), url) == reasons.TOO_MANY_BYTES
    assert refusal(opener(max_pixels=64 * 64 - 1), url) == reasons.TOO_MANY_PIXELS
    assert opener(max_bytes=len(body), max_pixels=64 * 64).open(url).read() == body

    def unannounced(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(body)

    site.answers["/b"] = unannounced
    assert refusal(opener(max_bytes=len(body) - 1), site.base + "/b") == reasons.TOO_MANY_BYTES


def begins(handler, **headers):
    handler.send_response(200)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()


def drip(handler, piece):
    for _ in range(100):
        handler.wfile.write(piece)
        time.sleep(0.05)


def in_headers(handler):
    handler.wfile.write(b"HTTP/1.0 200 OK\r\nX-Long: ")
    drip(handler, b"x")


def in_body(handler):
    begins(handler)
    drip(handler, b"\xff")


def behind_a_whole_image(handler):
    begins(handler)
    handler.wfile.write(jpeg())
    time.sleep(1)


def in_redirects(handler):
    time.sleep(0.2)
    send(handler, 302, b"", Location=f"{handler.path}x")


SLOW = {
    "headers": in_headers,
    "body": in_body,
    "after": behind_a_whole_image,
    "interim": lambda handler: drip(handler, b"HTTP/1.1 103 Early Hints\r\n\r\n"),
    **{"redirects" + "x" * k: in_redirects for k in range(20)},
}


def test_slow_answers_time_out(site):
    site.answers.update({f"/{name}": answer for name, answer in SLOW.items()})
    for name in ("headers", "body", "after", "interim", "redirects"):
        assert refusal(opener(total=0.4), f"{site.base}/{name}") == reasons.TIMEOUT, name
    assert len(site.agents) < 10, "not all twenty redirects may be followed"


def chunked(handler):
    begins(handler, Content_Length="100000000", Transfer_Encoding="chunked")
    handler.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(jpeg()), jpeg()))


def of_an_odd_length(handler):
    begins(handler, Content_Length="\u00b2")
    handler.wfile.write(jpeg())


def with_interim_answers(handler):
    for status in (b"100 Continue", b"102 Processing", b"103 Early Hints"):
        handler.wfile.write(b"HTTP/1.1 " + status + b"\r\nLink: </style.css>; rel=preload\r\n\r\n")
    send(handler, 404 if handler.path == "/gone" else 200, jpeg())


def test_unusual_answers_are_understood(site):
    for answer in (chunked, of_an_odd_length, with_interim_answers):
        site.answers["/a"] = answer
        assert opener().open(site.base + "/a").read() == jpeg(), answer
    site.answers["/gone"] = with_interim_answers
    site.answers["/busy"] = lambda handler: send(handler, 503, b"", Retry_After="\u00b2")
    site.answers["/upgrade"] = lambda handler: send(handler, 101, b"", Upgrade="h2c")  # nobody asked for that
    for name, reason in (("gone", "http 404"), ("busy", "http 503"), ("upgrade", "http 101")):
        assert refusal(opener(), f"{site.base}/{name}") == reason


def test_endless_tls_handshake_times_out():
    """The server sends a long TLS record byte by byte, so that no single read times out."""
    ended = threading.Event()

    def drip(listener):
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


def test_connections_to_one_host_are_limited(site):
    busy, counts = [], []

    def slow(handler):
        busy.append(handler)
        counts.append(len(busy))
        time.sleep(0.05)
        busy.remove(handler)  # before the response, after which the client may open the next connection
        send(handler, 200, jpeg())

    site.answers["/a"] = slow
    shared = opener(connections=3)
    with ThreadPool(12) as pool:
        assert len(pool.map(shared.open, [site.base + "/a"] * 12)) == 12
    assert max(counts) == 3


def test_busy_hosts_are_retried_after_a_pause_and_lasting_failures_are_not(site, monkeypatch):
    monkeypatch.setattr(opener_module, "MAX_BACKOFF", 0.3)
    asked: list[float] = []

    def answers(*each):
        def answer(handler):
            status, wait = each[min(len(asked), len(each) - 1)]
            asked.append(time.monotonic())
            send(handler, status, jpeg(), Retry_After=wait)

        asked.clear()
        site.answers["/a"] = answer
        return site.base + "/a"

    url = answers((429, "0"), (429, "0"), (200, "0"))
    assert opener(retries=2, backoff=0.1).open(url).read() == jpeg()
    assert asked[1] - asked[0] >= 0.1
    assert asked[2] - asked[1] >= 0.2, "the pause doubles"
    assert refusal(opener(retries=1), answers((503, "3600"))) == "http 503"
    assert 0.3 <= asked[1] - asked[0] < 2, "a host's wish is followed up to the limit"
    assert refusal(opener(retries=5), answers((404, "0"))) == "http 404"
    assert len(asked) == 1


def test_a_failure_closes_its_connection_at_once(site):
    """Regression test: the connection of a 404 used to stay open as long as its exception."""
    given, errors = opener(), []
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(FetchError, match="http 404") as caught:
            given.open(site.base + "/gone", timeout=2)
        errors.append(caught.value)
    assert len(os.listdir("/proc/self/fd")) < before + 10
