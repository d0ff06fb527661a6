"""The playground: what it computes, what it refuses, and the page in a browser."""

import http.client
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import jobs.playground as job
from pipeline.errors import UserError
from pipeline.evaluation.compute import Compute, class_vectors
from pipeline.playground.explorer import KEPT_UPLOADS, Dropped, Explorer, lines_of, open_image, read_images
from tests.browser import browser, problems
from tests.checkpoints import make_model, save_checkpoint
from tests.evaluation_suite import image_bytes
from tests.images import encoded, png
from tests.shards import write_tar

pytest.importorskip("starlette", reason="the extra `playground` is not installed")
pytest.importorskip("uvicorn", reason="the extra `playground` is not installed")
from pipeline.playground import http_api

CLASSES = ["fox", "cat", "bridge"]
TEMPLATES = ["a photo of a {c}.", "the {c}"]


def bodies(count):
    rng = np.random.default_rng(3)
    return [image_bytes(rng, number) for number in range(count)]


def write_photos(root, count=14):
    """Images in two folders, one of them damaged, and a file that is none."""
    for number, (suffix, body) in enumerate(bodies(count)):
        folder = root / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}.{suffix}").write_bytes(body)
    (root / "a/zz.jpg").write_bytes(b"no image")
    (root / "notes.md").write_text("not an image")
    return root


def read(folder, limit=100):
    dropped = Dropped(list)
    return list(read_images(folder, limit=limit, dropped=dropped)), lines_of(dropped).splitlines()


@pytest.fixture(scope="module")
def explorer(tmp_path_factory):
    found = Explorer(make_model(0))
    dropped = found.add_images(write_photos(tmp_path_factory.mktemp("photos")), limit=100)
    assert lines_of(dropped).startswith(
        "1 skipped: the image cannot be decoded (first: a/zz.jpg cannot be used (not an"
    )
    return found


@pytest.fixture(scope="module")
def address(explorer):
    listening = http_api.listen("127.0.0.1", 0)
    app = http_api.make_app(explorer, local=True)
    serving = http_api.make_server(app)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[:2]
    serving.should_exit = True
    thread.join()


def ask(address, path, body=None, **headers):
    connection = http.client.HTTPConnection(*address, timeout=60)
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    kind = "application/octet-stream" if path == "/api/image" else "application/json"
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST" if body is not None else "GET", path, content, {"Content-Type": kind, **headers})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if reply.headers.get_content_type() == "application/json" else text


def test_a_computation_ends_when_its_client_is_gone(explorer, monkeypatch):
    gone, calls = threading.Event(), []
    original = class_vectors

    def leave(*arguments, **options):
        calls.append(gone.set())
        return original(*arguments, **options)

    monkeypatch.setattr("pipeline.playground.explorer.class_vectors", leave)
    with pytest.raises(UserError, match="The client is gone"):
        explorer.classify("gallery:0", [f"class {k}" for k in range(600)], ["the {c}"], is_gone=gone.is_set)
    assert len(calls) == 1


def test_galleries_are_read_and_what_they_leave_out_is_counted(tmp_path):
    """Regression tests: images beside shards were left out without a word; one odd name failed every search."""
    photos, empty = write_photos(tmp_path / "photos", count=4), tmp_path / "empty"
    assert [name[:4] for name, _ in read(photos)[0]] == ["a/01", "a/03", "a/zz", "b/00", "b/02"]
    assert len(read(photos, limit=3)[0]) == 3
    write_tar(photos / "00000.tar", [{"png": bodies(1)[0][1], "txt": b"one"}, {"txt": b"two"}])
    samples, lines = read(photos)
    assert samples == [("00000.tar, sample 0", bodies(1)[0][1])]
    assert lines == ["5 skipped: images beside shards are not read (first: " + str(photos / "a/01.png)"),
                     "1 skipped: image is missing (first: 00000.tar, sample 1)"]  # fmt: skip
    (photos / "00000.tar").write_bytes((photos / "00000.tar").read_bytes()[:1000])
    assert "the shard is damaged" in read(photos)[1][-1]
    empty.mkdir()
    with pytest.raises(UserError, match="there are no images in such a folder"):
        read(empty)
    body = encoded(Image.new("RGB", (8, 8)), "GIF")
    (empty / "b.GIF").write_bytes(body)
    Path(os.fsdecode(os.fsencode(empty) + b"/caf\xe9.png")).write_bytes(body)
    Path(os.fsdecode(os.fsencode(empty) + b"/c\xe9.png")).symlink_to("nowhere")
    samples, (line,) = read(empty)
    assert [name for name, _ in samples] == ["b.GIF", "caf\ufffd.png"]
    assert line.startswith("1 skipped: the file cannot be read (first: ")
    assert line.endswith("/c\ufffd.png: No such file or directory)")


