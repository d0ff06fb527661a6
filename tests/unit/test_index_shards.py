"""`neuclip manifest` indexes shards written by other tools (here: webdataset's own writer) for training."""

import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import webdataset
from click.testing import CliRunner

from data_prep.dataset.verification import verify
from jobs.manifest import command
from pipeline.config import parse
from pipeline.data.data_config import DataConfig
from pipeline.data.shards import make_manifest
from pipeline.data.shards.make_manifest import JOURNAL, index_shards
from pipeline.data.shards.manifest_format import load_manifest
from pipeline.data.shards.storage import open_records
from pipeline.data.shards.tar_reader import read_records
from pipeline.errors import UserError
from tests.shards import starts, write_members
from tests.web import jpeg

TYPES = ("jpg", "txt")


def write(path, samples):
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for number, sample in enumerate(samples):
            writer.write({"__key__": f"{path.stem}/{number:03d}", **sample})
    return path


def good(number):
    return {"jpg": jpeg(side=20 + number), "txt": f"picture {number}", "json": {"width": 20}}


@pytest.fixture
def shards(tmp_path):
    """Two folders of shards; two of the seven samples cannot be trained on."""
    write(tmp_path / "a" / "00000.tar", [good(0), good(1), {"txt": "no picture"}, good(3)])
    write(tmp_path / "b" / "00000.tar", [good(4), {"jpg": jpeg(side=25), "txt": b"\xff\xfe"}, good(6)])
    return tmp_path


def test_training_reads_exactly_the_indexed_samples(shards):
    result = CliRunner().invoke(command, [str(shards)], catch_exceptions=False)
    assert "2 shards, 7 samples" in result.output
    assert "1 samples (14.3%): image is missing" in result.output
    assert "1 samples (14.3%): caption is not UTF-8" in result.output
    assert (
        "Training stops at such a share: fix the shards, or set data.corrupt_limit (now 0.01) above 0.29."
        in result.output
    )
    manifest = load_manifest(shards)
    assert [(s.name, s.samples, s.offset) for s in manifest.shards] == [("a/00000.tar", 4, 0), ("b/00000.tar", 3, 4)]
    assert [s.sha256 for s in manifest.shards] == [
        hashlib.sha256((shards / s.name).read_bytes()).hexdigest() for s in manifest.shards
    ]
    captions = []
    for shard in manifest.shards:
        with open_records(manifest.url(shard)) as records:
            captions += [record.caption for record in records]
    assert captions[:4] == [b"picture 0", b"picture 1", b"no picture", b"picture 3"]
    assert len(captions) == manifest.n
    assert verify(shards, decode=0) == []
    assert not (shards / JOURNAL).exists()


def test_an_interrupted_scan_continues_where_it_stopped(shards):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_shards(shards, on_shard=interrupt, threads=1)
    journal = (shards / JOURNAL).read_text().splitlines()
    assert len(journal) == 1
    (shards / JOURNAL).write_text(journal[0] + "\n" + journal[0][:20])  # killed in the middle of a line
    seen: list[int] = []
    index_shards(shards, on_shard=lambda done, total: seen.append(done), threads=1)
    assert seen == [2], "the result of one shard was in the journal"
    assert load_manifest(shards).n == 7


def test_a_shard_that_has_changed_is_read_again(shards):
    entry = {"name": "a/00000.tar", "samples": 99, "bytes": 1, "sha256": "", "unusable": {}, "problem": ""}
    (shards / JOURNAL).write_text(json.dumps(entry) + "\n")
    assert index_shards(shards).n == 7
    write(shards / "c.tar", [good(7), good(8)])
    (shards / "d.tar").write_bytes(b"")
    with pytest.raises(UserError, match=r"d\.tar is empty"):
        index_shards(shards, replace=True)
    size = (shards / "c.tar").stat().st_size
    write(shards / "c.tar", [good(8), good(7)])
    assert (shards / "c.tar").stat().st_size == size
    write(shards / "d.tar", [good(9)])
    index_shards(shards, replace=True)
    assert verify(shards, decode=0) == []


