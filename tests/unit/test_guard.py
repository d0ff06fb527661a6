"""The guard refuses what its settings forbid, in direct requests and after redirects."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import itertools
import socket

import pytest

from data_prep import reasons
from data_prep.fetching import guard
from data_prep.fetching import opener as opener_module
from data_prep.fetching.guard import AddressFilter, checked_url
from data_prep.reasons import FetchError
from tests.downloads import opener, refusal, site  # noqa: F401
from tests.web import jpeg, send

SPECIAL = (
    "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "0.0.0.0", "224.0.0.1", "240.0.0.1",
    "169.254.169.254", "168.63.129.16", "100.100.100.200", "192.0.0.192",  # metadata services of clouds
    "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fec0::1", "feff::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::7f00:1", "::808:808",  # IPv4-mapped and IPv4-compatible
    "64:ff9b::7f00:1", "64:ff9b:1::808:808", "2002:7f00:1::",
    # Python counts these as global.
    "192.88.99.1", "3fff::1", "3fff:fff:ffff::1", "5f00::1", "100:0:0:1::1", "64:ff9b:1::1", "2002:c058:6301::1",
)  # fmt: skip


def test_special_addresses_are_refused_unless_allowed():
    for address in SPECIAL:
        with pytest.raises(FetchError, match="refused address"):
            AddressFilter(()).check(address)
        AddressFilter((address.partition("%")[0],)).check(address)
    for address in ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"):
        AddressFilter(()).check(address)
    with pytest.raises(FetchError):
        AddressFilter(("10.1.0.0/16",)).check("10.2.0.1")


def test_loopback_is_refused_by_address_and_by_name(site):
    url = site.image("/a.jpg", jpeg())
    assert refusal(opener(allow_addresses=()), url) == reasons.REFUSED_ADDRESS
    assert refusal(opener(allow_addresses=()), url.replace("127.0.0.1", "localhost")) == reasons.REFUSED_ADDRESS
    assert site.agents == [], "nothing may be sent to a refused address"


def test_a_name_is_resolved_once_and_only_its_permitted_addresses_are_used(site, monkeypatch):
    """Otherwise a name that resolves to another address the second time (DNS rebinding) would reach any."""
    port, asked = int(site.base.rpartition(":")[2]), []
    url = site.image("/a", jpeg()).replace("127.0.0.1", "rebinding.example")

    def resolve(host, *_):
        asked.append(host)
        family = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*family, (address, port)) for address in ("127.0.0.2", *(["127.0.0.1"] if len(asked) == 1 else []))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert opener().open(url).read() == jpeg()
    assert asked == ["rebinding.example"]
    assert refusal(opener(), url) == reasons.REFUSED_ADDRESS


def test_redirects_that_are_not_followed(site):
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/a", "gopher://127.0.0.1/"):
        assert refusal(opener(), target) == reasons.REFUSED_SCHEME
        assert refusal(opener(), site.redirect("/a", target)) == reasons.REFUSED_SCHEME
    site.image("/b", jpeg())
    for headers, reason in (
        ({"Location": "http://127.0.0.2:80/latest/meta-data"}, reasons.REFUSED_ADDRESS),
        ({"Location": site.base.replace("http://", "http://user:pass@") + "/b"}, reasons.BAD_URL),
        ({"Location": "/b", "X_Robots_Tag": "noai"}, reasons.OPTED_OUT),
    ):
        site.answers["/a"] = lambda handler, headers=headers: send(handler, 302, b"", **headers)
        site.agents.clear()
        assert refusal(opener(), site.base + "/a") == reason
        assert len(site.agents) == 1, "the target is not asked"


def test_redirects_are_followed_and_bounded(site, monkeypatch):
    body = jpeg()
    site.image("/3", body)
    site.redirect("/2", site.base + "/3")
    url = site.redirect("/1", site.base + "/2")
    assert opener().open(url).read() == body
    assert refusal(opener(), site.redirect("/loop", site.base + "/loop")) == reasons.REDIRECTS
    monkeypatch.setattr(opener_module, "MAX_REDIRECTS", 1)
    assert refusal(opener(), url) == reasons.REDIRECTS
    for status in (301, 302, 303, 307, 308):  # spaces after a location are no part of it
        site.answers["/a"] = lambda handler, status=status: send(handler, status, b"", Location="/3 \t")
        assert opener().open(site.base + "/a").read() == body
    for status in (300, 304, 307):  # that lead nowhere
        site.answers["/nowhere"] = lambda handler, status=status: send(handler, status, b"")
        assert refusal(opener(), site.base + "/nowhere") == f"http {status}"


def test_opt_out_is_detected_before_the_body_is_read(site):
    def noai(handler):
        handler.send_response(200)
        handler.send_header("X-Robots-Tag", "noai")
        handler.send_header("Content-Length", "100000000")
        handler.end_headers()  # no body follows

    site.answers["/a"] = noai
    assert refusal(opener(), site.base + "/a") == reasons.OPTED_OUT


def test_user_agent_names_the_contact_and_removed_urls_are_never_requested(site):
    url = site.image("/a", jpeg())
    given = opener(user_agent="lab", contact="https://example.org/crawler")
    given.open(url)
    given.removed = {url}
    assert refusal(given, url) == reasons.REMOVED
    assert site.agents == ["Mozilla/5.0 (compatible; lab; +https://example.org/crawler)"]


def test_urls_are_converted_to_ascii(site):
    for url, wire in (
        ("http://a.org/b%20c.jpg?x=1&y=[2]", "http://a.org/b%20c.jpg?x=1&y=[2]"),
        ("http://a.org/käse b.jpg?q=é#part", "http://a.org/k%C3%A4se%20b.jpg?q=%C3%A9"),
        ("http://bücher.example/1.jpg", "http://xn--bcher-kva.example/1.jpg"),
        ("http://例え.テスト:8080/1.jpg", "http://xn--r8jz45g.xn--zckzah:8080/1.jpg"),
        ("http://[2001:db8::1]:8080/ü", "http://[2001:db8::1]:8080/%C3%BC"),
    ):
        assert checked_url(url).geturl() == wire
    site.image("/k%C3%A4se%20b", jpeg())
    assert opener().open(site.base + "/käse b").read() == jpeg()


def test_proxies_of_the_environment_are_ignored_unless_trusted(site, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    url = site.image("/a", jpeg())
    assert opener().open(url).read() == jpeg()
    assert refusal(opener(trust_proxy=True), url) == reasons.CONNECTION
    for host in ("10.0.0.1", "10.0.0.1.", "0x0a000001", "10.1", "167772161", "012.0.0.1"):
        assert refusal(opener(trust_proxy=True), f"http://{host}/a") == reasons.REFUSED_ADDRESS, host
    monkeypatch.setenv("http_proxy", site.base)
    site.answers["http://a.example/a?b"] = site.answers["/a"]
    assert opener(trust_proxy=True).open("http://a.example/a?b").read() == jpeg(), "the proxy resolves the name"


def test_invalid_urls_are_reported_as_bad_urls():
    for url, words in (
        ("http://user:pass@127.0.0.1/x", "a user name before the host"),
        ("http://user@127.0.0.1/x", "a user name before the host"),
        ("http://[::1/x", "Invalid IPv6 URL"),
        ("http://127.0.0.1:99999/x", "Port out of range"),
        ("http://127.0.0.1:http/x", "Port could not be cast"),
        ("http://é[::1]/x", "'-9fa::1' does not appear to be an IPv4 or IPv6 address"),
        ("no url", "unknown url type"),
        ("", "unknown url type"),
    ):
        with pytest.raises(FetchError, match=f"bad url: {words}"):
            opener().open(url)


UNREADABLE = [b"no colon here\r\n", b"X-Robots-Tag : all\r\n", b": no name\r\n", b"\r\r\n", b"From here\r\n",
              b"A: another kind of line break\x0b", b"A: continued\r\n ", b"A: many\r\n" * 101,
              b"A: " + bytes([65]) * 70_000 + b"\r\n"]  # fmt: skip


def test_headers_that_cannot_be_parsed_give_no_sample(site):
    """Regression test: http.client stops at such a line, and an opt-out after it was not seen."""
    site.image("/b", jpeg())
    for lines, status in itertools.product(UNREADABLE, (200, 302)):

        def answer(handler, lines=lines, status=status):
            head = f"HTTP/1.1 {status} OK\r\nLocation: /b\r\nContent-Length: {len(jpeg())}\r\n".encode()
            handler.wfile.write(head + lines + b"X-Robots-Tag: noai\r\n\r\n" + jpeg())
            handler.close_connection = True

        site.answers["/a"] = answer
        site.agents.clear()
        assert refusal(opener(), site.base + "/a") in (reasons.BAD_HEADERS, reasons.OPTED_OUT), lines[:40]
        assert len(site.agents) == 1


def test_any_content_type_is_a_readable_header(site):
    """Regression test: the parser looks for the parts of a message of such a type, and a missing part is a defect."""
    for kind in ("multipart/x-mixed-replace", "multipart/form-data; boundary=x", "message/rfc822"):
        assert opener().open(site.image("/a", jpeg(), Content_Type=kind)).read() == jpeg()
        url = site.image("/b", jpeg(), Content_Type=kind, X_Robots_Tag="noai")
        assert refusal(opener(), url) == reasons.OPTED_OUT
        url = site.image("/c", jpeg(), Content_Type=kind + "\r\nno colon here\r\nX-Robots-Tag: noai")
        assert refusal(opener(), url) == reasons.BAD_HEADERS


def test_a_rule_is_one_function_and_a_reason(site, monkeypatch):
    monkeypatch.setattr(guard, "_RULES", [*guard._RULES])
    monkeypatch.setitem(reasons.MEANINGS, "a cat", "a picture of a cat")

    @guard.rule
    def no_cats(url, headers, settings):
        if "cat" in url:
            raise FetchError("a cat")

    cat, dog = (site.image(f"/{name}", jpeg(side=30)) for name in ("cat", "dog"))
    assert opener().open(dog).read() == jpeg(side=30)
    for url in (cat, site.redirect("/pet", cat)):
        assert refusal(opener(), url) == "a cat"