def test_a_client_that_leaves_and_a_picture_that_is_dropped_again(address, caplog, monkeypatch):
    """Regression tests: the former printed a traceback; the latter was forgotten as if it were the oldest."""
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [caplog.handler])
    with socket.create_connection(address) as client:
        client.sendall(b"POST /api/image HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nabc")
    other = Explorer(make_model(0))
    pictures = [body for _, body in bodies(KEPT_UPLOADS + 1)]
    first = other.add_upload(pictures[0])
    for body in (*pictures[1:-1], pictures[0], pictures[-1]):
        other.add_upload(body)
    assert len(other.classify(first, CLASSES, TEMPLATES)) == len(CLASSES)
    time.sleep(0.5)
    assert ask(address, "/")[0] == 200
    assert caplog.records == []


def test_a_slow_client_loses_its_connection(address, monkeypatch):
    monkeypatch.setattr(http_api, "MOST_SECONDS", 0.2)
    with socket.create_connection(address, timeout=30) as client:
        kind = "Content-Type: application/json\r\nContent-Length: 1000"
        client.sendall(f"POST /api/search HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\n\r\nabc".encode())
        reply = b"".join(iter(lambda: client.recv(4096), b""))
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.2 s" in reply


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: "])
def test_half_a_request_keeps_no_connection(address, monkeypatch, sent):
    """Regression test: 32 connections with half a request kept everybody else out while they were open."""
    monkeypatch.setattr(http_api, "HEADER_SECONDS", 0.2)
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(sent)
        assert client.recv(4096) == b""


def test_results_are_those_of_the_model(explorer):
    model = explorer.model
    assert len(explorer.names) == len(explorer.thumbnails) == 14
    pixels = torch.stack([model.preprocess(open_image(body, name="")) for _, body in bodies(14)])
    by_name = dict(
        zip((f"{'a' if k % 2 else 'b'}/{k:02d}" for k in range(14)), model.encode_image(pixels), strict=True)
    )
    image = explorer.add_upload(bodies(1)[0][1])
    query = model.encode_text(model.tokenize(["a red fox"]))[0]
    for found, features in (
        (explorer.search(text="a red fox"), query),
        (explorer.search(image=image), by_name["b/00"]),
    ):
        cosines = sorted((float(value @ features) for value in by_name.values()), reverse=True)
        assert [hit["score"] for hit in found] == pytest.approx(cosines[:12], abs=1e-4)
        for hit in found:
            assert hit["name"] == explorer.names[hit["image"]]
            assert hit["score"] == pytest.approx(float(by_name[hit["name"].split(".")[0]] @ features), abs=1e-4)
    assert found[0]["name"].startswith("b/00")
    vectors = class_vectors(model, CLASSES, TEMPLATES, compute=Compute(torch.device("cpu")), micro_batch=6)
    expected = torch.softmax(explorer.scale * (vectors @ by_name["b/00"]), 0)
    result = explorer.classify(image, CLASSES, TEMPLATES)
    assert {one["name"]: one["probability"] for one in result} == {
        name: pytest.approx(float(p), abs=1e-5) for name, p in zip(CLASSES, expected, strict=True)
    }
    with pytest.raises(UserError, match="There are no images to search"):
        Explorer(model).search(text="a red fox")


def test_bad_requests_get_a_clear_answer(address, explorer):
    image, own = explorer.add_upload(bodies(1)[0][1]), f"http://{address[0]}:{address[1]}"
    huge, vast = encoded(Image.new("1", (9000, 9000)), "PNG"), png(60_000, 60_000, data=b"", bits=8)
    broken, unknown = "The request is not JSON in Unicode.", "This image is not known any more"
    many = [f"{k} {{c}}" for k in range(100)]
    for path, asked, message in (
        ("image", b"", "The file cannot be used (not an image); "),
        ("image", b"text", "The file cannot be used (not an image); the page takes PNG, JPEG, WebP and others"),
        ("image", bodies(4)[3][1][:150], "The file cannot be used (truncated: "),
        ("image", huge, "The file cannot be used (too many pixels: 9000 x 9000); "),
        ("image", vast, "The file cannot be used (too many pixels: "),
        ("search", {"text": " "}, "Type the text first."),
        ("search", {"text": "x" * 1001}, "The text has 1,001 characters; 1,000 are allowed."),
        *(("search", body, broken) for body in (b"[", b"[" * 100_000, rb'{"text": "\udfff"}')),
        ("search", [1], "The request must be a JSON object."),
        ("search", {"image": "gallery:99"}, unknown),
        ("classify", {"classes": ["cat", "cat "]}, "Give 2 to 1,000 different classes, one a line; these are 1."),
        ("classify", {"classes": "cat"}, "classes and templates must be lists of texts."),
        (
            "classify",
            {"classes": [*map(str, range(1000))], "templates": many},
            "100,000 prompts, and 10,000 are allowed",
        ),
        ("classify", {"templates": ["a photo"]}, "The template 'a photo' needs {c} where the class name goes."),
        ("classify", {"templates": []}, "Give 1 to 100 templates, one a line; these are 0."),
        *(("classify", {"image": f"gallery:{number}"}, unknown) for number in ("9" * 5000, "\u00b2")),
        ("classify", {"image": "0" * 24}, unknown),
    ):
        if path == "classify":
            asked = {"image": image, "classes": CLASSES, "templates": TEMPLATES, **asked}
        status, answer = ask(address, f"/api/{path}", asked)
        assert status == 400
        assert message in answer["error"]
    status, answer = ask(address, "/api/image", bytes((20 << 20) + 1))
    assert (status, answer["error"]) == (413, "The file has more than 20 MiB: make it smaller.")
    for path in ("/image/99", "/image/" + "9" * 5000, "/image/x", "/../../etc/passwd"):
        assert ask(address, path)[0] == 404
    for path, kind, origin, status in (
        *(("/api/search", "application/json", origin, 403) for origin in ("http://a.example", "null", "http://[::1")),
        ("/api/search", "text/plain", own, 415),
        ("/api/image", "multipart/form-data; boundary=x", own, 415),
        ("/api/search", "application/json", own, 200),
    ):
        assert ask(address, path, {"text": "a"}, Origin=origin, Content_Type=kind)[0] == status
    assert ask(address, "/image/0")[0] == 200


