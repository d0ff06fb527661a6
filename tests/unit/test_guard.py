"""The guard refuses what its settings forbid, in direct requests and after redirects."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from data_prep import reasons
from data_prep.fetching.guard import AddressFilter
from data_prep.fetching.opener import Opener
from data_prep.fetching.url_handlers import ascii_url
from data_prep.reasons import FetchError
from data_prep.settings.download_config import GuardConfig
from tests.web import Site, jpeg, send, serve


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


def opener(retries: int = 0, total: float = 5.0, connections: int = 8, **guard: object) -> Opener:
    settings = {"allow_addresses": ("127.0.0.1",), "backoff": 0.05, **guard}
    return Opener(GuardConfig(**settings), connections=connections, retries=retries, total_seconds=total)  # type: ignore[arg-type]


def refusal(given: Opener, url: str) -> str:
    with pytest.raises(FetchError) as caught:
        given.open(url, timeout=2)
    assert reasons.of_message(str(caught.value)) == caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",  # the metadata service of most clouds
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "::7f00:1",  # IPv4-compatible
        "::808:808",
        "fec0::1",
        "feff::1",
        "64:ff9b:1::808:808",
        "240.0.0.1",
    ],
)
def test_special_addresses_are_refused(address: str) -> None:
    with pytest.raises(FetchError, match="refused address"):
        AddressFilter(()).check(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_pass(address: str) -> None:
    AddressFilter(()).check(address)


def test_only_listed_networks_are_allowed() -> None:
    allowed = AddressFilter(("10.1.0.0/16",))
    allowed.check("10.1.2.3")
    with pytest.raises(FetchError):
        allowed.check("10.2.0.1")


def test_loopback_is_refused_by_address_and_by_name(site: Site) -> None:
    url = site.image("/a.jpg", jpeg())
    assert refusal(opener(allow_addresses=()), url) == reasons.REFUSED_ADDRESS
    assert refusal(opener(allow_addresses=()), url.replace("127.0.0.1", "localhost")) == reasons.REFUSED_ADDRESS
    assert site.agents == [], "nothing may be sent to a refused address"


def test_redirect_to_a_refused_address_is_not_followed(site: Site) -> None:
    url = site.redirect("/a", "http://127.0.0.2:80/latest/meta-data")
    assert refusal(opener(), url) == reasons.REFUSED_ADDRESS


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/a", "gopher://127.0.0.1/"])
def test_other_schemes_are_refused_even_after_a_redirect(site: Site, target: str) -> None:
    assert refusal(opener(), target) == reasons.REFUSED_SCHEME
    assert refusal(opener(), site.redirect("/a", target)) == reasons.REFUSED_SCHEME


def test_redirects_are_followed_and_bounded(site: Site) -> None:
    body = jpeg()
    site.image("/3", body)
    site.redirect("/2", site.base + "/3")
    url = site.redirect("/1", site.base + "/2")
    assert opener().open(url).read() == body
    assert refusal(opener(max_redirects=1), url) == reasons.REDIRECTS
    assert refusal(opener(), site.redirect("/loop", site.base + "/loop")) == reasons.REDIRECTS


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
        assert refusal(opener(total=0.5, max_redirects=50), site.base + path) == reasons.TIMEOUT
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


def test_opt_out_is_detected_before_the_body_is_read(site: Site) -> None:
    def noai(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("X-Robots-Tag", "noai")
        handler.send_header("Content-Length", "100000000")
        handler.end_headers()  # no body follows

    site.answers["/a"] = noai
    assert refusal(opener(), site.base + "/a") == reasons.OPTED_OUT


def test_user_agent_names_the_contact(site: Site) -> None:
    url = site.image("/a", jpeg())
    opener(user_agent="lab", contact="https://example.org/crawler").open(url)
    assert site.agents == ["Mozilla/5.0 (compatible; lab; +https://example.org/crawler)"]


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


def test_retry_after_is_honoured_up_to_the_limit(site: Site) -> None:
    asked = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        asked.append(time.monotonic())
        send(handler, 503, b"", Retry_After="3600")

    site.answers["/a"] = busy
    assert refusal(opener(retries=1, max_backoff=0.3), site.base + "/a") == "http 503"
    assert 0.3 <= asked[1] - asked[0] < 2


def test_permanent_failures_are_not_retried(site: Site) -> None:
    asked = []

    def gone(handler: BaseHTTPRequestHandler) -> None:
        asked.append(1)
        send(handler, 404, b"")

    site.answers["/a"] = gone
    assert refusal(opener(retries=5), site.base + "/a") == "http 404"
    assert asked == [1]


def test_removed_urls_are_never_requested(site: Site) -> None:
    url = site.image("/a", jpeg())
    given = opener()
    given.begin({url: reasons.REMOVED})
    assert refusal(given, url) == reasons.REMOVED
    assert site.agents == []


@pytest.mark.parametrize(
    ("url", "wire"),
    [
        ("http://a.org/b%20c.jpg?x=1&y=[2]", "http://a.org/b%20c.jpg?x=1&y=[2]"),
        ("http://a.org/käse b.jpg?q=é#part", "http://a.org/k%C3%A4se%20b.jpg?q=%C3%A9"),
        ("http://bücher.example/1.jpg", "http://xn--bcher-kva.example/1.jpg"),
    ],
)
def test_urls_are_converted_to_ascii(url: str, wire: str) -> None:
    assert ascii_url(url) == wire


def test_urls_with_non_ascii_characters_are_fetched(site: Site) -> None:
    site.image("/k%C3%A4se%20b", jpeg())
    assert opener().open(site.base + "/käse b").read() == jpeg()


def test_proxies_of_the_environment_are_ignored_unless_trusted(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    url = site.image("/a", jpeg())
    assert opener().open(url).read() == jpeg()
    assert refusal(opener(trust_proxy=True), url) == reasons.CONNECTION


@pytest.mark.parametrize(
    "address",
    ["192.88.99.1", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "100:0:0:1::1", "64:ff9b:1::1", "2002:c058:6301::1"],
)
def test_special_addresses_that_python_counts_as_global_are_refused(address: str) -> None:
    with pytest.raises(FetchError, match="refused address"):
        AddressFilter(()).check(address)
    AddressFilter((address,)).check(address)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://user:pass@127.0.0.1/x", "bad url: a user name before the host"),
        ("http://user@127.0.0.1/x", "bad url: a user name before the host"),
        ("http://[::1/x", "bad url: Invalid IPv6 URL"),
        ("http://127.0.0.1:99999/x", "bad url: Port out of range"),
        ("http://127.0.0.1:http/x", "bad url: Port could not be cast"),
        ("no url", "bad url: unknown url type"),
        ("", "bad url: unknown url type"),
    ],
)
def test_invalid_urls_are_reported_as_bad_urls(url: str, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        opener().open(url)


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


def test_an_opted_out_redirect_is_not_followed(site: Site) -> None:
    asked: list[str] = []
    site.answers["/b"] = lambda handler: asked.append(handler.path)
    site.answers["/a"] = lambda handler: send(handler, 302, b"", Location="/b", X_Robots_Tag="noai")
    assert refusal(opener(), site.base + "/a") == reasons.OPTED_OUT
    assert asked == []


def test_a_redirect_with_a_user_name_is_not_followed(site: Site) -> None:
    site.redirect("/a", site.base.replace("http://", "http://user:pass@") + "/b")
    assert refusal(opener(), site.base + "/a") == reasons.BAD_URL


def test_closed_opener_sends_no_requests_until_the_next_shard(site: Site) -> None:
    url = site.image("/a", jpeg())
    given = opener()
    given.close()
    assert refusal(given, url) == reasons.INTERNAL
    assert site.agents == []
    given.begin({})
    assert given.url_of(given.open(url).read()) == url
    assert given.url_of(b"another") == ""
