"""Stopping, killing, pausing and retrying: nothing is lost, and the final result is always the same."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.verification import delete_damaged, verify
from data_prep.fetching import supervisor
from data_prep.fetching.supervisor import FetchEngine, Paused
from data_prep.ingest import download, prepare
from data_prep.settings.download_config import DownloadConfig
from pipeline.errors import UserError
from tests.downloads import download_config
from tests.launch import lives, wait_for
from tests.web import Site, jpeg, send, serve

ROWS, SHARD = 120, 20


@pytest.fixture
def site() -> Iterator[Site]:
    with serve() as site:
        yield site


def table_of(site: Site, path: Path, *, delay: float = 0.0) -> Path:
    """Write a table of images that each take `delay` seconds to serve; every tenth is missing."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(delay)
        number = int(handler.path.strip("/"))
        if number % 10 == 3:
            send(handler, 404, b"")
        else:
            send(handler, 200, jpeg(side=16 + number))

    site.answers.update({f"/{k}": answer for k in range(ROWS)})
    columns = {"url": [f"{site.base}/{k}" for k in range(ROWS)], "caption": [f"picture {k}" for k in range(ROWS)]}
    pq.write_table(pa.table(columns), path)
    return path


def settings(output: Path, table: Path, *, monitor: dict | None = None, **fetch: object) -> DownloadConfig:
    fetch = {"shard_size": SHARD, "processes": 1, "threads": 4, "timeout": 2, "retries": 0, **fetch}
    return download_config(output, table, guard={"backoff": 0.05}, fetch=fetch, monitor=monitor or {})


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_with_the_same_manifest(site: Site, tmp_path: Path) -> None:
    table = table_of(site, tmp_path / "urls.parquet", delay=0.05)
    words = [
        f"output={tmp_path / 'killed'}", f"source.table={table}", "guard.allow_addresses=[127.0.0.1]",
        "guard.backoff=0.05", "guard.contact=x@example.org", f"fetch.shard_size={SHARD}", "fetch.processes=1",
        "fetch.threads=4", "fetch.timeout=2", "fetch.retries=0",
    ]  # fmt: skip
    command = [sys.executable, "-m", "jobs.download", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = Folder(tmp_path / "killed")
    try:
        wait_for(lambda: len(folder.finished()) >= 2, "two shards are done")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "the engine and its worker are running"
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: not any(lives(child.pid) for child in family), "the engine and its worker end")
    finished, committed = set(folder.finished()), set(folder.numbered(".commit"))
    assert not (tmp_path / "killed" / "manifest.json").exists()
    for shard in range(ROWS // SHARD):
        if shard in committed:  # the kill came while its files were renamed
            continue
        assert folder.tar(shard).exists() == (shard in finished), "a tar gets its final name only when it is complete"
    finished |= committed
    assert 2 <= len(finished) < ROWS // SHARD
    asked = len(site.agents)

    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "108 of 120 URLs gave a sample (90.0%)" in ended.stdout
    assert "http 404" in ended.stdout
    assert len(site.agents) - asked == ROWS - SHARD * len(finished), "finished shards are not requested again"
    download(settings(tmp_path / "undisturbed", table))
    for name in ("manifest.json", "shards/00003.tar"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    assert outcomes(folder) == ["killed", "finished"]


@pytest.mark.slow
def test_a_dead_worker_is_detected_and_the_engine_is_restarted(site: Site, tmp_path: Path) -> None:
    table = table_of(site, tmp_path / "urls.parquet", delay=0.05)
    config = settings(tmp_path / "out", table)
    folder = Folder(tmp_path / "out")
    killed: list[int] = []

    def kill_once(progress: object) -> None:
        live = list(folder.staging.glob("*.live"))
        if live and not killed:
            worker = psutil.Process().children(recursive=True)
            killed.extend(p.pid for p in worker if "spawn_main" in " ".join(p.cmdline()))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    notes: list[str] = []
    manifest = download(config, on_progress=kill_once, on_note=notes.append)
    assert killed
    assert "The engine is restarted: worker process" in notes[-1]
    assert manifest.n == 108


def test_a_collapse_of_the_success_rate_pauses_the_run_without_using_up_the_list(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.fetching.monitor.WINDOW", 12)
    table = table_of(site, tmp_path / "urls.parquet", delay=0.02)
    down = [False]
    good = dict(site.answers)

    def flaky(handler: BaseHTTPRequestHandler) -> None:
        if down[0]:
            send(handler, 403, b"")
        else:
            good[handler.path](handler)

    site.answers = dict.fromkeys(good, flaky)
    folder = Folder(tmp_path / "out")
    config = settings(tmp_path / "out", table, monitor={"min_success": 0.2})

    def ban(progress: object) -> None:
        down[0] = len(folder.finished()) >= 2

    with pytest.raises(Paused, match=r"http 403 \d+%") as caught:
        download(config, on_progress=ban)
    assert "the same command continues" in str(caught.value)
    kept = folder.finished()
    assert all(folder.read_record(shard).samples == 18 for shard in kept), "affected shards were withdrawn"
    assert len(kept) < ROWS // SHARD

    down[0] = False
    assert download(config).n == 108
    assert [outcome.split(":")[0] for outcome in outcomes(folder)] == ["Paused", "finished"]


@pytest.mark.slow
def test_retry_requests_only_transient_failures_and_ends_as_if_they_had_not_occurred(
    site: Site, tmp_path: Path
) -> None:
    table = table_of(site, tmp_path / "urls.parquet")
    good = dict(site.answers)
    asked: list[str] = []

    def busy(handler: BaseHTTPRequestHandler) -> None:
        asked.append(handler.path)
        if asked.count(handler.path) == 1 and int(handler.path.strip("/")) % 7 == 0:
            send(handler, 503, b"")
        else:
            good[handler.path](handler)

    site.answers = dict.fromkeys(good, busy)
    config = settings(tmp_path / "out", table)
    first = download(config)
    passing = len(range(0, ROWS, 7))
    assert first.failures["http 503"] == passing
    assert len(asked) == ROWS

    again = download(config, retry_failed=True)
    assert len(asked) == ROWS + passing, "only transient failures are requested again"
    assert "http 503" not in again.failures
    assert again.n == 108
    assert again.attempted == first.attempted == ROWS
    site.answers = good
    fresh = download(settings(tmp_path / "fresh", table))
    assert (fresh.digest, fresh.failures) == (again.digest, again.failures)
    assert [hashlib.sha256(Path(again.url(s)).read_bytes()).hexdigest() for s in again.shards] == [
        s.sha256 for s in again.shards
    ]


@pytest.mark.slow
def test_a_retry_of_a_damaged_shard_ends_at_the_first_start(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: the engine was started four times, and the message was about the engine."""
    table = table_of(site, tmp_path / "urls.parquet")
    good = dict(site.answers)
    site.answers |= {f"/{k}": lambda handler: send(handler, 503, b"") for k in range(0, ROWS, 7)}
    config = settings(tmp_path / "out", table)
    download(config)
    tar = Folder(tmp_path / "out").tar(0)
    tar.write_bytes(tar.read_bytes().replace(b'"width": 17', b'"width": 71', 1))  # as long as before
    starts: list[tuple[int, ...]] = []

    class Engine(FetchEngine):
        def __init__(self, config: DownloadConfig, shards: tuple[int, ...], *, mode: str) -> None:
            starts.append(shards)
            super().__init__(config, shards, mode=mode)

    monkeypatch.setattr(supervisor, "FetchEngine", Engine)
    with pytest.raises(UserError, match=r"00000\.tar is missing or differs from its record.*--delete-damaged. deletes"):
        download(config, retry_failed=True)
    assert len(starts) == 1
    site.answers = good
    assert delete_damaged(config.output, verify(config.output)) == ["shards/00000.tar"]
    assert "http 503" not in download(config, retry_failed=True).failures


def test_concurrent_runs_in_one_folder_and_other_settings_are_rejected(site: Site, tmp_path: Path) -> None:
    table = table_of(site, tmp_path / "urls.parquet")
    config, plan = prepare(settings(tmp_path / "out", table))
    assert (plan.rows, plan.shards) == (ROWS, ROWS // SHARD)
    with pytest.raises(UserError, match="shard_size was 20 and is now 30"):
        prepare(settings(tmp_path / "out", table, shard_size=30))
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print('held', flush=True); input()"
    lock = Folder(Path(config.output)).locks / "lock-0"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holder, str(lock)], **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(UserError, match="Another process is working"):
            download(config)
        process.communicate(b"\n")


def outcomes(folder: Folder) -> list[str]:
    """Return the outcomes of a folder's sessions, in order."""
    return [json.loads(line)["outcome"] for line in folder.sessions.read_text().splitlines()]
