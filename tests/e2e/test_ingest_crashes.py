"""A kill or a full disk at any publishing step, then the same command again: same bytes as an uninterrupted run.

The steps are those of docs/data.md, "When it is killed". The work runs in forks of this process, without img2dataset's
worker processes, so that each of the many cases takes a fraction of a second; the last tests run the whole program.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import ingest
from data_prep.dataset import canonical_tar, commit, ingest_report, shard_plan
from data_prep.dataset.commit import part_lock
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.manifest_writer import expected_manifest
from data_prep.dataset.removal import remove
from data_prep.dataset.shard_files import withdraw
from data_prep.dataset.verification import verify
from data_prep.fetching import downloader, supervisor
from data_prep.fetching.decoder import ImageConverter
from data_prep.fetching.shard_writer import ShardWriter
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.errors import UserError
from tests.downloads import download_config
from tests.ingested import fetch_in_process, in_a_fork, own_opener  # noqa: F401 (a fixture)
from tests.web import jpeg, send, serve

ROWS, SHARD = 18, 6
NAMES = {"0000000001", "0000000007", "0000000008", "0000000017"}
_VARIES = ("staging", "report.html")


class Place:
    """A web site, a dataset folder, and the three commands that change it."""

    def __init__(self, site, folder):
        self.site, self.root, self.is_busy = site, folder / "data", False
        urls = [f"{site.base}/{k}" for k in range(ROWS)]
        for k in range(ROWS):
            site.answers[f"/{k}"] = lambda handler, k=k: self._answer(handler, k)
        table = pa.table({"url": urls, "caption": [f"picture {k}" for k in range(ROWS)]})
        pq.write_table(table, folder / "urls.parquet")
        fetch = {"shard_size": SHARD, "threads": 2, "retries": 0, "processes": 1}
        self.config = download_config(self.root, folder / "urls.parquet", fetch=fetch)

    def _answer(self, handler, k):
        if k % 5 == 4:
            send(handler, 404, b"")
        elif self.is_busy and k % 3 == 0:
            send(handler, 503, b"")
        else:
            send(handler, 200, jpeg(side=30 + k))

    def download(self):
        ingest.download(self.config)
        write_report(self.root)

    def download_while_busy(self):
        self.is_busy = True
        self.download()
        self.is_busy = False

    def retry(self):
        ingest.download(self.config, retry_failed=True)
        write_report(self.root)

    def remove(self):
        remove(self.root, NAMES)
        write_report(self.root)

    def contents(self):
        """Return all files whose bytes are deterministic."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        named = {str(path.relative_to(self.root)): path for path in files}
        return {name: path.read_bytes() for name, path in named.items() if not name.startswith(_VARIES)}


@pytest.fixture(autouse=True)
def in_process(monkeypatch):
    """Run the work of the engine's workers, and their decoders, in this process."""
    monkeypatch.setattr(downloader, "Decoder", ImageConverter)
    monkeypatch.setattr(ingest, "fetch", fetch_in_process)


@pytest.fixture
def place(tmp_path):
    with serve() as site:
        yield Place(site, tmp_path)


Step = tuple[Any, str, int]
"""A function, by its owner and name, and the number of the call at which a command is killed or meets a full disk."""
# Every step of publishing: tests/unit/test_removal.py.
PUBLISHING: list[Step] = [(canonical_tar, "write", 2), (commit, "write_text", 3),
                          *((Path, "replace", k) for k in (4, 5, 6)), (commit, "flush", 18)]  # fmt: skip
