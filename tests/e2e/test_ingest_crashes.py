"""A kill or a full disk at any publishing step, then the same command again: same bytes as an uninterrupted run.

The steps are those of docs/data.md, "When it is killed". The work runs in forks of this process, without img2dataset's
worker processes, so that each of the many cases takes a fraction of a second; the last tests run the whole program.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import ingest
from data_prep import rebuild as rebuilding
from data_prep.dataset import fault_points
from data_prep.dataset.dataset_folder import Folder
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.removal import remove
from data_prep.dataset.shard_plan import load_plan
from data_prep.dataset.verification import verify
from data_prep.fetching.downloader import Job, ShardDownloader
from data_prep.fetching.supervisor import discard_unfinished
from data_prep.settings.download_config import DownloadConfig
from pipeline.config import parse
from tests.ingested import own_opener  # noqa: F401
from tests.web import Site, jpeg, send, serve

ROWS, SHARD = 18, 6
NAMES = {"0000000001", "0000000007", "0000000008", "0000000017"}
_VARIES = ("staging", "sessions.jsonl", "report.html", "datasheet.md")


class Place:
    """A web site, a dataset folder, and the four commands that change it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.root, self.is_busy = site, folder / "data", False
        urls = [f"{site.base}/{k}" for k in range(ROWS)]
        for k in range(ROWS):
            site.answers[f"/{k}"] = lambda handler, k=k: self._answer(handler, k)
        table = pa.table({"url": urls, "caption": [f"picture {k}" for k in range(ROWS)]})
        pq.write_table(table, folder / "urls.parquet")
        tree = {
            "output": str(self.root),
            "source": {"table": str(folder / "urls.parquet")},
            "guard": {"allow_addresses": ["127.0.0.1"], "contact": "x@example.org"},
            "fetch": {"shard_size": SHARD, "threads": 2, "retries": 0, "processes": 1},
        }
        self.config = parse(DownloadConfig, tree)

    def _answer(self, handler: object, k: int) -> None:
        if k % 5 == 4:
            send(handler, 404, b"")  # type: ignore[arg-type]
        elif self.is_busy and k % 3 == 0:
            send(handler, 503, b"")  # type: ignore[arg-type]
        else:
            send(handler, 200, jpeg(side=30 + k))  # type: ignore[arg-type]

    def download(self) -> None:
        ingest.download(self.config)
        write_report(self.root)

    def retry(self) -> None:
        ingest.download(self.config, retry_failed=True)
        write_report(self.root)

    def remove(self) -> None:
        remove(self.root, NAMES)
        write_report(self.root)

    def rebuild(self) -> None:
        problems = verify(self.root)
        if problems:
            rebuilding.rebuild(self.root, problems)
        write_report(self.root)

    def contents(self) -> dict[str, bytes]:
        """Return all files whose bytes are deterministic."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        named = {str(path.relative_to(self.root)): path for path in files}
        return {name: path.read_bytes() for name, path in named.items() if not name.startswith(_VARIES)}


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the work of the engine's workers in this process."""

    def fetch(config: DownloadConfig, shards: tuple[int, ...], *, mode: str = "fetch", **_: object) -> None:
        folder = Folder(Path(config.output))
        discard_unfinished(folder, shards)
        downloader = ShardDownloader(Job(config, folder, load_plan(folder), (), mode))  # type: ignore[arg-type]
        for shard in shards:
            done, _row = downloader((shard, str(folder.staging / f"{shard}.arrow")))
            if not done:
                raise OSError("the shard failed; see the traceback above")

    monkeypatch.setattr(ingest, "fetch", fetch)
    monkeypatch.setattr(rebuilding, "fetch", fetch)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with serve() as site:
        yield Place(site, tmp_path)


def begin(place: Place, command: str) -> None:
    """Prepare the state in which the command is run."""
    if command == "download":
        return
    place.is_busy = command == "retry"
    place.download()
    place.is_busy = False
    if command == "rebuild":
        tar = place.root / "shards/00001.tar"
        body = bytearray(tar.read_bytes())
        body[1_200] ^= 255
        tar.write_bytes(body)
        (place.root / "meta/00002.json").write_text("{")


