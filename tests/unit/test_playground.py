"""The playground: what it computes, what it refuses, and the page in a browser."""

from __future__ import annotations

import http.client
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import jobs.playground as job
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.errors import UserError
from pipeline.evaluation.compute import Compute
from pipeline.evaluation.protocols.texts import class_vectors
from pipeline.playground import http_api
from pipeline.playground.explorer import KEPT_UPLOADS, ClassSet, Explorer
from pipeline.playground.gallery import Dropped, open_image, read_samples
from tests.browser import browser, problems
from tests.checkpoints import make_model, save_checkpoint
from tests.evaluation_suite import image_bytes
from tests.images import encoded, png
from tests.shards import write_tar

pytest.importorskip("starlette", reason="the extra `playground` is not installed")
pytest.importorskip("uvicorn", reason="the extra `playground` is not installed")
CAPTIONS = ("a red fox", "a tabby cat", "an old bridge", "the night sky")
CLASSES = ["fox", "cat", "bridge"]
TEMPLATES = ["a photo of a {c}.", "the {c}"]


def bodies(count: int) -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(3)
    return [image_bytes(rng, number) for number in range(count)]


def write_photos(root: Path, count: int = 14) -> Path:
    """Images in two folders, one of them damaged, and a file that is none."""
    for number, (suffix, body) in enumerate(bodies(count)):
        folder = root / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02d}.{suffix}").write_bytes(body)
    (root / "a/zz.jpg").write_bytes(b"no image")
    (root / "notes.md").write_text("not an image")
    return root


def write_shard(root: Path, captions: tuple[str, ...]) -> Path:
    root.mkdir()
    pairs = zip(bodies(len(captions)), captions, strict=True)
    write_tar(root / "00000.tar", [{suffix: body, "txt": text.encode()} for (suffix, body), text in pairs])
    return root


def read(source: Path, **options: Any) -> tuple[list[Any], Dropped]:
    dropped = Dropped()
    settings = {"caption": CaptionField(), "limit": 100, **options}
    return list(read_samples(source, dropped=dropped, **settings)), dropped


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    found = Explorer(make_model(0), class_sets=[ClassSet("animals", tuple(CLASSES), tuple(TEMPLATES))])
    samples, dropped = read(write_photos(tmp_path_factory.mktemp("photos")))
    found.add_images(samples, dropped=dropped, progress=lambda count: None)
    found.add_captions([*CAPTIONS, CAPTIONS[0]], progress=lambda count: None)
    (line,) = dropped.lines()
    assert line.startswith("1 skipped: the image cannot be decoded (first: a/zz.jpg is not an image")
    return found


@pytest.fixture(scope="module")
def address(explorer: Explorer) -> Iterator[tuple[str, int]]:
    import uvicorn

    listening = http_api.listen("127.0.0.1", 0)
    app = http_api.make_app(explorer, title="run, step-00000010", local=True)
    serving = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()[:2]
    serving.should_exit = True
    thread.join()


def ask(address: tuple[str, int], path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*address, timeout=60)
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    kind = "application/octet-stream" if path == "/api/image" else "application/json"
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST" if body is not None else "GET", path, content, {"Content-Type": kind, **headers})
    reply = connection.getresponse()
    text = reply.read()
    connection.close()
    return reply.status, json.loads(text) if reply.headers.get_content_type() == "application/json" else text


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/api/search", {"text": "fox"}, {"Origin": "http://evil.example"}, 403, "other web pages"),
        ("/api/search", {"text": "fox"}, {"Origin": "null"}, 403, "other web pages"),
        ("/api/search", {"text": "fox"}, {"Origin": "http://[::1"}, 403, "other web pages"),  # was a traceback
        ("/api/search", {"text": "fox"}, {"Content_Type": "text/plain"}, 415, "send application/json"),
        ("/api/image", b"x", {"Content_Type": "multipart/form-data; boundary=x"}, 415, "send image/"),
        ("/api/classify", {"image": "gallery:0", "classes": [f"c{k}" for k in range(1000)],
                           "templates": [f"{k} {{c}}" for k in range(100)]}, {}, 400, "100,000 prompts"),
        ("/api/search", {"text": "fox"}, {"Origin": "http://{host}"}, 200, ""),
    ],
)  # fmt: skip
def test_requests_of_other_pages_and_too_many_prompts_are_refused(address, path, body, headers, status, message):
    headers = {name: value.replace("{host}", f"{address[0]}:{address[1]}") for name, value in headers.items()}
    found, answer = ask(address, path, body, **headers)
    assert found == status
    assert message in answer.get("error", "")