FINISHING: list[Step] = [(Manifest, "save", 1), (ingest_report, "write_text", 1)]
STEPS: dict[str, list[Step]] = {
    "download": [(shard_plan, "flush", 1), (shard_plan, "write_text", 1), (ingest, "write_text", 1),
                 (ShardWriter, "_take", 7), *PUBLISHING, *FINISHING],
    "retry": [(ingest, "write_text", 1), (ShardWriter, "_take", 3), *PUBLISHING, *FINISHING],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", STEPS)
def test_a_command_killed_at_any_step_can_be_repeated(place, tmp_path, command):
    before = tmp_path / "before"
    if command == "retry":
        place.download_while_busy()
        shutil.copytree(place.root, before)
    getattr(place, command)()
    expected = place.contents()
    assert verify(place.root) == []
    for (owner, name, at), action in itertools.product(STEPS[command], ("kill", "full")):
        shutil.rmtree(place.root)
        if before.exists():
            shutil.copytree(before, place.root)
        ended = in_a_fork(getattr(place, command), [(owner, name)], at, action)
        assert ended in {"kill": (9,), "full": (1, 3)}[action], (owner, name, at, "was never reached, or no error")
        getattr(place, command)()
        found = place.contents()
        assert sorted(found) == sorted(expected), (action, name, at)
        assert [path for path in found if found[path] != expected[path]] == [], (action, name, at)
        assert verify(place.root) == [], (action, name, at)


def test_two_workers_on_one_folder_produce_the_same_dataset(place, monkeypatch):
    def manifest_of(folder, plan):
        with pytest.raises(UserError, match="Another process"), part_lock(folder, "manifest", seconds=0):
            pass  # else one that read older records could be written last
        return expected_manifest(folder, plan)

    monkeypatch.setattr(ingest, "expected_manifest", manifest_of)
    place.download()
    expected = (place.root / "manifest.json").read_bytes()
    shutil.rmtree(place.root)
    one, two = (replace(place.config, fetch=replace(place.config.fetch, worker=k, workers=2)) for k in range(2))
    with pytest.raises(ingest.PartDone, match="1 of 3 shards are unfinished, those of the other 1"):
        ingest.download(one)
    assert not (place.root / "manifest.json").exists()
    ingest.download(two)
    assert (place.root / "manifest.json").read_bytes() == expected
    assert verify(place.root) == []


def test_retry_requests_only_transient_failures_and_ends_as_if_they_had_not_occurred(place):
    place.download()
    expected = place.contents()
    shutil.rmtree(place.root)
    place.download_while_busy()
    passing = [k for k in range(ROWS) if k % 3 == 0 and k % 5 != 4]
    assert load_manifest(place.root).failures["http 503"] == len(passing)
    withdraw(Folder(place.root), 1)  # as `neuclip verify --delete-damaged` does
    asked, others = len(place.site.agents), [k for k in passing if k // SHARD != 1]
    place.retry()
    assert len(place.site.agents) == asked + SHARD + len(others), "of finished shards only transient failures"
    assert place.contents() == expected


@pytest.mark.slow
def test_a_retry_of_a_damaged_shard_ends_at_the_first_start(place, monkeypatch):
    """Regression test: the engine was started four times, and the message was about the engine."""
    place.download_while_busy()
    tar = Folder(place.root).tar(0)
    tar.write_bytes(tar.read_bytes().replace(b'"width": 31', b'"width": 13', 1))  # as long as before
    monkeypatch.setattr(ingest, "fetch", supervisor.fetch)
    monkeypatch.setattr(supervisor, "RESTARTS", -1)  # so that a second start is reported instead
    with pytest.raises(UserError, match=r"00000\.tar is missing or differs from its record.*--delete-damaged. deletes"):
        ingest.download(place.config, retry_failed=True)


def test_the_next_download_completes_a_killed_removal(place, tmp_path):
    """Also one of several workers, and if it is killed meanwhile."""
    place.download()
    shutil.copytree(place.root, tmp_path / "before")
    place.remove()
    expected = place.contents()
    one_of_two = replace(place.config, fetch=replace(place.config.fetch, worker=0, workers=2))
    for at in (1, 2):  # once the note is written, and after the first file is in its place
        shutil.rmtree(place.root)
        shutil.copytree(tmp_path / "before", place.root)
        assert in_a_fork(place.remove, [(Path, "replace")], at) == 9
        assert [problem.kind for problem in verify(place.root) if problem.shard == "removal.pending"] == ["unfinished"]
        assert in_a_fork(lambda: ingest.download(one_of_two), [(Path, "replace")], 1) == 9
        ingest.download(place.config)
        assert place.contents() == expected


def test_settings_of_samples_cannot_change(place):
    place.config = smaller = replace(place.config, image=replace(place.config.image, size=64, background="green"))
    ingest.prepare(smaller)
    for section, values, words in (
        ("fetch", {"shard_size": 9}, "shard_size was 6 and is now 9"),
        ("image", {"size": 32}, r"image\.size was 64 and is now 32"),
        ("image", {"background": "white"}, r"image\.background was 'green' and is now None"),
        ("guard", {"opt_outs": ()}, r"guard\.opt_outs was \[.*\] and is now \[\]"),
    ):
        other = replace(smaller, **{section: replace(getattr(smaller, section), **values)})
        with pytest.raises(UserError, match=words):
            ingest.download(other)
    place.download()
    manifest = (place.root / "manifest.json").read_bytes()
    ingest.download(replace(smaller, guard=replace(smaller.guard, contact="other@example.org", host_connections=2)))
    assert (place.root / "manifest.json").read_bytes() == manifest, "politeness settings do not affect the samples"


def test_a_changed_table_is_detected_and_a_missing_one_is_not_needed(place):
    place.download()
    manifest = (place.root / "manifest.json").read_bytes()
    table = Path(str(place.config.source.table))
    body = table.read_bytes()
    table.write_bytes(body)
    ingest.download(place.config)
    columns = pq.read_table(table).to_pydict()
    columns["caption"][3] = "another"
    pq.write_table(pa.table(columns), table)
    with pytest.raises(UserError, match=r"has changed since its URL list was made \(urls.parquet\)"):
        ingest.download(place.config)
    table.unlink()
    notes: list[str] = []
    ingest.download(place.config, on_note=notes.append)
    assert "is gone: continuing with the list" in notes[0]
    assert (place.root / "manifest.json").read_bytes() == manifest
