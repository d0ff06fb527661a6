"""The same list gives the same bytes with every distributor of img2dataset, though one of its workers is killed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import ingest
from tests.downloads import download_config
from tests.ingested import fetch_in_process, own_opener  # noqa: F401 (a fixture)
from tests.web import jpeg, send, serve

ROWS, SHARD = 60, 10
WORKERS = {"pyspark": "pyspark.daemon", "ray": "ray::"}
"""What the command lines of the workers contain."""


@contextmanager
def killed_worker(output: Path, name: str) -> Iterator[list[int]]:
    """Kill the youngest worker of the download into `output` once a shard is finished; yields how many were by then."""
    over, finished = threading.Event(), list[int]()

    def watch() -> None:
        while not finished and not over.wait(0.05):
            done = len(list(output.glob("meta/*.json")))
            for process in sorted(psutil.Process().children(recursive=True), key=lambda process: -process.pid):
                with suppress(psutil.Error):
                    if done and name in " ".join(process.cmdline()):
                        process.kill()
                        finished.append(done)
                        break

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield finished
    finally:
        over.set()
        thread.join()


def slow_404(handler: BaseHTTPRequestHandler) -> None:
    time.sleep(0.5)
    send(handler, 404, b"")


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
            site.image(f"/{k}", jpeg(side=16 + k))
        for k in range(0, ROWS, 6):
            site.answers[f"/{k}"] = slow_404
        columns = {"url": [f"{site.base}/{k}" for k in range(ROWS)], "caption": [f"picture {k}" for k in range(ROWS)]}
        pq.write_table(pa.table(columns), tmp_path / "urls.parquet")
        made = {}
        for name in ("multiprocessing", *others):
            fetch = {"distributor": name, "shard_size": SHARD, "threads": 1, "processes": 2}
            config = download_config(tmp_path / name, tmp_path / "urls.parquet", fetch=fetch)
            if name == "multiprocessing":  # whose workers tests/e2e/test_ingest_resume.py kills
                with monkeypatch.context() as patched:
                    patched.setattr(ingest, "fetch", fetch_in_process)
                    made[name] = ingest.download(config)
                continue
            with killed_worker(tmp_path / name, WORKERS[name]) as finished:
                made[name] = ingest.download(config)
            assert finished
            assert finished[0] < ROWS // SHARD, "nothing was left to do when it was killed"
    for name in made:
        assert made[name].digest == made["multiprocessing"].digest
        assert made[name].failures == {"http 404": 10}
        assert made[name].n == ROWS - 10