def test_a_computation_ends_when_its_client_is_gone(explorer, monkeypatch):
    gone, calls = threading.Event(), []
    original = class_vectors

    def leave(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(gone.set())
        return original(*arguments, **options)

    monkeypatch.setattr("pipeline.playground.explorer.class_vectors", leave)
    with pytest.raises(UserError, match="The client is gone"):
        explorer.classify("gallery:0", [f"class {k}" for k in range(600)], ["the {c}"], is_gone=gone.is_set)
    assert len(calls) == 1


def test_galleries_are_read_and_what_they_leave_out_is_said(tmp_path):
    """Regression tests: images beside shards, and all beyond the limit, were left out without a word."""
    photos, shards, texts = tmp_path / "photos", tmp_path / "shards", tmp_path / "captions.txt"
    samples, dropped = read(write_photos(photos, count=4))
    assert [sample.name for sample in samples][:2] == ["a/01.png", "a/03.png"]
    assert not read(photos, limit=5)[1].lines()
    samples, dropped = read(photos, limit=3)
    assert len(samples) == 3
    assert dropped.lines() == [f"Only the first 3 of the 5 images in {photos} are used: --limit."]
    samples, dropped = read(write_shard(shards, ("one", " ", "three")))
    names = [f"00000.tar, sample {row}" for row in range(3)]
    assert [(s.name, s.caption) for s in samples] == list(zip(names, ("one", None, "three"), strict=True))
    assert samples[0].image == bodies(3)[0][1]
    assert dropped.lines() == ["1 skipped: caption is empty (first: 00000.tar, sample 1)"]
    write_shard(photos / "shards", ("one", "two", "three"))
    beside = f"5 images beside the shards of {photos} are not used."
    assert read(photos, limit=3)[1].lines() == [beside]
    samples, dropped = read(photos, limit=2)
    assert len(samples) == 2
    assert dropped.lines() == [beside, "Only the first 2 samples of the shards are used: --limit."]
    shard = shards / "00000.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    assert "the shard is damaged" in read(shards)[1].lines()[-1]
    texts.write_text("first\n\nsecond\n")
    assert "first 1 of the 2 captions in" in read(texts, limit=1)[1].lines()[0]
    captions, dropped = read(texts)
    assert [sample.caption for sample in captions] == ["first", "second"]
    Explorer(make_model(0)).add_images(captions, dropped=dropped, progress=lambda count: None)
    assert dropped.lines() == ["2 skipped: image is missing (first: line 1)"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "picture.jpg").write_bytes(b"\xff\xd8")
    for name, message in (
        ("empty", "holds no images"),
        ("gone", "There is no"),
        ("picture.jpg", "is not a UTF-8 text"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


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
    assert ask(address, "/api/info")[0] == 200
    assert caplog.records == []


def test_a_slow_client_loses_its_connection(address, monkeypatch):
    monkeypatch.setattr(http_api, "MOST_SECONDS", 0.2)
    with socket.create_connection(address, timeout=30) as client:
        kind = "Content-Type: application/json\r\nContent-Length: 1000"
        client.sendall(f"POST /api/search HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\n\r\nabc".encode())
        reply = b""
        while part := client.recv(4096):
            reply += part
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.2 s" in reply


def test_names_in_another_encoding_and_other_formats_are_shown(tmp_path):
    """Regression test: one such name failed every search, and a GIF was left out without a word."""
    body = encoded(Image.new("RGB", (8, 8)), "GIF")
    (tmp_path / "b.gif").write_bytes(body)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.png")).write_bytes(body)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/c\xe9.png")).symlink_to("nowhere")
    samples, dropped = read(tmp_path)
    assert [sample.name for sample in samples] == ["b.gif", "caf\ufffd.png"]
    (line,) = dropped.lines()
    assert line.startswith("1 skipped: the file cannot be read (first: ")
    assert line.endswith("/c\ufffd.png: No such file or directory)")


def test_results_are_those_of_the_model(explorer):
    model = explorer.model
    assert (len(explorer.names), len(explorer.captions)) == (14, 4)
    found = explorer.search("a red fox", count=14)
    pixels = torch.stack([model.preprocess(open_image(body, name="")) for _, body in bodies(14)])
    by_name = dict(
        zip((f"{'a' if k % 2 else 'b'}/{k:02d}" for k in range(14)), model.encode_image(pixels), strict=True)
    )
    query = model.encode_text(model.tokenize(["a red fox"]))[0]
    for hit in found:
        assert hit["score"] == pytest.approx(float(by_name[hit["name"].split(".")[0]] @ query), abs=1e-4)
    assert [hit["score"] for hit in found] == sorted((hit["score"] for hit in found), reverse=True)
    drawn = explorer.some_images(count=12)
    assert len({hit["name"] for hit in drawn}) == 12
    assert all(explorer.names[hit["image"]] == hit["name"] for hit in drawn)
    assert len(explorer.some_images(count=60)) == 14
    image = explorer.add_upload(bodies(1)[0][1])
    vectors = class_vectors(model, CLASSES, TEMPLATES, compute=Compute(torch.device("cpu")), micro_batch=6)
    expected = torch.softmax(explorer.scale * (vectors @ by_name["b/00"]), 0)
    result = explorer.classify(image, CLASSES, TEMPLATES)
    assert {one["name"]: one["probability"] for one in result} == {
        name: pytest.approx(float(p), abs=1e-5) for name, p in zip(CLASSES, expected, strict=True)
    }
    assert explorer.nearest_captions("gallery:3", count=2)[0]["caption"] in CAPTIONS


def test_bad_requests_get_a_clear_answer(address, explorer):
    image = explorer.add_upload(bodies(1)[0][1])
    huge, vast = encoded(Image.new("1", (9000, 9000)), "PNG"), png(60_000, 60_000, data=b"", bits=8)
    size, most = "more than the 64,000,000 pixels allowed: make it smaller.", http_api.LARGEST_UPLOAD

    def classify(classes: object = CLASSES, templates: object = TEMPLATES, image: str = image) -> dict[str, object]:
        return {"image": image, "classes": classes, "templates": templates}

    uploads: list[tuple[bytes, int, str]] = [
        (b"", 400, "The file is empty."),
        (b"text", 400, "The file is not an image that can be read (PNG, JPEG, WebP and others)."),
        (bodies(4)[3][1][:150], 400, "The file is damaged: it cannot be decoded to its end."),
        (huge, 400, f"The file has 9000 x 9000, {size}"),
        (vast, 400, f"The file has 3600000000 pixels, {size}"),
        (bytes(most + 1), 413, "The file has more than 20 MiB: make it smaller."),
    ]
    searches: list[tuple[object, str]] = [
        ({"text": " "}, "Type the text first."),
        ({"text": "x" * 1001}, "The text has 1,001 characters; 1,000 are allowed."),
        *(({"text": "a", "count": n}, "count must be a number from 1 to 60.") for n in (10_000, True, 1.0, "3")),
        *((body, "The request is not JSON.") for body in (b"[", b"[" * 100_000)),
        (rb'{"text": "\udfff"}', "The request has text that is not Unicode."),
        ([1], "The request must be a JSON object."),
    ]
    unknown = "This image is not known any more: drop it again."
    classes: list[tuple[object, str]] = [
        (classify(["cat", "cat "]), "Give 2 to 1,000 different classes, one a line; these are 1."),
        (classify("cat"), "classes and templates must be lists of texts."),
        (classify(templates=["a photo"]), "The template 'a photo' needs {c} where the class name goes."),
        (classify(templates=[]), "Give 1 to 100 templates, one a line; these are 0."),
        *((classify(image=f"gallery:{number}"), unknown) for number in ("99", "9" * 5000, "\u00b2")),
        (classify(image="0" * 24), unknown),
    ]
    for body, status, message in uploads:
        assert ask(address, "/api/image", body) == (status, {"error": message})
    for path, cases in (("/api/search", searches), ("/api/classify", classes)):
        for asked, message in cases:
            assert ask(address, path, asked) == (400, {"error": message})
    for path in ("/image/99", "/image/" + "9" * 5000, "/image/x", "/../../etc/passwd"):
        assert ask(address, path)[0] == 404
    assert ask(address, "/image/0")[0] == 200


def test_only_this_machine_is_served_by_default(address):
    """Other pages cannot reach the server by a name of theirs that resolves to it; nothing is loaded from elsewhere."""
    assert ask(address, "/api/info", Host="attacker.example")[0] == 400
    assert ask(address, "/api/info", Host=f"localhost:{address[1]}")[0] == 200
    page = ask(address, "/")[1].decode()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_command_reports_mistakes_before_loading_anything(tmp_path):
    def fails(*arguments: str) -> str:
        done = CliRunner().invoke(job.command, list(arguments), standalone_mode=False)
        assert isinstance(done.exception, UserError), done.output
        return str(done.exception)

    checkpoint = str(save_checkpoint(tmp_path / "step-00000001", 0))
    gone = tmp_path / "gone"
    assert fails(checkpoint, "--images", str(gone)) == f"--images {gone}: there is no such file or folder."
    assert "nor json:FIELD" in fails(checkpoint, "--caption", "jpg")
    assert "neither --images nor --captions has shards" in fails(checkpoint, "--caption", "json:caption")
    write_shard(tmp_path / "captioned", CAPTIONS)
    message = fails(checkpoint, "--images", str(tmp_path / "captioned"), "--caption", "json:captoins")
    assert "--caption = 'json:captoins' is in none of the first samples" in message
    assert "Allowed: txt" in message
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port or --host" in fails(checkpoint, "--port", port)
    assert "neither a folder with" in fails(str(tmp_path / "nothing"), "--port", "0")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "x.png").write_bytes(b"no")
    assert "has no image that can be used. 1 skipped" in fails(checkpoint, "--images", str(bad), "--port", "0")


