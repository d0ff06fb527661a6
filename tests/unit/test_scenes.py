"""The built-in corpus: determinism, the misbehaving server, the URL table."""

from __future__ import annotations

import hashlib
import http.client
import io
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep.scenes.caption import curated, web
from data_prep.scenes.published import Fault, fault_of, published, sha256, write_url_table
from data_prep.scenes.published import url as scene_url
from data_prep.scenes.render import draw, jpeg
from data_prep.scenes.scene import FaultRates, ScenesConfig, describe
from data_prep.scenes.server import serve_scenes
from pipeline.errors import UserError
from tests.launch import python, wait_for

EVEN = FaultRates(**dict.fromkeys(FaultRates.__dataclass_fields__, 1 / 14))
CONFIG = ScenesConfig(pairs=200, image_size=48, faults=EVEN, slow_seconds=0.05, stall_seconds=3.0)
NO_FAULTS = FaultRates(**dict.fromkeys(FaultRates.__dataclass_fields__, 0.0))


def test_generation_is_deterministic_and_depends_on_the_seed() -> None:
    other = ScenesConfig(pairs=200, image_size=48, seed=1)
    assert [jpeg(CONFIG, i) for i in (3, 7)] == [jpeg(CONFIG, i) for i in (7, 3)][::-1]
    assert [web(CONFIG, i) for i in range(50)] == [web(CONFIG, i) for i in range(50)]
    assert [describe(CONFIG, i) for i in range(50)] != [describe(other, i) for i in range(50)]


def test_another_process_draws_the_same_bytes() -> None:
    """String hashes are randomized per process; the corpus must not depend on them."""
    code = (
        "import hashlib; from data_prep.scenes.scene import ScenesConfig; from data_prep.scenes.render import jpeg;"
        "from data_prep.scenes.caption import web; c = ScenesConfig(image_size=48);"
        "print(hashlib.sha256(b''.join(jpeg(c, i) + web(c, i).encode() for i in range(40))).hexdigest())"
    )
    first, second = (python("-c", code, PYTHONHASHSEED=salt).stdout for salt in ("1", "2"))
    assert first == second != ""


def test_images_follow_the_config() -> None:
    image = draw(CONFIG, 0)
    assert image.size == (48, 48)
    assert image.mode == "RGB"
    assert len({draw(CONFIG, i).tobytes() for i in range(60)}) == 60


def test_frequencies_have_a_head_and_a_tail() -> None:
    scenes = [describe(CONFIG, i) for i in range(4_000)]
    colours = Counter(scene.item.colour for scene in scenes)
    assert colours["red"] > 2.5 * colours["grey"] > 0
    repeats = Counter(scenes).most_common()
    assert repeats[0][1] > 10, "the stock motifs should make some scenes frequent"
    assert sum(count == 1 for _, count in repeats) > 1_000, "most scenes should be rare"
    assert {scene.count for scene in scenes} == {1, 2, 3, 4, 5}
    assert all((scene.relation is None) == (scene.other is None) for scene in scenes)


def test_curated_captions_are_more_complete_than_web_captions() -> None:
    config = ScenesConfig(noise=0.0)
    full = sum(len(curated(config, i).split()) for i in range(300))
    short = sum(len(web(config, i).split()) for i in range(300))
    assert full > 1.1 * short
    noisy = ScenesConfig(noise=1.0)
    changed = sum(web(config, i) != web(noisy, i) for i in range(300))
    assert changed > 270  # some alterations (title case of "...") leave a caption unchanged


def test_every_fault_occurs_at_its_rate() -> None:
    counts = Counter(fault_of(CONFIG, index) for index in range(14_000))
    assert set(counts) == set(Fault)
    assert all(abs(count - 1_000) < 150 for count in counts.values())
    assert {fault_of(ScenesConfig(faults=NO_FAULTS), index) for index in range(500)} == {Fault.NONE}


def _first(fault: Fault) -> int:
    return next(index for index in range(10_000) if fault_of(CONFIG, index) is fault)


def _get(address: str, timeout: float = 2.0) -> tuple[int, bytes, str]:
    try:
        with urllib.request.urlopen(address, timeout=timeout) as answer:
            return answer.status, answer.read(), answer.headers.get("X-Robots-Tag", "")
    except urllib.error.HTTPError as error:
        return error.code, error.read(), ""


@pytest.fixture(scope="module")
def base() -> str:
    with serve_scenes(CONFIG) as address:
        yield address


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.SLOW, Fault.NOAI, Fault.TRUNCATED])
def test_served_bytes_are_the_published_ones(base: str, fault: Fault) -> None:
    status, body, robots = _get(scene_url(base, CONFIG, _first(fault)))
    assert (status, body) == (200, published(CONFIG, _first(fault)))
    assert hashlib.sha256(body).hexdigest() == sha256(CONFIG, _first(fault))
    assert ("noai" in robots) == (fault is Fault.NOAI)
    assert (body[-2:] == b"\xff\xd9") == (fault is not Fault.TRUNCATED)


