"""The built-in corpus and its held-out suite: the same bytes for a configuration, faults at their rates, reuse."""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections import Counter

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.scenes import server
from data_prep.scenes.caption import web
from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import HELD_OUT_START, FaultRates, ScenesConfig, describe
from data_prep.scenes.scene_suite import ATTRIBUTES, label_of, write_suite
from data_prep.scenes.server import Fault, corpus_digest, fault_of, published, serve_scenes, url, write_url_table
from jobs.demo import check_corpus
from pipeline.errors import UserError
from tests.launch import python, wait_for

EVEN = FaultRates(**dict.fromkeys(FaultRates.__dataclass_fields__, 1 / 14))
CONFIG = ScenesConfig(pairs=200, image_size=48, faults=EVEN, slow_seconds=0.05, stall_seconds=3.0)


class Crashing:
    """Ends the process that it is sent to."""

    def __reduce__(self):
        return os._exit, (3,)


def drawn() -> str:
    """A digest of some images and captions."""
    config = ScenesConfig(image_size=48)
    return hashlib.sha256(b"".join(jpeg(config, i) + web(config, i).encode() for i in range(40))).hexdigest()


def test_another_process_draws_the_same_bytes():
    """String hashes are randomized per process; the corpus must not depend on them."""
    assert python("-c", "from tests.unit.test_scenes import drawn; print(drawn())").stdout.strip() == drawn()


def test_frequencies_have_a_head_and_a_tail():
    scenes = [describe(CONFIG, i) for i in range(4_000)]
    colours = Counter(scene.item.colour for scene in scenes)
    assert colours["red"] > 2.5 * colours["grey"] > 0
    repeats = Counter(scenes).most_common()
    assert repeats[0][1] > 10, "the stock motifs should make some scenes frequent"
    assert sum(count == 1 for _, count in repeats) > 1_000, "most scenes should be rare"
    assert {scene.count for scene in scenes} == {1, 2, 3, 4, 5}
    assert all((scene.relation is None) == (scene.other is None) for scene in scenes)
    counts = Counter(fault_of(CONFIG, index) for index in range(14_000))
    assert set(counts) == set(Fault)
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
    first = {fault: next(k for k in range(10_000) if fault_of(CONFIG, k) is fault) for fault in Fault}

    def served(fault, timeout=2.0):
        return get(url(base, CONFIG, first[fault]), timeout)

    for fault in (Fault.NONE, Fault.SLOW, Fault.NOAI, Fault.TRUNCATED):
        status, body, robots = served(fault)
        assert (status, body) == (200, published(CONFIG, first[fault]))
        assert ("noai" in robots) == (fault is Fault.NOAI)
        assert (body[-2:] == b"\xff\xd9") == (fault is not Fault.TRUNCATED)
    for fault, code in ((Fault.NOT_FOUND, 404), (Fault.FORBIDDEN, 403), (Fault.GONE, 410)):
        assert served(fault)[0] == code
    assert served(Fault.HTML)[1].startswith(b"<!doctype html>")
    wrong = served(Fault.WRONG_HASH)[1]
    Image.open(io.BytesIO(wrong)).load()
    assert wrong != published(CONFIG, first[Fault.WRONG_HASH])
    assert Image.open(io.BytesIO(served(Fault.OVERSIZE)[1])).size == (6_000, 6_000)
    assert [served(Fault.TRANSIENT)[0] for _ in range(2)] == [503, 200]
    for fault, error in ((Fault.DISCONNECT, http.client.RemoteDisconnected), (Fault.INCOMPLETE,
                         http.client.IncompleteRead), (Fault.STALL, TimeoutError)):  # fmt: skip
        with pytest.raises(error):
            served(fault, timeout=0.5 if fault is Fault.STALL else 2.0)
    port = int(base.rpartition(":")[2])
    for config, words in ((CONFIG, f"{port}: Address already in use"), (Crashing(), f"{port}: exit code 3")):
        with pytest.raises(UserError, match=words), serve_scenes(config, port=port):
            pass