def test_damaged_and_empty_shards_are_rejected_or_skipped(shards):
    whole = write(shards / "c.tar", [good(7), good(8)]).read_bytes()
    (shards / "c.tar").write_bytes(whole[:3000])
    write(shards / "d.tar", [])
    with pytest.raises(UserError, match=r"2 of 4 shards cannot be used: c.tar ends inside a \w+ .*; d.tar is empty"):
        index_shards(shards)
    result = CliRunner().invoke(command, [str(shards), "--leave-out"], catch_exceptions=False)
    assert "left out: d.tar is empty" in result.output
    assert set(load_manifest(shards).facts["left out"]) == {"c.tar", "d.tar"}
    (shards / "d.tar").write_bytes(whole + whole)
    with pytest.raises(UserError, match=r"d\.tar has zeros where a member should begin, and more .*joined"):
        index_shards(shards, replace=True)


def test_links_in_a_tar_are_refused_and_training_passes_over_them(tmp_path):
    """Regression test: nothing said that their samples are missing. Webdataset passes over them, too."""
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        path = write(tmp_path / "l.tar", [good(1)])
        with tarfile.open(path, "a") as tar:
            for name in ("README", "b.jpg"):
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, "1.jpg"
                tar.addfile(info)
        with pytest.raises(UserError, match=r"l\.tar holds 'b\.jpg' as a link, .*: store the files .*after 1 samples"):
            index_shards(tmp_path)
        with path.open("rb") as file:
            assert len(list(read_records(file))) == 1


def test_what_is_odd_about_shards_is_counted(tmp_path):
    """Regression tests: a tar that was cut between two files, repeated names and files apart were passed in silence."""
    whole = write(tmp_path / "0.tar", [good(k) for k in range(8)]).read_bytes()
    place = starts(tmp_path / "0.tar")[4]
    (tmp_path / "0.tar").write_bytes(whole[:place])
    parts = {f"{k}.{suffix}": good(k)["jpg"] if suffix == "jpg" else b"text" for k in range(6) for suffix in TYPES}
    for name, order in (("1", lambda key: key[::-1]), ("2", str)):  # all texts behind all images, and twice each
        write_members(tmp_path / f"{name}.tar", [(key, parts[key]) for key in sorted(parts, key=order)] * int(name))
    (tmp_path / "3.tgz").touch()
    os.link(tmp_path / "2.tar", tmp_path / "4.tar")
    for seekable in (True, False):
        root = tmp_path if seekable else tmp_path / "list"
        root.mkdir(exist_ok=True)
        urls = () if seekable else (f"file://{tmp_path}/{{0,1,2,4}}.tar",)
        indexed = index_shards(root, urls)
        counts = {note.split()[0] + note.split()[1]: count for note, count in indexed.facts["notes"].items()}
        others = {"filesend": 1} if seekable else {}
        assert counts == {"shardsend": 1, "sampleshave": 18, "shardshave": 1, **others}
    write_members(tmp_path / "1.tar", [("a.jpg", good(1)["jpg"]), ("a.txt", b"one"), *[("a.txt", b"two")] * 3])
    result = CliRunner().invoke(command, [str(tmp_path), "--replace"], catch_exceptions=False)
    assert "3 files are ignored, because their sample has one of the same name already" in result.output
    assert "1 shards end without the zeros of a whole tar" in result.output
    os.truncate(tmp_path / "1.tar", 1024 + 100)
    with pytest.raises(UserError, match=r"cannot be used: 1\.tar ends inside a file"):
        index_shards(tmp_path, replace=True)
    with pytest.raises(UserError, match=r"1 do not exist: if their numbers have gaps, give --shards once for each row"):
        index_shards(tmp_path, [f"{tmp_path}/{{8..8}}.tar", "0.tar"], replace=True)