@pytest.mark.parametrize(("fault", "code"), [(Fault.NOT_FOUND, 404), (Fault.FORBIDDEN, 403), (Fault.GONE, 410)])
def test_error_status_codes(base: str, fault: Fault, code: int) -> None:
    assert _get(scene_url(base, CONFIG, _first(fault)))[0] == code


def test_invalid_response_bodies(base: str) -> None:
    assert _get(scene_url(base, CONFIG, _first(Fault.HTML)))[1].startswith(b"<!doctype html>")
    wrong = _first(Fault.WRONG_HASH)
    body = _get(scene_url(base, CONFIG, wrong))[1]
    Image.open(io.BytesIO(body)).load()
    assert hashlib.sha256(body).hexdigest() != sha256(CONFIG, wrong)
    huge = Image.open(io.BytesIO(_get(scene_url(base, CONFIG, _first(Fault.OVERSIZE)))[1]))
    assert huge.size == (6_000, 6_000)


def test_broken_connections(base: str) -> None:
    with pytest.raises(http.client.RemoteDisconnected):
        _get(scene_url(base, CONFIG, _first(Fault.DISCONNECT)))
    with pytest.raises(http.client.IncompleteRead):
        _get(scene_url(base, CONFIG, _first(Fault.INCOMPLETE)))
    with pytest.raises(TimeoutError):
        _get(scene_url(base, CONFIG, _first(Fault.STALL)), timeout=0.5)


def test_a_transient_fault_goes_away(base: str) -> None:
    address = scene_url(base, CONFIG, _first(Fault.TRANSIENT))
    assert _get(address)[0] == 503
    assert _get(address)[0] == 200


def test_unknown_paths(base: str) -> None:
    for path in ("/", "/scenes/0/x.jpg", "/scenes/9/1.jpg", "/scenes/0/1.png", "/scenes/0/-1.jpg"):
        assert _get(base + path)[0] == 404


def test_connections_are_kept_alive(base: str) -> None:
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=5)
    good = [index for index in range(100) if fault_of(CONFIG, index) is Fault.NONE][:3]
    for index in good:
        connection.request("GET", f"/scenes/0/{index}.jpg")
        assert connection.getresponse().read() == jpeg(CONFIG, index)
    connection.close()


def test_server_stops_when_the_with_block_exits_even_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="boom"), serve_scenes(CONFIG) as address:
        raise RuntimeError("boom")
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=1)


def test_server_stops_when_its_parent_is_killed() -> None:
    code = (
        "import sys\nfrom data_prep.scenes.scene import ScenesConfig\n"
        "from data_prep.scenes.server import serve_scenes\n"
        "with serve_scenes(ScenesConfig()) as base:\n    print(base, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    address = parent.stdout.readline().strip()
    assert _get(address)[0] == 404
    parent.send_signal(signal.SIGKILL)
    parent.wait()

    def gone() -> bool:
        try:
            return not _get(address)
        except (urllib.error.URLError, ConnectionError):
            return True

    wait_for(gone, "the server ends with its parent", seconds=10)


def test_the_error_names_an_occupied_port(base: str) -> None:
    port = int(base.rpartition(":")[2])
    with pytest.raises(UserError, match=f"{port}: Address already in use"), serve_scenes(CONFIG, port=port):
        pass


def test_url_table(tmp_path, base: str) -> None:
    write_url_table(CONFIG, base, tmp_path / "one.parquet")
    table = pq.read_table(tmp_path / "one.parquet")
    assert table.num_rows == CONFIG.pairs
    assert table.column_names == ["uid", "url", "caption", "sha256", "original_width", "original_height"]
    assert len(set(table["uid"].to_pylist())) == CONFIG.pairs
    write_url_table(CONFIG, "http://127.0.0.1:1", tmp_path / "two.parquet", processes=2)
    again = pq.read_table(tmp_path / "two.parquet")
    assert again.drop_columns(["url"]).equals(table.drop_columns(["url"]))
    unanswered = {Fault.NOT_FOUND, Fault.FORBIDDEN, Fault.GONE, Fault.TRUNCATED, Fault.INCOMPLETE, Fault.DISCONNECT}
    unanswered |= {Fault.STALL, Fault.TRANSIENT}
    wrong = 0
    for index, row in enumerate(table.to_pylist()):
        if fault_of(CONFIG, index) in unanswered:
            continue
        status, body, _ = _get(row["url"])
        assert status == 200
        wrong += hashlib.sha256(body).hexdigest() != row["sha256"]
    counts = Counter(fault_of(CONFIG, index) for index in range(CONFIG.pairs))
    assert wrong == counts[Fault.WRONG_HASH] + counts[Fault.HTML] > 0


def test_the_corpus_can_be_served_from_the_command_line(tmp_path: Path) -> None:
    table = tmp_path / "urls.parquet"
    command = [sys.executable, "-u", "-m", "data_prep.scenes", "--table", str(table), "--pairs", "20"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
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
