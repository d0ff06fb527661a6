"""Damage of several files at once, unfinished removals and commits: everything is reported, and repaired in one go."""

# ruff: noqa: F811 (imported fixtures are requested by name)
from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import random
import re
import shutil
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from data_prep import ingest
from data_prep import rebuild as rebuilding
from data_prep.dataset import canonical_tar, duplicates, sessions, shard_commit
from data_prep.dataset.dataset_folder import Folder, load_config
from data_prep.dataset.ingest_report import write_report
from data_prep.dataset.manifest_writer import write_manifest
from data_prep.dataset.removal import finish_removal, remove
from data_prep.dataset.salvage import intact_rows, settled_rows
from data_prep.dataset.sessions import engine_lock, exclusive_lock, shared_lock, worker_lock
from data_prep.dataset.shard_plan import load_plan, read_shard
from data_prep.dataset.verification import verify
from data_prep.fetching.supervisor import job_file
from data_prep.rebuild import rebuild
from data_prep.settings.download_config import DownloadConfig
from jobs.verify import command
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.errors import UserError
from tests.ingested import ROWS, SHARD, copied, fetch_here, in_process, made, own_opener, site  # noqa: F401
from tests.web import Site


def contents(root: Path) -> dict[str, bytes]:
    names = [*root.glob("shards/*"), *root.glob("meta/*"), *root.glob("plan/*"), root / "manifest.json"]
    return {str(path.relative_to(root)): path.read_bytes() for path in names}


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 255
    path.write_bytes(body)


@pytest.mark.parametrize("more", ["plan/plan.json", "plan/part-00000.parquet", "manifest.json", None])
def test_damaged_shards_are_found_beside_other_damage(copied: Path, more: str | None) -> None:
    """Regression test: with a damaged plan or manifest, `verify` looked no further, and one rebuild did not suffice."""
    expected = contents(copied)
    (copied / "manifest.json").unlink() if more is None else (copied / more).write_bytes(b"{")
    flip(copied / "shards/00001.tar")
    (copied / "meta/00002.parquet").write_bytes(b"x")
    (copied / "meta/00003.json").write_text("{")
    found = verify(copied)
    assert {"shards/00001.tar", "meta/00002.parquet", "meta/00003.json"} < {problem.shard for problem in found}
    rebuild(copied, found, allow_addresses=True)
    assert verify(copied) == []
    assert contents(copied) == expected


def test_an_unfinished_download_has_no_manifest_to_verify(copied: Path) -> None:
    (copied / "manifest.json").unlink()
    (copied / "meta/00003.json").unlink()
    with pytest.raises(UserError, match="The download is not finished: run the same `neuclip download` again"):
        verify(copied)


def test_changed_settings_are_reported_and_never_used_for_a_rebuild(copied: Path) -> None:
    settings = copied / "download.yaml"
    settings.write_text(settings.read_text().replace("size: 256", "size: 32"))
    flip(copied / "shards/00001.tar")
    found = verify(copied)
    assert "image.size was 256 and is now 32" in str(found[0])
    with pytest.raises(UserError, match=r"download\.yaml has been changed .* Run the same `neuclip download` again"):
        rebuild(copied, found, allow_addresses=True)
    for damage, kind in ((lambda: settings.write_text("image: ["), "damaged"), (settings.unlink, "missing")):
        damage()
        assert (verify(copied)[0].shard, verify(copied)[0].kind) == ("download.yaml", kind)


def test_another_table_in_the_settings_is_reported(copied: Path) -> None:
    settings = copied / "download.yaml"
    settings.write_text(settings.read_text().replace("urls.parquet", "others.parquet"))
    assert "source.table was" in str(verify(copied)[0])


@pytest.mark.parametrize("name", ["removed.txt", "quarantine.txt"])
def test_a_list_that_is_no_text_is_reported(copied: Path, name: str) -> None:
    (copied / name).write_bytes(b"\xff")
    assert [(problem.shard, problem.kind) for problem in verify(copied)] == [(name, "damaged")]


Members = list[tuple[str, bytes]]


def without_last(members: Members) -> Members:
    return members[:-1]


def without_a_caption(members: Members) -> Members:
    return [member for member in members if member[0] != "0000000007.txt"]


def with_another_image(members: Members) -> Members:
    return sorted([*members, ("0000000007.png", b"x")])


def with_exchanged_facts(members: Members) -> Members:
    facts = dict(members)
    other = {"0000000007.json": facts["0000000008.json"], "0000000008.json": facts["0000000007.json"]}
    return list({**facts, **other}.items())