def test_server_stops_when_its_parent_is_killed():
    code = (
        "import sys\nfrom data_prep.scenes.scene import ScenesConfig\n"
        "from data_prep.scenes.server import serve_scenes\n"
        "with serve_scenes(ScenesConfig()) as base:\n    print(base, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address = parent.stdout.readline().strip()
    assert get(address)[0] == 404
    parent.send_signal(signal.SIGKILL)
    parent.wait()

    def gone():
        try:
            return not get(address)
        except (urllib.error.URLError, ConnectionError):
            return True

    wait_for(gone, "the server ends with its parent", seconds=10)


def test_url_table(tmp_path):
    write_url_table(CONFIG, "http://127.0.0.1:1", tmp_path / "one.parquet")
    write_url_table(CONFIG, "http://127.0.0.1:2", tmp_path / "two.parquet", processes=2)
    one, two = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert one.column_names == ["uid", "url", "caption", "sha256", "original_width", "original_height"]
    assert two.drop_columns(["url"]).equals(one.drop_columns(["url"]))
    assert len(set(one["uid"].to_pylist())) == one.num_rows == CONFIG.pairs
    for index, row in enumerate(one.to_pylist()):
        assert row["url"] == url("http://127.0.0.1:1", CONFIG, index)
        assert row["sha256"] == hashlib.sha256(published(CONFIG, index)).hexdigest()


def test_the_corpus_can_be_served_from_the_command_line(tmp_path):
    table = tmp_path / "urls.parquet"
    command = [sys.executable, "-u", "-m", "data_prep.scenes", "--table", str(table), "--pairs", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("20 URLs on http://127.0.0.1:")
            urls = pq.read_table(table).column("url").to_pylist()
            assert len(urls) == 20
            good = next(n for n in range(20) if fault_of(ScenesConfig(), n) is Fault.NONE)
            assert urllib.request.urlopen(urls[good], timeout=10).read(2) == b"\xff\xd8"
        finally:
            process.send_signal(signal.SIGINT)
        assert process.stdout.read().endswith("Stopped.\n")
    assert process.returncode == 0


SUITE_CONFIG = ScenesConfig(pairs=2_000, image_size=32, held_out=90, retrieval_pairs=1_010)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    assert write_suite(SUITE_CONFIG, folder) == [*(f"scenes/{name}" for name in ATTRIBUTES), "scenes/retrieval"]
    return folder


def members_of(folder):
    found = {}
    for shard in range(int((folder / "test" / "nshards.txt").read_text())):
        with tarfile.open(folder / "test" / f"{shard}.tar") as tar:
            found.update({member.name: tar.extractfile(member).read() for member in tar})
    return found


def test_zero_shot_sets(suite):
    by_bytes = {jpeg(SUITE_CONFIG, index): index for index in range(HELD_OUT_START, HELD_OUT_START + 400)}
    facts = json.loads((suite / "suite.json").read_text())["tasks"]
    for name, (table, _) in ATTRIBUTES.items():
        folder = suite / f"wds_scenes-{name}_test"
        classes = (folder / "classnames.txt").read_text().splitlines()
        templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
        assert len(classes) == len(set(classes)) == len(table)
        assert all("{c}" in template for template in templates)
        members = members_of(folder)
        labels = Counter(int(body) for key, body in members.items() if key.endswith(".cls"))
        assert sum(labels.values()) == 90
        assert max(labels.values()) - min(labels.values()) <= 1
        assert sorted(labels) == list(range(len(classes)))
        assert sorted(members)[:2] == ["s0000000.cls", "s0000000.jpg"]
        assert Image.open(io.BytesIO(members["s0000000.jpg"])).size == (32, 32)
        known = {key: by_bytes[body] for key, body in members.items() if body in by_bytes}
        assert name == "relation" or len(known) > 40
        for key, index in known.items():
            label = int(members[key.replace(".jpg", ".cls")])
            assert list(table)[label] == label_of(describe(SUITE_CONFIG, index), name)
        digest = hashlib.sha256((folder / "test/0.tar").read_bytes()).hexdigest()
        assert facts[f"scenes/{name}"]["sha256"] == {"test/0.tar": digest}
        assert facts[f"scenes/{name}"]["chance"] == 1 / len(classes)


def test_the_retrieval_set_has_captions_and_scenes_of_its_own(suite):
    folder = suite / "wds_scenes-retrieval_test"
    assert (folder / "dataset_type.txt").read_text().strip() == "retrieval"
    members = members_of(folder)
    captions = [body.decode() for key, body in members.items() if key.endswith(".txt")]
    assert len(captions) == len(set(captions)) == 1_010
    assert (folder / "test" / "nshards.txt").read_text().strip() == "2"
    assert "s0001000.jpg" in members, "keys continue across shards"
    training = {describe(SUITE_CONFIG, index) for index in range(SUITE_CONFIG.pairs)}
    by_bytes = {jpeg(SUITE_CONFIG, index): index for index in range(HELD_OUT_START, HELD_OUT_START + 1_600)}
    scenes = [describe(SUITE_CONFIG, by_bytes[body]) for body in members.values() if body in by_bytes]
    assert len(scenes) > 900
    assert len(set(scenes)) == len(scenes)
    assert not training & set(scenes)
    facts = json.loads((suite / "suite.json").read_text())["tasks"]
    assert facts["scenes/retrieval"]["excluded"]["in_training"] > 0


SCENES = ScenesConfig(pairs=1000)


def test_a_demo_refuses_the_data_of_another_corpus(tmp_path):
    data, run = tmp_path / "demo-data", tmp_path / "demo"
    check_corpus(SCENES, data, run)
    (data / "suite").mkdir()
    check_corpus(SCENES, data, run)
    mark = (data / "corpus.sha256").read_text()
    assert mark.strip() != corpus_digest(SCENES)  # the digest covers the recipe, too
    for other in ({"pairs": 2000}, {"seed": 1}):
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
