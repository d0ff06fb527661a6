"""The same list gives the same bytes with every distributor of img2dataset."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.ingest import download
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import parse
from tests.web import jpeg, send, serve

ROWS, SHARD = 60, 10


@pytest.mark.slow
@pytest.mark.parametrize("distributor", ["pyspark", "ray"])
def test_every_distributor_gives_the_same_manifest(
    distributor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(distributor, reason="needs the extra `scale`")
    if distributor == "pyspark" and not (shutil.which("java") or os.environ.get("JAVA_HOME")):
        pytest.skip("Spark needs a Java (17 or later)")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")  # the machine's host name might not resolve
    with serve() as site:
        for k in range(ROWS):
            site.image(f"/{k}", jpeg(side=16 + k))
        for k in range(0, ROWS, 6):
            site.answers[f"/{k}"] = lambda handler: send(handler, 404, b"")
        columns = {"url": [f"{site.base}/{k}" for k in range(ROWS)], "caption": [f"picture {k}" for k in range(ROWS)]}
        pq.write_table(pa.table(columns), tmp_path / "urls.parquet")
        made = {}
        for name in ("multiprocessing", distributor):
            tree = {
                "output": str(tmp_path / name),
                "source": {"table": str(tmp_path / "urls.parquet")},
                "guard": {"allow_addresses": ["127.0.0.1"], "contact": "x@example.org"},
                "fetch": {"distributor": name, "shard_size": SHARD, "threads": 4, "processes": 2},
            }
            made[name] = download(parse(DownloadConfig, tree))
    assert made[distributor].digest == made["multiprocessing"].digest
    assert made[distributor].failures == {"http 404": 10}
    assert made[distributor].n == ROWS - 10