def test_the_command_offers_the_classes_of_a_suite(tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    for number, name in enumerate(("mug", "t_shirt")):
        (photos / name).mkdir(parents=True)
        (photos / name / "1.png").write_bytes(bodies(4)[number + 2][1])
    text = (
        "products: {name: Our products, folder: photos, classnames: {t_shirt: T-shirt}, templates: ['a {c} for sale']}"
    )
    (tmp_path / "tasks.yaml").write_text(text + "\nbroken: {folder: gone}\n")
    served: list[Explorer] = []
    monkeypatch.setattr(http_api, "make_app", lambda explorer, **options: served.append(explorer) or options)
    monkeypatch.setattr(http_api, "serve", lambda app, listening: None)
    arguments = [str(save_checkpoint(tmp_path / "step-00000001", 0)), "--suite", str(tmp_path / "tasks.yaml")]
    (tmp_path / "captions.txt").write_text("one\ntwo\n")
    arguments += ["--images", str(photos), "--captions", str(tmp_path / "captions.txt"), "--port", "0"]
    arguments += ["--device", "cpu"]
    done = CliRunner().invoke(job.command, arguments, standalone_mode=False)
    assert done.exception is None, done.output
    assert served[0].class_sets == (ClassSet("Our products", ("mug", "T-shirt"), ("a {c} for sale",)),)
    assert "broken is left out: There is no folder" in done.output
    assert "2 images, 2 captions. Playground: http://127.0.0.1:" in done.output
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
            tab.wait_for_selector("#facts li")
            assert tab.inner_text("h1") == "run, step-00000010"
            assert tab.input_value("#classes") == "\n".join(CLASSES)
            tab.wait_for_selector(".hit img")
            assert tab.locator(".hit").count() == 12, "images at random"
            tab.fill("#text", "a red fox")
            tab.click("#search button")
            tab.wait_for_selector(".hit .score")
            assert tab.locator(".hit").count() == 12
            tab.locator(".hit").first.click()
            tab.wait_for_selector("#captions li")
            tab.wait_for_selector("#probabilities li")
            assert not said
            tab.set_input_files("#file", bad)
            tab.wait_for_selector("#image-error:visible")
            assert "is not an image that can be read" in tab.inner_text("#image-error")
            tab.set_input_files("#file", good)
            tab.get_by_text("good.png", exact=True).wait_for()
            assert tab.locator("#sets option:checked").inner_text() == "animals (3 classes)"
            tab.fill("#classes", "a fox\na cat")
            assert tab.locator("#sets option:checked").inner_text() == "own classes"
            tab.click("#classify")
            tab.locator("#probabilities li", has_text="a fox").wait_for()
            assert tab.locator("#probabilities li").count() == 2
            assert tab.locator("#image-error").is_hidden()
            assert problems(tab, width=width) == []
            said.clear()  # the browser logs the refused upload
            tab.close()
