"""Who may change a download's folder at once, what a killed command leaves, and that work is seen as progress."""

# ruff: noqa: F811 (imported fixtures are requested by name)
import fcntl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest

from data_prep.dataset import commit
from data_prep.dataset.commit import engine_lock, exclusive_lock, part_lock, recover, shared_lock, worker_lock
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.removal import remove
from data_prep.dataset.shard_plan import read_shard
from data_prep.dataset.verification import delete_damaged
from data_prep.fetching import shard_writer
from data_prep.ingest import download, prepare
from pipeline.errors import UserError
from tests.ingested import ROWS, SHARD, copied, fetch_here, made, own_opener, site  # noqa: F401


def test_a_changed_byte_of_the_list_gives_no_other_rows(copied):
    """Regression test: a resumed download took the changed URL or caption for the planned one."""
    folder = Folder(copied)
    path, rows = folder.plan_part(0), [read_shard(folder, shard) for shard in range(ROWS // SHARD)]
    body = bytearray(path.read_bytes())
    footer = 8 + int.from_bytes(body[-8:-4], "little")
    found = 0
    for place in range(4, len(body) - footer, 11):
        body[place] ^= 4
        path.write_bytes(body)
        body[place] ^= 4
        for shard, planned in enumerate(rows):
            try:
                assert read_shard(folder, shard).equals(planned), place
            except UserError:
                found += 1
    assert found > (len(body) - footer) / 11 / 2


def test_publishing_a_shard_is_progress(made, tmp_path, monkeypatch):
    """Regression test: an engine that needed five minutes to store a large shard was ended, each time."""
    config = replace(made, output=str(tmp_path / "data"))
    config, plan = prepare(config)
    stored = []
    monkeypatch.setattr(shard_writer, "_HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(shard_writer, "write_json", lambda path, state: stored.append(state["stored"]))
    fetch_here(config, plan, [0], manifest=False)
    assert stored[-SHARD - 1 :] == [*range(1, SHARD + 1), SHARD]


def test_leftovers_of_killed_commands_are_removed_and_other_files_are_not(copied):
    folder, token = Folder(copied), "0" * 32
    of_folder = [copied / f".report.html.{token}.tmp", copied / f"plan/.plan.json.{token}.tmp"]
    of_shards = [copied / f"shards/.00001.tar.{token}.tmp", copied / f"meta/.00001.json.{token}.tmp", folder.commit(1)]
    others, mine = copied / f"meta/.00007.json.{token}.tmp", [copied / ".mine.tmp", copied / "shards/00001.tar.new"]

    def kill():
        for path in (*of_folder, *of_shards, others, *mine):
            path.write_text("half")  # the damaged note leaves the published shard in effect

    kill()
    with shared_lock(folder):
        assert not any(path.exists() for path in (*of_folder, *of_shards, others)), "nobody else is working"
        kill()
        with shared_lock(folder):
            recover(folder, range(4))
        assert not any(path.exists() for path in of_shards)
        assert all(path.exists() for path in (*of_folder, others)), "another worker may be writing them"
    remove(copied, {"0000000020"})
    assert not any(path.exists() for path in (*of_folder, others))
    assert all(path.exists() for path in mine)


def test_downloads_that_divide_the_shards_differently_cannot_run_together(copied):
    folder = Folder(copied)
    with shared_lock(folder, 2), shared_lock(folder, 2):
        with pytest.raises(UserError, match="Another process is working"), shared_lock(folder, 3):
            pass
        with shared_lock(folder, 2):
            pass
    with shared_lock(folder, 3):
        pass


def test_workers_that_start_together_do_not_refuse_each_other(copied, monkeypatch):
    """Regression test: both tried the lock that a run with another number of workers had left behind."""
    folder, flock, begin = Folder(copied), fcntl.flock, threading.Barrier(4, timeout=10)

    def slow(file, how):
        flock(file, how)
        if how == fcntl.LOCK_EX | fcntl.LOCK_NB:
            time.sleep(0.02)

    def work(_):
        begin.wait()
        with shared_lock(folder, 2):
            begin.wait()

    with shared_lock(folder, 3):
        pass
    monkeypatch.setattr(fcntl, "flock", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=30))


def test_removals_and_deletions_are_refused_while_another_process_uses_the_folder(made, copied):
    folder = Folder(copied)
    with shared_lock(folder), shared_lock(folder), part_lock(folder, 0):
        for work in (lambda: remove(copied, {"x"}), lambda: delete_damaged(copied, [])):
            with pytest.raises(UserError, match="Another process is working"):
                work()
    with exclusive_lock(folder), pytest.raises(UserError, match="Another process is working"):
        download(replace(made, output=str(copied)))
    with (folder.locks / "lock-folder").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("lock", [exclusive_lock, worker_lock])
def test_a_command_waits_for_the_engine_of_a_killed_one(copied, monkeypatch, lock):
    """Regression test: both finished the same commit, and the new command failed because a file was gone."""
    folder = Folder(copied, worker=3)
    with ExitStack() as engine:
        engine.enter_context(engine_lock(folder))
        engine.enter_context(engine_lock(folder))  # a worker's
        monkeypatch.setattr(commit, "_PATIENCE", 0.1)
        with pytest.raises(UserError, match="Another process is working"), lock(folder):
            pass
        monkeypatch.setattr(commit, "_PATIENCE", 60.0)
        threading.Timer(0.2, engine.close).start()
        began = time.monotonic()
        with lock(folder):
            assert time.monotonic() - began > 0.1