def forked(work: Callable[[], None], fault: str, once: Path) -> int:
    """Run `work` with a fault in a fork of this process.

    Returns:
        The exit status as reported by `waitpid`.
    """
    child = os.fork()
    if child == 0:
        os.environ[fault_points.VARIABLE], os.environ[fault_points.ONCE] = fault, str(once)
        try:
            work()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitpid(child, 0)[1]


SHARDS = [f"{point}:1" for point in fault_points.SHARD_POINTS if point != "shard.spool"]
STEPS = {
    "download": [
        "plan.part",
        "plan",
        "settings",
        "shard.spool:7",
        *SHARDS,
        "manifest",
        "report",
        "datasheet",
        "journal",
    ],
    "retry": ["settings", "shard.spool:6", *SHARDS, "manifest", "report"],
    "remove": [*fault_points.REMOVAL_POINTS, *SHARDS, "manifest", "report"],
    "rebuild": [*SHARDS, "shard.tar:2", "shard.recorded:2", "manifest", "report"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", STEPS)
def test_a_command_killed_at_any_step_can_be_repeated(place: Place, tmp_path: Path, command: str) -> None:
    begin(place, command)
    before = tmp_path / "before"
    if place.root.exists():
        shutil.copytree(place.root, before)
    getattr(place, command)()
    expected = place.contents()
    assert verify(place.root) == []
    for number, (step, action) in enumerate((step, action) for step in STEPS[command] for action in ("kill", "full")):
        shutil.rmtree(place.root)
        if before.exists():
            shutil.copytree(before, place.root)
        ended = forked(getattr(place, command), f"{action}@{step}", tmp_path / f"once-{number}")
        assert (tmp_path / f"once-{number}").exists(), f"{command} never reached {step}"
        if action == "kill":
            assert os.WIFSIGNALED(ended), step
        getattr(place, command)()
        found = place.contents()
        assert sorted(found) == sorted(expected), (action, step)
        assert [name for name in found if found[name] != expected[name]] == [], (action, step)
        assert verify(place.root) == [], (action, step)


def test_the_next_download_completes_a_killed_removal(place: Place, tmp_path: Path) -> None:
    place.download()
    shutil.copytree(place.root, tmp_path / "before")
    place.remove()
    expected = place.contents()
    for step in ("removal.names", "shard.committed:1"):
        shutil.rmtree(place.root)
        shutil.copytree(tmp_path / "before", place.root)
        forked(place.remove, f"kill@{step}", tmp_path / step)
        assert [problem.kind for problem in verify(place.root) if problem.shard == "removal.pending"] == ["unfinished"]
        notes: list[str] = []
        ingest.download(place.config, on_note=notes.append)
        assert notes == ["A removal that had been interrupted was finished first."]
        assert place.contents() == expected


def test_one_of_several_workers_finishes_a_removal_that_was_killed_in_the_shard_of_another(
    place: Place, tmp_path: Path
) -> None:
    """Regression test: it rewrote the files of a shard whose commit still referred to them, so a kill lost the tar."""
    place.download()
    shutil.copytree(place.root, tmp_path / "before")
    place.remove()
    expected = place.contents()
    shutil.rmtree(place.root)
    shutil.copytree(tmp_path / "before", place.root)
    forked(place.remove, "kill@shard.committed:1", tmp_path / "first")
    one_of_two = replace(place.config, fetch=replace(place.config.fetch, worker=0, workers=2))
    forked(lambda: ingest.download(one_of_two), "kill@shard.tar:1", tmp_path / "second")
    place.download()
    assert verify(place.root) == []
    assert {n: body for n, body in place.contents().items() if n != "download.yaml"} == {
        n: body for n, body in expected.items() if n != "download.yaml"
    }


def command_of(place: Place, **fetch: object) -> list[str]:
    words = {"shard_size": SHARD, "threads": 2, "retries": 0, "processes": 1, **fetch}
    return [
        sys.executable,
        "-m",
        "jobs.download",
        f"output={place.root}",
        f"source.table={place.config.source.table}",
        "guard.allow_addresses=[127.0.0.1]",
        "guard.contact=x@example.org",
        *(f"fetch.{name}={value}" for name, value in words.items()),
    ]


def run(command: list[str], **environment: object) -> subprocess.CompletedProcess[str]:
    settings = {name: str(value) for name, value in environment.items()}
    return subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill@shard.commit:1", "kill@shard.tar-renamed:2", "full@shard.spool:8"])
def test_the_whole_program_survives_a_fault_in_a_worker(place: Place, tmp_path: Path, fault: str) -> None:
    place.download()
    expected = place.contents()
    shutil.rmtree(place.root)
    ended = run(command_of(place), NEUCLIP_FAULT=fault, NEUCLIP_FAULT_ONCE=tmp_path / "once")
    assert (tmp_path / "once").exists()
    if fault.startswith("kill"):
        assert ended.returncode == -signal.SIGKILL
        ended = run(command_of(place))
    assert ended.returncode == 0, ended.stderr
    found = place.contents()
    same = {
        name for name in expected if name != "download.yaml"
    }  # the command line sets one or two relative default paths
    assert {name: found[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.slow
def test_an_image_that_kills_its_worker_twice_is_quarantined(place: Place) -> None:
    ended = run(command_of(place), NEUCLIP_FAULT="die@decode:/8")
    assert ended.returncode == 0, ended.stderr
    assert "quarantined" in ended.stdout
    folder = Folder(place.root)
    assert folder.quarantined() == {f"{place.site.base}/8"}
    assert folder.read_record(1).failures == {"http 404": 1, "quarantined": 1}
    assert verify(place.root) == []
    again = run([*command_of(place), "--retry-failed"])
    assert again.returncode == 0
    assert folder.read_record(1).failures["quarantined"] == 1, "a retry does not fetch it either"


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_permanently_full_disk_ends_with_a_message_and_damages_nothing(place: Place, tmp_path: Path) -> None:
    place.download()
    expected = place.contents()
    shutil.rmtree(place.root)
    place.root.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "none", str(place.root)], capture_output=True)
    if mount.returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        ended = run(command_of(place))
        assert ended.returncode == 2, ended.stdout
        assert "No space left on device. Free some space" in " ".join(ended.stderr.split())
        subprocess.run(["mount", "-o", "remount,size=20m", str(place.root)], check=True)
        ended = run(command_of(place))
        assert ended.returncode == 0, ended.stderr
        found = place.contents()
        same = {name for name in expected if name != "download.yaml"}
        assert {name: found[name] for name in same} == {name: expected[name] for name in same}
        assert verify(place.root) == []
    finally:
        subprocess.run(["umount", str(place.root)], check=True)


def test_settings_can_change_only_before_the_first_shard_is_written(place: Place) -> None:
    smaller = replace(place.config, image=replace(place.config.image, size=64))
    ingest.prepare(place.config)
    ingest.prepare(smaller)
    place.config = smaller
    place.download()
    manifest = (place.root / "manifest.json").read_bytes()
    for section, values, words in (
        ("image", {"size": 32}, r"image\.size was 64 and is now 32"),
        ("guard", {"opt_outs": ()}, r"guard\.opt_outs was \[.*\] and is now \[\]"),
    ):
        other = replace(smaller, **{section: replace(getattr(smaller, section), **values)})
        with pytest.raises(ingest.UserError, match=words):
            ingest.download(other)
    assert (place.root / "manifest.json").read_bytes() == manifest
    ingest.download(replace(smaller, guard=replace(smaller.guard, contact="other@example.org", host_connections=2)))
    assert (place.root / "manifest.json").read_bytes() == manifest, "politeness settings do not affect the samples"


def test_a_changed_table_is_detected_and_a_missing_one_is_not_needed(place: Place) -> None:
    place.download()
    manifest = (place.root / "manifest.json").read_bytes()
    table = Path(str(place.config.source.table))
    body = table.read_bytes()
    table.write_bytes(body)
    ingest.download(place.config)
    columns = pq.read_table(table).to_pydict()
    columns["caption"][3] = "another"
    pq.write_table(pa.table(columns), table)
    with pytest.raises(ingest.UserError, match=r"has changed since its URL list was made \(urls.parquet\)"):
        ingest.download(place.config)
    table.unlink()
    notes: list[str] = []
    ingest.download(place.config, on_note=notes.append)
    assert "is gone: continuing with the list" in notes[0]
    assert (place.root / "manifest.json").read_bytes() == manifest
