"""The built-in corpus and its held-out suite: the same bytes for a configuration, faults at their rates, reuse."""

import dataclasses
import hashlib
import http.client
import io
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.dataset import canonical_tar
from data_prep.scenes import server
from data_prep.scenes.caption import curated, web
from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import FAULTS, HELD_OUT_START, ScenesConfig, describe
from data_prep.scenes.scene_suite import ATTRIBUTES, label_of, write_suite
from data_prep.scenes.server import corpus_digest, fault_of, published, serve_scenes, url, write_url_table
from jobs.demo import check_corpus
from pipeline.errors import UserError
from pipeline.files import sha256_of
from tests.launch import wait_for

NAMES = [name for name, _ in FAULTS]
DRAWN = "24aa5a10212c4bd8a690a07a1c576f29e4f426c76aac569f2e90a24438c8d612"
CONFIG = ScenesConfig(pairs=200, image_size=48, faults=tuple((name, 1 / 14) for name in NAMES))


def test_the_corpus_is_the_same_everywhere():
    """What the demo's digits, the studies' tables and their images rest on."""
    drawn = "".join(f"{web(k)} {curated(k)} {describe(k)}\n" for k in range(300))
    assert hashlib.sha256(drawn.encode()).hexdigest() == DRAWN
    counts = Counter(fault_of(CONFIG, index) for index in range(14_000))
    assert set(counts) == {*NAMES, ""}
    assert all(abs(count - 1_000) < 150 for count in counts.values())


def get(address, timeout=2.0):
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            return answer.status, answer.read(), answer.headers.get("X-Robots-Tag", "")
    except urllib.error.HTTPError as error:
        return error.code, error.read(), ""


@pytest.fixture(scope="module")
def base():
    with serve_scenes(CONFIG) as address:
        yield address


def test_every_fault_is_served(base):
    first = {name: next(k for k in range(10_000) if fault_of(CONFIG, k) == name) for name in (*NAMES, "")}

    def served(fault, timeout=2.0):
        return get(url(base, first[fault]), timeout)

    for fault in ("", "slow", "noai", "truncated"):
        status, body, robots = served(fault)
        assert (status, body) == (200, published(CONFIG, first[fault]))
        assert ("noai" in robots) == (fault == "noai")
        assert (body[-2:] == b"\xff\xd9") == (fault != "truncated")
    assert [served(fault)[0] for fault in ("not_found", "forbidden", "gone")] == [404, 403, 410]
    assert served("html")[1].startswith(b"<!doctype html>")
    wrong = served("wrong_hash")[1]
    Image.open(io.BytesIO(wrong)).load()
    assert wrong != published(CONFIG, first["wrong_hash"])
    assert Image.open(io.BytesIO(served("oversize")[1])).size == (6_000, 6_000)
    assert [served("transient")[0] for _ in range(2)] == [503, 200]
    for fault, error in (("disconnect", http.client.RemoteDisconnected), ("incomplete", http.client.IncompleteRead),
                         ("stall", TimeoutError)):  # fmt: skip
        with pytest.raises(error):
            served(fault, timeout=0.5 if fault == "stall" else 2.0)
    port = int(base.rpartition(":")[2])
    with pytest.raises(UserError, match=f"{port} cannot be used: Address already in use"):
        serve_scenes(CONFIG, port=port).__enter__()