@pytest.mark.parametrize("change", [without_last, without_a_caption, with_another_image, with_exchanged_facts])
def test_wrong_members_are_found_even_if_all_digests_agree(copied: Path, change: Callable[[Members], Members]) -> None:
    folder = Folder(copied)
    samples = canonical_tar.samples(folder.tar(1))
    members = [(f"{key}.{suffix}", parts[suffix]) for key, parts in samples for suffix in sorted(parts)]
    size, digest = canonical_tar.write(folder.tar(1), change(members))
    folder.write_record(replace(folder.read_record(1), bytes=size, sha256=digest))
    write_manifest(folder, load_plan(folder))
    assert ("shards/00001.tar", "sample") in {(problem.shard, problem.kind) for problem in verify(copied)}


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"x"), lambda path: path.unlink()])
def test_commands_that_read_all_shards_name_a_damaged_one(copied: Path, damage: Callable[[Path], None]) -> None:
    """Regression test: they reported a fault of the program."""
    damage(copied / "shards/00001.tar")
    for work in (write_report, duplicates.find_duplicates, lambda root: remove(root, {"0000000008"})):
        with pytest.raises(UserError, match=r"00001\.tar"):
            work(copied)


def test_a_removal_does_not_search_in_another_shards_meta_file(copied: Path) -> None:
    """Regression test: it said that no sample had the name, and the sample stayed."""
    (copied / "names.txt").write_text("0000000002\n")
    shutil.copyfile(copied / "meta/00001.parquet", copied / "meta/00000.parquet")
    with pytest.raises(UserError, match=r"00000\.parquet is missing or differs from its record.*--rebuild"):
        remove(copied, {"0000000002"})
    rebuild(copied, verify(copied), allow_addresses=True)
    told = "The manifest has changed: runs on the old one cannot be resumed on it."
    for name, is_told, missing in (("0000000002", True, 0), ("0000000002", False, 0), ("nothing", False, 1)):
        (copied / "names.txt").write_text(name)
        words = [str(copied), "--remove", str(copied / "names.txt")]
        result = CliRunner().invoke(command, words, standalone_mode=False)
        assert (told in result.output, result.return_value) == (is_told, missing), result.output


def test_a_commit_without_its_files_is_dropped(copied: Path) -> None:
    """After a power failure that kept the commit but lost a file; the older shard remains in effect."""
    folder, expected = Folder(copied), contents(copied)
    folder.commit(1).write_text(folder.record(2).read_text())
    assert shard_commit.recover(folder, range(4)) == []
    assert contents(copied) == expected
    folder.staged_tar(1).write_bytes(folder.tar(1).read_bytes())
    folder.commit(1).write_text(folder.record(1).read_text())
    assert shard_commit.recover(folder, range(4)) == [1], "the meta file had been renamed already"
    assert contents(copied) == expected


def test_a_commit_is_on_the_disk_before_the_files_are_renamed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    rename = Path.replace

    def replace(self: Path, target: Path) -> Path:
        steps.append(f"rename {self.name}")
        return rename(self, target)

    monkeypatch.setattr(shard_commit, "flush", lambda path: steps.append(f"flush {path.name}"))
    monkeypatch.setattr(Path, "replace", replace)
    remove(copied, {"0000000008"})
    staged = ["flush shards", "flush meta", "flush meta"]
    renamed = ["rename 00001.tar.new", "rename 00001.parquet.new", "flush shards", "flush meta"]
    assert steps[-9:] == [*staged, *renamed, "rename 00001.commit", "flush meta"]


