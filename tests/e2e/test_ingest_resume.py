"""Stopping, killing and pausing: nothing is lost, and the final result is always the same."""

import subprocess
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import ingest
from data_prep.dataset.dataset_folder import Folder
from data_prep.ingest import download, prepare
from pipeline.errors import UserError
from tests.downloads import command_of, download_config
from tests.ingested import fetch_here, fetch_in_process, own_opener  # noqa: F401 (a fixture)
from tests.launch import lives, wait_for
from tests.web import jpeg, send, serve

ROWS, SHARD = 120, 20


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A site of images that take a twentieth of a second each, every tenth of them missing, and a table of its URLs."""

    def answer(handler):
        time.sleep(0.05)
        number = int(handler.path.strip("/"))
        if number % 10 == 3:
            send(handler, 404, b"")
        else:
            send(handler, 200, jpeg(side=16 + number))

    table = tmp_path_factory.mktemp("table") / "urls.parquet"
    with serve() as site:
        site.answers.update({f"/{k}": answer for k in range(ROWS)})
        urls = [f"{site.base}/{k}" for k in range(ROWS)]
        pq.write_table(pa.table({"url": urls, "caption": [f"picture {k}" for k in range(ROWS)]}), table)
        yield site, table


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    config, plan = prepare(settings(tmp_path_factory.mktemp("undisturbed"), place[1]))
    return fetch_here(config, plan, range(plan.shards))


def settings(output, table, *, monitor=None, **fetch):
    fetch = {"shard_size": SHARD, "processes": 1, "threads": 4, "timeout": 2, "retries": 0, **fetch}
    return download_config(output, table, guard={"backoff": 0.05}, fetch=fetch, monitor=monitor or {})


@pytest.mark.slow
def test_a_run_whose_worker_and_then_itself_is_killed_ends_with_the_same_manifest(place, undisturbed, tmp_path):
    site, table = place
    command, log = command_of(settings(tmp_path / "killed", table)), tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    folder = Folder(tmp_path / "killed")
    try:
        wait_for(lambda: list(folder.staging.glob("*.live")), "a shard is fetched", log, process=process)
        (worker,) = (child for child in family_of(process) if "spawn_main" in " ".join(child.cmdline()))
        worker.kill()
        restarted = "The engine is restarted: worker process"
        wait_for(lambda: restarted in " ".join(log.read_text().split()), "restarted", log, process=process)
        wait_for(lambda: len(folder.finished()) >= 2, "two shards are done", log, process=process)
        family = family_of(process)
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
    again = len(site.agents) - asked - (ROWS - SHARD * len(finished))
    assert 0 <= again <= 4, "finished shards are not requested again; those of the killed run's threads may arrive late"
    for name in ("manifest.json", "shards/00003.tar"):
        assert (tmp_path / "killed" / name).read_bytes() == (Path(undisturbed.root) / name).read_bytes()


def test_a_collapse_of_the_success_rate_pauses_the_run_without_using_up_the_list(
    place, undisturbed, tmp_path, monkeypatch
):
    site, table = place
    monkeypatch.setattr("data_prep.fetching.supervisor.WINDOW", 12)
    down = [False]
    good = site.answers

    def flaky(handler):
        if down[0]:
            send(handler, 403, b"")
        else:
            good[handler.path](handler)

    monkeypatch.setattr(site, "answers", dict.fromkeys(good, flaky))
    folder = Folder(tmp_path / "out")
    config = settings(tmp_path / "out", table, monitor={"min_success": 0.2})

    def ban(*_):
        down[0] = len(folder.finished()) >= 2

    with pytest.raises(UserError, match=r"http 403 \d+%") as caught:
        download(config, on_progress=ban)
    assert "the same command continues" in str(caught.value)
    kept = folder.finished()
    assert all(folder.read_record(shard).samples == 18 for shard in kept), "affected shards were withdrawn"
    assert len(kept) < ROWS // SHARD

    down[0] = False
    monkeypatch.setattr(ingest, "fetch", fetch_in_process)
    assert download(config).digest == undisturbed.digest


def family_of(process):
    return psutil.Process(process.pid).children(recursive=True)
