"""The same list gives the same bytes with every distributor of img2dataset."""

import importlib.util
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import ingest
from tests.downloads import download_config
from tests.ingested import fetch_in_process, own_opener  # noqa: F401 (a fixture)
from tests.web import jpeg, serve

ROWS, SHARD = 60, 10


@pytest.mark.daily
@pytest.mark.slow
def test_every_distributor_gives_the_same_manifest(tmp_path, monkeypatch):
    has_java = bool(shutil.which("java") or os.environ.get("JAVA_HOME"))  # Spark needs one, 17 or later
    others = [name for name in ("pyspark", "ray") if importlib.util.find_spec(name) and (name == "ray" or has_java)]
    if not others:
        pytest.skip("needs the extra `scale`, and for Spark a Java")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with serve() as site:
        for k in range(ROWS):
            if k % 6:
                site.image(f"/{k}", jpeg(side=16 + k))
        columns = {"url": [f"{site.base}/{k}" for k in range(ROWS)], "caption": [f"picture {k}" for k in range(ROWS)]}
        pq.write_table(pa.table(columns), tmp_path / "urls.parquet")
        made = {}
        for name in (*others, "multiprocessing"):
            if name == "multiprocessing":
                monkeypatch.setattr(ingest, "fetch", fetch_in_process)
            fetch = {"distributor": name, "shard_size": SHARD, "processes": 2}
            made[name] = ingest.download(download_config(tmp_path / name, tmp_path / "urls.parquet", fetch=fetch))
    for name in made:
        assert made[name].digest == made["multiprocessing"].digest
        assert (made[name].n, made[name].failures) == (ROWS - 10, {"http 404": 10})
