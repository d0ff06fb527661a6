"""Damage to any file of a dataset is reported by name, and `--rebuild` repairs it; also removals and locks."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import fcntl
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from data_prep.dataset import canonical_tar
from data_prep.dataset.dataset_folder import Folder, load_config
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.manifest_writer import write_manifest
from data_prep.dataset.removal import remove
from data_prep.dataset.sessions import exclusive_lock, part_lock, shared_lock
from data_prep.dataset.shard_plan import check_parts, load_plan, read_shard
from data_prep.dataset.verification import verify
from data_prep.fetching import shard_writer
from data_prep.fetching.monitor import Monitor
from data_prep.ingest import download, prepare
from data_prep.rebuild import rebuild
from data_prep.settings.download_config import DownloadConfig
from jobs.verify import command
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from tests.ingested import ROWS, SHARD, copied, fetch_here, in_process, made, own_opener, site  # noqa: F401
from tests.web import Site, send


def contents(root: Path) -> dict[str, bytes]:
    files = [*root.glob("shards/*.tar"), *root.glob("meta/*"), *root.glob("plan/*"), root / "manifest.json"]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if path.is_file()}


def edit(path: Path, change: Callable[[dict], None]) -> None:
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def flip(path: Path, place: int) -> None:
    body = bytearray(path.read_bytes())
    body[place] ^= 255
    path.write_bytes(body)


def replace_once(path: Path, old: bytes, new: bytes) -> None:
    body = path.read_bytes()
    assert old in body
    path.write_bytes(body.replace(old, new, 1))


def in_the_way(path: Path) -> None:
    path.unlink()
    path.mkdir()


def change_list(path: Path) -> None:
    """Write the list again with another caption: a readable file, but not the one that the plan names."""
    file = pq.ParquetFile(path)
    with pq.ParquetWriter(path.with_suffix(".other"), file.schema_arrow) as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            captions = [text.replace("picture", "drawing") for text in table["caption"].to_pylist()]
            writer.write_table(table.set_column(table.column_names.index("caption"), "caption", [captions]))
    path.with_suffix(".other").replace(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "manifest.json": lambda root: edit(root / "manifest.json", lambda tree: tree["failures"].update({"dns": 7})),
    "manifest.json ": lambda root: edit(root / "manifest.json", lambda tree: tree.update(attempted=99)),
    "manifest.json  ": lambda root: edit(root / "manifest.json", lambda tree: tree["facts"].update(urls=1)),
    "manifest.json   ": lambda root: (root / "manifest.json").write_text("{"),
    "meta/00001.json": lambda root: (root / "meta/00001.json").write_text('{"shard": 1'),
    "meta/00001.json ": lambda root: edit(root / "meta/00001.json", lambda tree: tree.pop("rows")),
    "meta/00001.json  ": lambda root: (root / "meta/00001.json").unlink(),
    "meta/00001.json   ": lambda root: edit(root / "meta/00001.json", lambda tree: tree["tools"].update(pyarrow="9")),
    "meta/00001.json    ": lambda root: edit(root / "meta/00001.json", lambda tree: tree.update(rules="")),
    "meta/00001.json     ": lambda root: edit(root / "meta/00001.json", lambda tree: tree),  # another form
    "meta/00002.parquet": lambda root: flip(root / "meta/00002.parquet", 200),
    "meta/00002.parquet ": lambda root: (root / "meta/00002.parquet").write_bytes(b"<html>"),
    "plan/plan.json": lambda root: (root / "plan/plan.json").write_text("[]"),
    "plan/plan.json ": lambda root: (root / "plan/part-00000.parquet").write_bytes(b"PAR1"),
    "plan/plan.json  ": lambda root: change_list(root / "plan/part-00000.parquet"),
    "plan/plan.json   ": lambda root: edit(root / "plan/plan.json", lambda tree: tree["rules"].pop("image")),
    "plan/plan.json    ": lambda root: replace_once(root / "plan/part-00000.parquet", b"caption%", b"caption\xcc"),
    "plan/plan.json     ": lambda root: (root / "plan/part-00000.parquet").unlink(),
    "sessions.jsonl": lambda root: (root / "sessions.jsonl").write_text('{"started": \n'),
    "shards/00003.tar": lambda root: flip(root / "shards/00003.tar", 700),
    "shards/00003.tar ": lambda root: in_the_way(root / "shards/00003.tar"),
    "shards/00003.tar  ": lambda root: (root / "shards/00003.tar").unlink(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_files_are_reported_and_repaired(copied: Path, site: Site, name: str) -> None:
    before = contents(copied)
    DAMAGES[name](copied)
    problems = verify(copied)
    assert name.strip() in {problem.shard for problem in problems}
    asked = len(site.agents)
    result = CliRunner().invoke(command, [str(copied), "--rebuild", "--allow-addresses"], standalone_mode=False)
    assert result.exception is None, result.exception
    assert "Repaired, bit-identical to the original; 24 samples now, 24 before." in result.output
    lost = {"shards/00003.tar": 1, "shards/00003.tar ": SHARD, "shards/00003.tar  ": SHARD}
    assert len(site.agents) - asked == lost.get(name, 0), "only lost samples are fetched"
    assert contents(copied) == before
    assert verify(copied) == []


@pytest.mark.parametrize("name", ["plan/plan.json", "meta/00001.json", "meta/00001.parquet", "plan/part-00000.parquet"])
def test_a_download_reports_the_damaged_file_and_what_to_do(copied: Path, name: str) -> None:
    (copied / name).write_bytes(b"\xff{")
    (copied / "meta/00000.json").unlink()
    config = replace(load_config(copied), output=str(copied))
    with pytest.raises(UserError, match=rf"{name} is .*damaged.*`neuclip verify .* --rebuild` repairs it"):
        remove(copied, {"0000000001"}) if name.endswith("1.parquet") else _touch_everything(config)


def _touch_everything(config: DownloadConfig) -> None:
    config, plan = prepare(config)
    folder = Folder(Path(config.output))
    check_parts(folder, [0])
    fetch_here(config, plan, [0], manifest=False)
    write_manifest(folder, plan)


def test_a_changed_byte_of_the_list_gives_no_other_rows(copied: Path) -> None:
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


def test_publishing_a_shard_is_progress(made: DownloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: an engine that needed `monitor.stall` seconds to store a large shard was ended, each time."""
    config = replace(made, output=str(tmp_path / "data"))
    config, plan = prepare(config)
    stored = []
    monkeypatch.setattr(shard_writer, "_HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(shard_writer, "write_text", lambda path, text: stored.append(json.loads(text)["stored"]))
    fetch_here(config, plan, [0], manifest=False)
    assert stored[-SHARD:] == list(range(1, SHARD + 1))
    monitor = Monitor(Folder(tmp_path / "other"), (0,))
    activities = set()
    for count in (1, 2):
        path = tmp_path / "other/staging/worker-0/00000.live"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"pid": 1, "host": "x", "samples": 6, "failures": {}, "stored": count}))
        monitor.poll()
        activities.add(monitor.activity)
    assert activities == {(6, 1), (6, 2)}