def test_patterns_and_links_can_name_shards_in_other_folders(shards, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    indexed = index_shards(home, [f"file://{shards}/{{a,b}}/00000.tar"])
    assert [s.name for s in indexed.shards] == [f"file://{shards}/{d}/00000.tar" for d in "ab"]
    assert load_manifest(home, allow_outside=True).n == 7
    (home / "disk").symlink_to(shards)
    (shards / "back").symlink_to(home)
    names = [s.name for s in index_shards(home, replace=True).shards]
    assert names == ["disk/a/00000.tar", "disk/b/00000.tar"], "no endless loop"


def test_mistakes_are_reported_before_any_work(shards, tmp_path, monkeypatch):
    for name in ("latin", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "latin" / os.fsdecode(b"caf\xe9.tar")).touch()
    for root, patterns, message in [
        (tmp_path / "nowhere", (), "There is no folder"),
        (tmp_path / "latin", (), r"The name .*caf\\udce9.tar is not UTF-8, or has a colon, .*: rename the shard"),
        (tmp_path / "empty", (), r"There is no .tar below"),
        (shards, ["a/00000.tar", "{a,b}/00000.tar"], "1 shards are named twice"),
        (shards, ["s3://bucket/{0..3.tar"], r"--shards: .*Braces must be balanced"),
    ]:
        with pytest.raises(UserError, match=message):
            index_shards(root, patterns)
    shutil.rmtree(tmp_path / "latin")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
        with pytest.raises(UserError, match=r"Cannot write to .*Permission denied.*OWN_FOLDER --shards"):
            index_shards(shards)
    for path, message in [
        (shards, rf"`neuclip manifest {shards}` writes one"),
        (shards / "a" / "00000.tar", "It is a shard: give its folder"),
    ]:
        with pytest.raises(UserError, match=message):
            load_manifest(path)
    index_shards(shards)
    with pytest.raises(UserError, match="has a manifest already"):
        index_shards(shards)
    (shards / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"not a manifest, or is damaged \(list .*The same `neuclip download` writes"):
        load_manifest(shards)
    (tmp_path / "download.yaml").write_text("")
    with pytest.raises(UserError, match="made by `neuclip download`"):
        index_shards(shards, replace=True)


def test_captions_in_json_are_not_reported_as_damage(tmp_path):
    for number in range(6):
        write(tmp_path / f"{number}.tar", [{"jpg": jpeg(side=20), "json": {"caption": "a"}}])
    seen: list[int] = []
    with pytest.raises(
        UserError, match=r"None of the first 3 samples .*'caption is missing': 3.* starts with 0/000.jpg"
    ):
        index_shards(tmp_path, threads=1, on_shard=lambda done, total: seen.append(done))
    assert seen == [1, 2, 3], "the scan ends after the first shards"
    assert not (tmp_path / "manifest.json").exists()
    result = CliRunner().invoke(command, [str(tmp_path), "--caption", "json:caption"], catch_exceptions=False)
    assert "data.caption=json:caption" in result.output
    assert load_manifest(tmp_path).facts["unusable"] == {}


def test_unreadable_shards_are_never_skipped(shards, monkeypatch):
    whole = make_manifest.open_shard

    def reset(url):
        if url.endswith("b/00000.tar"):
            raise ConnectionError("reset by peer")
        return whole(url)

    monkeypatch.setattr(make_manifest, "open_shard", reset)
    with pytest.raises(
        UserError, match=r"1 of 2 shards cannot be read: b/00000.tar \(ConnectionError: reset by peer\).*same command"
    ):
        index_shards(shards, leave_out=True)
    assert not (shards / "manifest.json").exists()
    monkeypatch.setattr(make_manifest, "open_shard", whole)
    assert index_shards(shards).n == 7


def test_an_interruption_does_not_wait_for_the_shards_in_flight(shards, monkeypatch):
    """One of two shards never ends: the interrupted scan ends as soon as the other one is done."""
    begun, whole = threading.Event(), make_manifest.open_shard

    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            begun.set()
            time.sleep(0.01)
            return len(buffer)

    def opened(url):
        if "/a/" in url:
            return nullcontext(io.BufferedReader(Endless(), 1 << 20))
        assert begun.wait(30)
        return whole(url)

    def interrupt(done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(make_manifest, "open_shard", opened)
    with pytest.raises(KeyboardInterrupt):
        index_shards(shards, on_shard=interrupt)


def test_invalid_caption_settings_are_refused_here_and_in_training(shards):
    for text in ("", "json:", "txt:foo", "caption.json:x", ".txt", "jpg", "a/b"):
        result = CliRunner().invoke(command, [str(shards), "--caption", text])
        assert isinstance(result.exception, UserError)
        assert "is neither the suffix of a caption" in str(result.exception)
        with pytest.raises(UserError, match="is neither the suffix of a caption"):
            parse(DataConfig, {"sources": "x", "caption": text})