def test_url_table(tmp_path):
    write_url_table(CONFIG, "http://127.0.0.1:1", tmp_path / "urls.parquet")
    one = pq.read_table(tmp_path / "urls.parquet")
    assert one.column_names == ["uid", "url", "caption", "sha256", "original_width", "original_height"]
    assert len(set(one["uid"].to_pylist())) == one.num_rows == CONFIG.pairs
    for index, row in enumerate(one.to_pylist()):
        assert row["url"] == url("http://127.0.0.1:1", index)
        assert row["sha256"] == hashlib.sha256(published(CONFIG, index)).hexdigest()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_corpus_is_served_until_the_command_ends(tmp_path, number):
    table = tmp_path / "urls.parquet"
    command = [sys.executable, "-u", "-m", "data_prep.scenes", "--table", str(table), "--pairs", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("20 URLs on http://127.0.0.1:")
            urls = pq.read_table(table).column("url").to_pylist()
            good = next(n for n in range(20) if not fault_of(ScenesConfig(), n))
            assert (len(urls), get(urls[good], timeout=10)[1][:2]) == (20, b"\xff\xd8")
        finally:
            process.send_signal(number)
        process.wait()
        assert (process.returncode, "Stopped." in process.stdout.read()) in ((0, True), (-signal.SIGKILL, False))

    def gone():
        try:
            return not get(urls[good])
        except OSError:
            return True

    wait_for(gone, "the server ends with its parent", seconds=10)


def test_the_suite_has_balanced_classes_and_scenes_of_its_own(tmp_path):
    config = ScenesConfig(pairs=2_000, image_size=32, held_out=90, retrieval_pairs=1_010)
    assert write_suite(config, tmp_path) == [*(f"scenes/{name}" for name in ATTRIBUTES), "scenes/retrieval"]
    by_bytes = {jpeg(config, index): index for index in range(HELD_OUT_START, HELD_OUT_START + 1_600)}
    training = {describe(index) for index in range(config.pairs)}
    facts = json.loads((tmp_path / "suite.json").read_text())["tasks"]
    for name, (table, _) in [*ATTRIBUTES.items(), ("retrieval", ((), ()))]:
        folder, count = tmp_path / f"wds_scenes-{name}_test", 90 if table else 1_010
        shards = int((folder / "test/nshards.txt").read_text())
        samples = [one for k in range(shards) for one in canonical_tar.samples(folder / f"test/{k}.tar")]
        assert [key for key, _ in samples] == [f"s{k:07d}" for k in range(count)]  # continued across shards
        digests = {f"test/{k}.tar": sha256_of(folder / f"test/{k}.tar") for k in range(shards)}
        assert facts[f"scenes/{name}"]["sha256"] == digests
        assert facts[f"scenes/{name}"]["chance"] == 1 / (len(table) or count)
        scenes = {k: describe(by_bytes[parts["jpg"]]) for k, (_, parts) in enumerate(samples)
                  if parts["jpg"] in by_bytes}  # fmt: skip
        assert name == "relation" or len(scenes) > 40
        assert not training & set(scenes.values())
        assert len(set(scenes.values())) == len(scenes)
        if table:
            classes = (folder / "classnames.txt").read_text().splitlines()
            assert len(set(classes)) == len(table)
            assert "{c}" in (folder / "zeroshot_classification_templates.txt").read_text()
            labels = [int(parts["cls"]) for _, parts in samples]
            counts = Counter(labels)
            assert sorted(counts) == list(range(len(table)))
            assert max(counts.values()) - min(counts.values()) <= 1
            assert all(list(table)[labels[k]] == label_of(scene, name) for k, scene in scenes.items())
        else:
            assert (folder / "dataset_type.txt").read_text().strip() == "retrieval"
            assert (shards, len({parts["txt"] for _, parts in samples})) == (2, 1_010)
            assert facts["scenes/retrieval"]["excluded"]["in_training"] > 0


SCENES = ScenesConfig(pairs=1000)


def test_a_demo_refuses_the_data_of_another_corpus(tmp_path):
    data, run = tmp_path / "demo-data", tmp_path / "demo"
    check_corpus(SCENES, data, run)
    (data / "suite").mkdir()
    check_corpus(SCENES, data, run)
    mark = (data / "corpus.sha256").read_text()
    assert mark.strip() != corpus_digest(SCENES)  # the digest covers the recipe, too
    for other in ({"pairs": 2000}, {"image_size": 64}):
        with pytest.raises(UserError, match=f"{data} holds a corpus of other settings.*output=FOLDER"):
            check_corpus(dataclasses.replace(SCENES, **other), data, run)
    assert (data / "corpus.sha256").read_text() == mark
    (data / "corpus.sha256").unlink()
    with pytest.raises(UserError, match="other settings"):
        check_corpus(SCENES, data, run)


def test_code_is_part_of_the_version(tmp_path, monkeypatch):
    before = corpus_digest(SCENES)
    package = tmp_path / "scenes"
    package.mkdir()
    for path in (server.Path(server.__file__).parent).glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(server, "__file__", str(package / "server.py"))
    assert corpus_digest(SCENES) == before, "the location of the code must not change the digest"
    (package / "render.py").write_text("# other pictures\n")
    assert corpus_digest(SCENES) != before