def test_nothing_is_deleted_before_its_replacement_is_complete(copied: Path, site: Site) -> None:
    """The server no longer serves anything: the intact samples of a damaged shard are kept."""
    flip(copied / "shards/00003.tar", 700)
    answers = dict(site.answers)
    site.answers.update({f"/{k}.jpg": lambda handler: send(handler, 404, b"") for k in range(ROWS)})
    try:
        again = rebuild(copied, verify(copied), allow_addresses=True)
    finally:
        site.answers.update(answers)
    assert (again.n, again.failures) == (ROWS - 1, {"http 404": 1})
    assert verify(copied) == []


def test_a_changed_table_cannot_replace_a_damaged_list(copied: Path, made: DownloadConfig, tmp_path: Path) -> None:
    table = tmp_path / "urls.parquet"
    shutil.copy(str(made.source.table), table)
    text = (copied / "download.yaml").read_text()
    (copied / "download.yaml").write_text(text.replace(str(made.source.table), str(table)))
    (copied / "plan/plan.json").write_text("[]")
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = pq.read_table(table).to_pydict()
    columns["caption"][0] = "another"
    pq.write_table(pa.table(columns), table)
    with pytest.raises(UserError, match="does not give the same list any more"):
        rebuild(copied, verify(copied), allow_addresses=True)


def test_a_swapped_image_is_detected_even_if_all_digests_match(copied: Path) -> None:
    """A full disk once caused this: one row's image stored under another row's key, in a shard that was then hashed."""
    folder = Folder(copied)
    samples = dict(canonical_tar.samples(folder.tar(1)))
    first, second = sorted(samples)[:2]
    samples[first]["jpg"], samples[second]["jpg"] = samples[second]["jpg"], samples[first]["jpg"]
    members = [(f"{key}.{name}", parts[name]) for key, parts in sorted(samples.items()) for name in sorted(parts)]
    size, digest = canonical_tar.write(folder.tar(1), members)
    folder.write_record(replace(folder.read_record(1), bytes=size, sha256=digest))
    write_manifest(folder, load_plan(folder))
    assert [str(problem) for problem in verify(copied, decode=0)] == [
        f"shards/00001.tar: sample: {key}: the image differs from the stored one" for key in (first, second)
    ]


def test_a_list_that_would_remove_everything_is_rejected_and_changes_nothing(copied: Path) -> None:
    before = contents(copied)
    with pytest.raises(UserError, match="names all 24 samples"):
        remove(copied, {f"{k:010d}" for k in range(ROWS)})
    assert contents(copied) == before
    assert not (copied / "removed.txt").exists()
    assert verify(copied) == []


