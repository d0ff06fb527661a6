"""Ingestion from a server that misbehaves like the web: every URL is accounted for, and no bad sample is stored."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from data_prep import reasons
from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.statistics import take_census
from data_prep.ingest import download
from data_prep.scenes.published import Fault, fault_of, write_url_table
from data_prep.scenes.scene import FaultRates, ScenesConfig
from data_prep.scenes.server import serve_scenes
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import parse
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.data.shards.tar_reader import CaptionField
from pipeline.files import sha256_of

PAIRS, SHARD = 240, 100
RATES = {fault.value: 0.03 for fault in Fault if fault not in (Fault.NONE, Fault.OVERSIZE, Fault.STALL)}
FAULTS = FaultRates(**RATES, oversize=0.01, stall=0.01)
SCENES = ScenesConfig(pairs=PAIRS, image_size=48, faults=FAULTS, stall_seconds=8, slow_seconds=0.2)
REASONS = {
    Fault.NOT_FOUND: "http 404",
    Fault.FORBIDDEN: "http 403",
    Fault.GONE: "http 410",
    Fault.TRUNCATED: reasons.TRUNCATED,
    Fault.INCOMPLETE: reasons.CUT_OFF,
    Fault.HTML: reasons.NOT_AN_IMAGE,
    Fault.WRONG_HASH: reasons.HASH_MISMATCH,
    Fault.OVERSIZE: reasons.TOO_MANY_PIXELS,
    Fault.DISCONNECT: reasons.CONNECTION,
    Fault.STALL: reasons.TIMEOUT,
    Fault.NOAI: reasons.OPTED_OUT,
}


@dataclass
class World:
    table: Path
    base: str

    def config(self, output: Path) -> DownloadConfig:
        guard = {"allow_addresses": ["127.0.0.1"], "contact": "test@example.org", "max_pixels": 1_000_000}
        tree = {
            "output": str(output),
            "source": {"name": "scenes", "table": str(self.table)},
            "guard": {**guard, "backoff": 0.05},
            "fetch": {"shard_size": SHARD, "timeout": 3, "total_timeout": 6},
        }
        return parse(DownloadConfig, tree)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    table = tmp_path_factory.mktemp("table") / "urls.parquet"
    with serve_scenes(SCENES) as base:
        write_url_table(SCENES, base, table)
        yield World(table, base)


@pytest.fixture(scope="session")
def ingested(world: World, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return download(world.config(tmp_path_factory.mktemp("ingested")))


def test_every_fault_is_counted_under_its_reason(ingested: Manifest) -> None:
    faults = Counter(fault_of(SCENES, index) for index in range(PAIRS))
    assert set(REASONS) <= set(faults), "the seed must produce every fault at least once"
    expected = Counter({reason: faults[fault] for fault, reason in REASONS.items()})
    assert Counter(ingested.failures) == expected
    assert ingested.n == PAIRS - expected.total()
    assert load_manifest(ingested.root) == ingested


def test_shards_contain_exactly_the_good_samples(ingested: Manifest) -> None:
    good = {index for index in range(PAIRS) if fault_of(SCENES, index) not in REASONS}
    captions = pq.read_table(Path(ingested.root) / "plan" / "part-00000.parquet", columns=["caption"])["caption"]
    found = {}
    for shard in ingested.shards:
        assert sha256_of(ingested.url(shard)) == shard.sha256
        samples = list(canonical_tar.samples(ingested.url(shard)))
        assert len(samples) == shard.samples
        found.update({int(key): parts for key, parts in samples})
    assert set(found) == good
    for index, parts in found.items():
        with Image.open(io.BytesIO(parts["jpg"])) as image:
            image.load()
            assert image.size == (48, 48)
        assert parts["txt"].decode() == captions[index].as_py()
        assert json.loads(parts["json"])["url"].endswith(f"/{index}.jpg")


def test_report_and_datasheet_account_for_every_url(ingested: Manifest) -> None:
    page = write_report(ingested.root).read_text()
    sheet = (Path(ingested.root) / "datasheet.md").read_text()
    for reason, count in ingested.failures.items():
        assert f"<td>{reason}<" in page
        assert f"| {reason} | {count} |" in sheet
    assert page.count("<figure>") >= 18
    assert "src=" not in page.replace('src="data:', ""), "the page is self-contained"
    assert ingested.digest in page
    assert ingested.digest in sheet
    census = take_census(Folder(Path(ingested.root)), ingested, CaptionField())
    assert {reason: parts.sum() for reason, parts in census.reasons.items()} == ingested.failures
    assert census.served_sides.sum() == census.caption_words.sum() == ingested.n
    assert census.hosts == {"127.0.0.1": PAIRS}


def test_meta_records_the_outcome_of_every_url(ingested: Manifest) -> None:
    rows = [
        row for path in sorted(Path(ingested.root).glob("meta/*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    assert [row["row"] for row in rows] == list(range(PAIRS))
    for row in rows:
        assert row["reason"] == REASONS.get(fault_of(SCENES, row["row"]))
        assert (row["status"] == "success") == (row["reason"] is None)