def test_a_removal_that_leaves_nothing_is_refused_after_an_interrupted_one(copied: Path) -> None:
    """Regression test: it emptied the set, and no later command could finish."""
    folder = Folder(copied)
    keys = [f"{k:010d}" for k in range(ROWS)]
    folder.pending_removal.write_text("\n".join(keys[: ROWS // 2]))
    with pytest.raises(UserError, match="names all 12 samples"):
        remove(copied, set(keys[ROWS // 2 :]))
    assert load_manifest(copied).n == ROWS // 2
    assert [problem.shard for problem in verify(copied)] == []
    assert not finish_removal(folder)


def test_all_samples_of_an_unfinished_download_can_be_removed(copied: Path) -> None:
    for shard in (1, 2, 3):
        Folder(copied).withdraw(shard)
    done, manifest = remove(copied, {f"{k:010d}" for k in range(SHARD)})
    assert (done.samples, manifest) == (SHARD, None)


def test_temporary_files_of_killed_commands_are_removed_by_the_next_one_that_is_alone(copied: Path) -> None:
    folder = Folder(copied)
    left = [copied / ".datasheet.md.0123.tmp", copied / "plan/.plan.json.4567.tmp"]
    for path in left:
        path.write_text("half")
    with shared_lock(folder):
        assert not any(path.exists() for path in left)
        left[0].write_text("being written by another worker")
        with shared_lock(folder):
            assert left[0].exists()
    remove(copied, {"0000000008"})
    assert not left[0].exists()


@pytest.mark.parametrize("lock", [exclusive_lock, worker_lock])
def test_a_command_waits_for_the_engine_of_a_killed_one(
    copied: Path, monkeypatch: pytest.MonkeyPatch, lock: Callable[[Folder], AbstractContextManager[None]]
) -> None:
    """Regression test: both finished the same commit, and the new command failed because a file was gone."""
    folder = Folder(copied, worker=3)
    with ExitStack() as engine:
        engine.enter_context(engine_lock(folder))
        engine.enter_context(engine_lock(folder))  # a worker's
        monkeypatch.setattr(sessions, "_PATIENCE", 0.1)
        with pytest.raises(UserError, match="Another process is working"), lock(folder):
            pass
        monkeypatch.setattr(sessions, "_PATIENCE", 60.0)
        threading.Timer(0.2, engine.close).start()
        began = time.monotonic()
        with lock(folder):
            assert time.monotonic() - began > 0.1


@pytest.mark.parametrize("name", ["later.tar", "99999.tar", "\u00b2.tar"])
def test_a_file_that_is_no_shard_of_the_folder_is_left_to_the_user(copied: Path, name: str) -> None:
    shutil.copy(copied / "shards/00000.tar", copied / "shards" / name)
    before = contents(copied)
    with pytest.raises(UserError, match=rf"shards/{name} is not one of this folder's shards: move it away by hand"):
        rebuild(copied, verify(copied))
    assert contents(copied) == before


@pytest.mark.parametrize("name", ["meta/\u00b2.json", "meta/\u00b2.commit", "shards/\u00b2.tar.new"])
def test_a_file_named_by_a_foreign_digit_belongs_to_no_shard(copied: Path, name: str) -> None:
    """Regression test: str.isdigit accepts digits that int() does not, and every command of the folder crashed."""
    finished = Folder(copied).finished()
    (copied / name).write_text("{}")
    assert shard_commit.recover(Folder(copied), range(9)) == []
    assert Folder(copied).finished() == finished
    assert verify(copied) == []
    assert (copied / name).exists()


def test_a_rebuild_says_that_the_result_is_identical(copied: Path) -> None:
    flip(copied / "shards/00001.tar")
    result = CliRunner().invoke(command, [str(copied), "--rebuild", "--allow-addresses"], standalone_mode=False)
    assert "Repaired, bit-identical to the original; 24 samples now, 24 before." in result.output


def test_a_rebuild_says_what_it_keeps_of_one_that_was_interrupted(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression test: it started again without a word, and a long one showed no progress."""
    flip(copied / "shards/00001.tar")
    flip(copied / "shards/00002.tar")
    whole, again = rebuilding.fetch, ["--rebuild", "--allow-addresses"]

    def stopped(config: DownloadConfig, shards: tuple[int, ...], **options: object) -> None:
        job_file(Folder(copied)).write_text(json.dumps({"shards": shards, "mode": options["mode"]}))
        whole(config, shards[:1], **options)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(rebuilding, "fetch", stopped)
    first = CliRunner().invoke(command, [str(copied), *again], standalone_mode=False)
    assert "Written again: 00001.tar, 00002.tar (2 in all). Intact samples are kept, the others are" in first.output
    assert "was interrupted" not in first.output
    monkeypatch.setattr(rebuilding, "fetch", whole)
    second = CliRunner().invoke(command, [str(copied), *again], standalone_mode=False)
    assert "A rebuild of 2 shards was interrupted; done and kept: 1, repeated: 1." in second.output
    assert "Written again: 00002.tar (1 in all)" in second.output
    flip(copied / "shards/00003.tar")
    third = CliRunner().invoke(command, [str(copied), *again], standalone_mode=False)
    assert "was interrupted" not in third.output


def test_exceptions_to_the_guard_need_consent_beyond_the_folders_own_settings(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[DownloadConfig] = []
    monkeypatch.setattr(rebuilding, "fetch", lambda config, shards, **_: used.append(config))
    settings = copied / "download.yaml"
    settings.write_text(settings.read_text().replace("distributor: multiprocessing", "distributor: ray"))
    settings.write_text(settings.read_text().replace("master: null", "master: ray://elsewhere:10001"))
    flip(copied / "shards/00001.tar")
    with pytest.raises(UserError, match=r"guard.allow_addresses=\['127.0.0.1'\], so that .* use --allow-addresses"):
        rebuild(copied, verify(copied))
    assert used == []
    rebuild(copied, verify(copied), allow_addresses=True)
    assert (used[0].fetch.distributor, used[0].fetch.master) == ("multiprocessing", None)


def in_reverse(body: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        ends = [*(member.offset for member in archive), archive.offset]
    return b"".join(body[start:end] for start, end in reversed([*itertools.pairwise(ends)])) + body[ends[-1] :]


def with_exchanged_blocks(body: bytes) -> bytes:
    return body[4096:8192] + body[:4096] + body[8192:]


def with_repeated_blocks(body: bytes) -> bytes:
    return body[:8192] + body[:8192] + body[8192:]


@pytest.mark.parametrize("change", [in_reverse, with_exchanged_blocks, with_repeated_blocks])
def test_a_rebuild_sorts_what_is_left(copied: Path, change: Callable[[bytes], bytes]) -> None:
    """Regression test: samples out of order could not be repaired."""
    expected = contents(copied)
    for path in copied.glob("shards/*.tar"):
        path.write_bytes(change(path.read_bytes()))
    folder, plan = Folder(copied), load_plan(Folder(copied))
    planned = {row["row"]: row for row in read_shard(folder, 1).to_pylist()}
    if change is in_reverse:
        assert set(intact_rows(folder, plan, 1, planned)) == set(planned), "nothing has to be requested again"
    rebuild(copied, verify(copied), allow_addresses=True)
    assert contents(copied) == expected


def cut(body: bytearray, draw: random.Random) -> bytearray:
    return body[: draw.randrange(len(body))]


def change_a_byte(body: bytearray, draw: random.Random) -> bytearray:
    body[draw.randrange(len(body))] ^= draw.randrange(1, 256)
    return body


@pytest.mark.parametrize("files", ["shards/*.tar", "meta/*.json", "plan/*"])
@pytest.mark.parametrize("damage", [cut, change_a_byte])
def test_random_damage_is_repaired_to_the_original_bytes(
    copied: Path, damage: Callable[[bytearray, random.Random], bytearray], files: str
) -> None:
    """Regression test: of 150 cuts of tars 97 could not be repaired, and of 150 changed bytes of records 3 stayed
    and of lists 7.

    `DAMAGES=150` in the environment tries as many.
    """
    expected = contents(copied)
    for seed in range(int(os.environ.get("DAMAGES", "12"))):
        draw = random.Random(seed)
        path = draw.choice(sorted(copied.glob(files)))
        body = damage(bytearray(path.read_bytes()), draw)
        if body == expected[str(path.relative_to(copied))]:
            continue
        path.write_bytes(body)
        problems = verify(copied)
        assert problems, seed
        rebuild(copied, problems, allow_addresses=True)
        assert verify(copied) == [], seed
        assert contents(copied) == expected, seed


def test_images_after_a_damaged_header_are_not_fetched_again(copied: Path, site: Site) -> None:
    """Captions and JSON are written from the meta file, so only a damaged image is lost."""
    expected, tar = contents(copied), copied / "shards/00001.tar"
    body = bytearray(tar.read_bytes())
    for place in [match.start() for match in re.finditer(rb"00000000\d\d\.(json|txt)", body)]:
        body[place] ^= 255
    body[body.index(b"0000000006.jpg")] ^= 255
    tar.write_bytes(body)
    asked = len(site.agents)
    rebuild(copied, verify(copied), allow_addresses=True)
    assert contents(copied) == expected
    assert len(site.agents) - asked == 1


def change_a_digit(root: Path) -> None:
    """Another width in one sample's JSON; the tar is as long as before and can be read."""
    tar = root / "shards/00001.tar"
    body = tar.read_bytes()
    tar.write_bytes(body.replace(b'"width": 47', b'"width": 74', 1))
    assert tar.read_bytes() != body


def test_a_changed_json_never_becomes_official(copied: Path) -> None:
    """Regression test: a removal of another sample, or a retry, published the shard with a new digest."""
    expected = contents(copied)
    change_a_digit(copied)
    with pytest.raises(UserError, match=r"00001\.tar is missing or differs from its record.*--rebuild. repairs it"):
        remove(copied, {"0000000008"})
    with pytest.raises(UserError, match=r"00001\.tar is missing or differs from its record"):
        settled_rows(Folder(copied), 1)
    rebuild(copied, verify(copied), allow_addresses=True)
    assert contents(copied) == expected


def test_a_changed_meta_file_never_becomes_official(copied: Path) -> None:
    """Regression test: a retry or a removal wrote it again, under a new digest."""
    expected, meta = contents(copied), copied / "meta/00001.parquet"
    table = pq.read_table(meta)
    rows = table.to_pylist()
    rows[0]["url"] += "x"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), meta)
    for work in (lambda: remove(copied, {"0000000008"}), lambda: settled_rows(Folder(copied), 1)):
        with pytest.raises(UserError, match=r"00001\.parquet is missing or differs from its record"):
            work()
    rebuild(copied, verify(copied), allow_addresses=True)
    assert contents(copied) == expected


def test_a_changed_json_that_an_older_version_has_published_is_found_and_mended(copied: Path) -> None:
    expected, folder = contents(copied), Folder(copied)
    change_a_digit(copied)
    path = folder.tar(1)
    folder.write_record(replace(folder.read_record(1), sha256=hashlib.sha256(path.read_bytes()).hexdigest()))
    write_manifest(folder, load_plan(folder))
    problems = verify(copied)
    assert [str(problem) for problem in problems] == [
        "shards/00001.tar: sample: 0000000007: width in the JSON differ from the meta file"
    ]
    rebuild(copied, problems, allow_addresses=True)
    assert contents(copied) == expected


@pytest.mark.parametrize("names", [["meta/{}.json"], ["meta/{}.json", "meta/{}.parquet"], ["shards/{}.tar"]])
def test_files_of_another_shard_are_found_and_replaced(copied: Path, names: list[str]) -> None:
    """Regression test: `--rebuild` ended with a KeyError."""
    expected = contents(copied)
    for name in names:
        shutil.copy(copied / name.format("00002"), copied / name.format("00001"))
    problems = verify(copied)
    assert problems
    rebuild(copied, problems, allow_addresses=True)
    assert contents(copied) == expected


@pytest.mark.parametrize("field", ["plan", "rules", "sha256", "meta_sha256", "bytes"])
def test_a_changed_record_is_found_and_written_again(copied: Path, field: str, site: Site) -> None:
    expected, folder = contents(copied), Folder(copied)
    record = folder.read_record(1)
    other: object = record.bytes + 1 if field == "bytes" else "0" * len(getattr(record, field))
    folder.write_record(replace(record, **{field: other}))
    asked = len(site.agents)
    problems = verify(copied)
    assert any(problem.shard.startswith("meta/00001") for problem in problems)
    rebuild(copied, problems, allow_addresses=True)
    assert contents(copied) == expected
    assert len(site.agents) == asked


def test_shards_made_with_other_settings_are_fetched_again(copied: Path, site: Site) -> None:
    expected, folder = contents(copied), Folder(copied)
    folder.write_record(replace(folder.read_record(1), rules="0" * 16))
    (copied / "manifest.json").unlink()
    asked = len(site.agents)
    rebuild(copied, verify(copied), allow_addresses=True)
    assert contents(copied) == expected
    assert len(site.agents) - asked == SHARD


@pytest.mark.parametrize("retry", [False, True])
def test_a_repeated_download_reports_a_cut_tar_before_it_requests_anything(
    copied: Path, monkeypatch: pytest.MonkeyPatch, retry: bool
) -> None:
    monkeypatch.setattr(ingest, "fetch", lambda *_, **__: pytest.fail("the engine was started"))
    folder = Folder(copied)
    record = folder.read_record(1)
    folder.write_record(replace(record, rows=record.rows + 1, failures={"timeout": 1}))
    os.truncate(folder.tar(1), 1000)
    before = {path: path.read_bytes() for path in (copied / "meta").iterdir()}
    with pytest.raises(UserError, match=r"00001\.tar has 1,000 bytes instead of [0-9,]+: .*verify .* --rebuild`"):
        ingest.download(load_config(copied), retry_failed=retry)
    assert before == {path: path.read_bytes() for path in (copied / "meta").iterdir()}