def test_removal_updates_the_report_and_the_datasheet(copied: Path, tmp_path: Path) -> None:
    write_report(copied)
    (tmp_path / "names").write_text("0000000003\n")
    result = CliRunner().invoke(command, [str(copied), "--remove", str(tmp_path / "names")], standalone_mode=False)
    assert "1 samples removed from 1 shards" in result.output
    manifest = load_manifest(copied)
    assert manifest.digest in (copied / "report.html").read_text()
    assert "23 image-text pairs" in (copied / "datasheet.md").read_text()
    assert verify(copied) == []
    (copied / "report.html").write_text("an older one")
    assert [problem.kind for problem in verify(copied)] == ["stale"]


def test_removal_from_an_unfinished_dataset_writes_no_manifest(copied: Path, tmp_path: Path) -> None:
    """Regression test: removal used to write a manifest of the shards that existed so far."""
    Folder(copied).withdraw(2)
    (copied / "manifest.json").unlink()
    done, manifest = remove(copied, {"0000000003", "0000000013"})
    assert (done.samples, manifest) == (1, None)
    assert not (copied / "manifest.json").exists()
    config = load_config(copied)
    again = fetch_here(config, load_plan(Folder(copied)), [2])
    assert again.failures == {"removed": 2}
    Folder(copied).withdraw(0)
    with pytest.raises(UserError, match=r"1 of 4 shards of .* are not finished, the first is 0"):
        write_manifest(Folder(copied), load_plan(Folder(copied)))


def test_downloads_that_divide_the_shards_differently_cannot_run_together(copied: Path) -> None:
    folder = Folder(copied)
    with shared_lock(folder, 2), shared_lock(folder, 2):
        with pytest.raises(UserError, match="Another process is working"), shared_lock(folder, 3):
            pass
        with shared_lock(folder, 2):
            pass
    with shared_lock(folder, 3):
        pass


def test_workers_that_start_together_do_not_refuse_each_other(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: both tried the lock that a run with another number of workers had left behind."""
    folder, flock, begin = Folder(copied), fcntl.flock, threading.Barrier(4, timeout=10)

    def slow(file: IO[str], how: int) -> None:
        flock(file, how)
        if how == fcntl.LOCK_EX | fcntl.LOCK_NB:
            time.sleep(0.02)

    def work(_: int) -> None:
        begin.wait()
        with shared_lock(folder, 2):
            begin.wait()

    with shared_lock(folder, 3):
        pass
    monkeypatch.setattr(fcntl, "flock", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4), timeout=30))


def test_settings_of_samples_cannot_change_while_a_download_works(made: DownloadConfig, tmp_path: Path) -> None:
    """Regression test: before its first shard they could, and its shards were refused at the end."""
    first = replace(made, output=str(tmp_path / "new"))
    other = replace(first, image=replace(first.image, size=99))
    _, plan = prepare(first)
    with shared_lock(Folder(tmp_path / "new")):
        assert prepare(first)[1] == plan
        with pytest.raises(UserError, match="Another process is working"):
            prepare(other)
        assert load_plan(Folder(tmp_path / "new")) == plan
    assert prepare(other)[1].rules["image"]["size"] == 99


def test_a_folder_of_a_version_before_0_2_is_read_and_not_changed(made: DownloadConfig, copied: Path) -> None:
    """Regression test: each command that changes one ended as a bug, after it had lost the settings in the manifest; a
    download that went on mixed images of two sizes. `verify` called one damaged."""

    def as_before(path: Path, *names: str) -> None:
        edit(path, lambda tree: [tree.pop(name, None) for name in names])

    as_before(copied / "plan/plan.json", "rules", "parts", "files", "index", "own_sha256")
    for path in (copied / "meta").glob("*.json"):
        as_before(path, "rules", "tools", "own_sha256")
    before = contents(copied)
    config = replace(made, output=str(copied))
    for change in (
        lambda: prepare(config),
        lambda: prepare(replace(config, image=replace(config.image, size=99))),
        lambda: remove(copied, {"000000001"}),
        lambda: rebuild(copied, [], allow_addresses=True),
    ):
        with pytest.raises(UserError, match=r"downloaded by a version before 0\.2, which did not record"):
            change()
    assert contents(copied) == before
    assert verify(copied) == []


def test_removal_and_rebuild_are_refused_while_another_process_uses_the_folder(copied: Path) -> None:
    folder = Folder(copied)
    with shared_lock(folder), shared_lock(folder), part_lock(folder, 0):
        for work in (lambda: remove(copied, {"x"}), lambda: rebuild(copied, [], allow_addresses=True)):
            with pytest.raises(UserError, match="Another process is working"):
                work()
    with exclusive_lock(folder), pytest.raises(UserError, match="Another process is working"):
        download(replace(load_config(copied), output=str(copied)))
    with (folder.locks / "lock-folder").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