def test_only_this_machine_is_served_by_default(address):
    """Other pages cannot reach the server by a name of theirs that resolves to it; nothing is loaded from elsewhere."""
    assert ask(address, "/", Host="attacker.example")[0] == 400
    assert ask(address, "/", Host=f"localhost:{address[1]}")[0] == 200
    page = ask(address, "/")[1].decode()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_command_reports_mistakes_before_loading_anything(tmp_path):
    def fails(*arguments):
        done = CliRunner().invoke(job.command, list(arguments), standalone_mode=False)
        assert isinstance(done.exception, UserError), done.output
        return str(done.exception)

    checkpoint = str(save_checkpoint(tmp_path / "step-00000001", 0))
    gone = tmp_path / "gone"
    assert fails(checkpoint, "--images", str(gone)) == f"--images {gone}: there is no such folder."
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port or --host" in fails(checkpoint, "--port", port)
    assert "neither a folder with" in fails(str(tmp_path / "nothing"), "--port", "0")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "x.png").write_bytes(b"no")
    assert "has no image that can be used. 1 skipped" in fails(checkpoint, "--images", str(bad), "--port", "0")


def test_the_command_serves_the_images_of_a_folder(tmp_path, monkeypatch):
    served: list[Explorer] = []
    monkeypatch.setattr(http_api, "make_app", lambda explorer, **options: served.append(explorer) or options)
    monkeypatch.setattr(http_api, "serve", lambda app, listening: None)
    checkpoint, photos = save_checkpoint(tmp_path / "step-00000001", 0), write_photos(tmp_path / "photos")
    arguments = [str(checkpoint), "--images", str(photos)]
    done = CliRunner().invoke(job.command, [*arguments, "--port", "0", "--device", "cpu"], standalone_mode=False)
    assert done.exception is None, done.output
    assert len(served[0].names) == 14
    assert "14 images (at most 2,000: --limit). 1 skipped: the image cannot be decoded" in done.output
    assert "Playground: http://127.0.0.1:" in done.output
    assert "Only this machine can reach it." in done.output


def test_the_page_in_a_browser(address, tmp_path):
    """Search, a click on a result, a dropped file and a bad one; accessible, and fit for a phone."""
    url = f"http://{address[0]}:{address[1]}/"
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(bodies(8)[7][1])
    bad.write_bytes(b"no image")
    said: list[str] = []
    with browser() as started:
        for width in (1400, 390):
            tab = started.new_page(viewport={"width": width, "height": 900})
            tab.on("console", lambda message: said.append(message.text))
            tab.on("pageerror", lambda error: said.append(str(error)))
            tab.goto(url)
            assert tab.inner_text("h1") == "model-0"
            tab.fill("#text", "a red fox")
            tab.click("#search button")
            tab.wait_for_selector(".hit .score")
            assert tab.locator(".hit").count() == 12
            tab.fill("#classes", "\n".join(CLASSES))
            tab.locator(".hit").first.click()
            tab.wait_for_selector("#probabilities li")
            assert not said
            tab.set_input_files("#file", bad)
            tab.wait_for_selector("#image-error:visible")
            assert "cannot be used (not an image)" in tab.inner_text("#image-error")
            tab.set_input_files("#file", good)
            tab.get_by_text("good.png", exact=True).wait_for()
            tab.fill("#classes", "a fox\na cat")
            tab.click("#classify")
            tab.locator("#probabilities li", has_text="a fox").wait_for()
            assert tab.locator("#probabilities li").count() == 2
            tab.click("#similar")
            tab.locator(".hit", has_text="07.").first.wait_for()
            assert tab.locator("#image-error").is_hidden()
            assert problems(tab, width=width) == []
            said.clear()  # the browser logs the refused upload
            tab.close()
