"""The index of a shard: reading by it gives what parsing gives, and an index that does not fit is not used."""

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.dataset.verification import verify
from pipeline.data.shards import storage
from pipeline.data.shards.make_manifest import index_shards
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.data.shards.storage import StreamHash, index_path, load_index, open_records, save_index, scan_members
from pipeline.files import sha256_of
from tests.shards import open_loader, reader, write_members, write_shards

MEMBERS = [
    ("0.jpg", b"image"), ("0.json", b"{}"), ("0.txt", b"caption"),
    ("README", b"no sample"), ("1.txt", b"caption first"), ("1.webp", b"image"),
    ("2.jpg", b"the first counts"), ("2.png", b"mask"), ("2.txt", b"first"), ("2.txt", b"the last counts"),
    ("3.txt", b"no image"), ("4.jpg", b""), ("4.TXT", b"empty image"), ("5.a-long-suffix", b"neither"),
    ("n" * 150 + ".jpg", b"long name"), ("n" * 150 + ".txt", b"of PAX"), ("7.json", b"{}"), ("7.jpg", b"last"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["{}", "file://{}"])
@pytest.mark.parametrize("dialect", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_records_are_those_of_the_parser(form, dialect, tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    write_members(path, MEMBERS, format=dialect)
    index, url = scan_members(path), form.format(path)
    expected = {}
    for suffix in ("txt", "json", "a-long-suffix"):
        with open_records(url, caption_suffix=suffix) as records:
            expected[suffix] = [(record.image, record.caption) for record in records]
    assert len(expected["txt"]) == 8
    for suffix, skip, hashed, size in [
        (s, k, h, b) for s in ("txt", "json") for k in range(9) for h in (True, False) for b in (0, 10**6)
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "read_records", lambda *_, **__: pytest.fail("it was parsed"))
            stream_hash = StreamHash() if hashed else None
            given = {"caption_suffix": suffix, "sample_bytes": size, "stream_hash": stream_hash, "index": index}
            with open_records(url, skip=skip, **given) as records:
                assert [(record.image, record.caption) for record in records] == expected[suffix][skip:]
                if stream_hash:
                    assert stream_hash.finish() == (None if size and skip else sha256_of(path))
    with open_records(url, caption_suffix="a-long-suffix", index=index) as records:
        assert [(record.image, record.caption) for record in records] == expected["a-long-suffix"]


def test_an_index_that_is_not_whole_is_not_used(tmp_path):
    manifest = write_shards(tmp_path, [5])
    shard = manifest.shards[0]
    index = index_path(tmp_path, shard.sha256)
    records, whole = list(reader(manifest).read(0)), index.read_bytes()
    assert verify(tmp_path) == []
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-5], bytes(flipped), b"", whole[: 4 + 24], None):
        index.unlink()
        if damaged is not None:
            index.write_bytes(damaged)
        assert load_index(tmp_path, sha256=shard.sha256, samples=5) is None
        assert list(reader(manifest).read(0)) == records
        assert [problem.kind for problem in verify(tmp_path)] == (["index"] if damaged is not None else [])
    manifest.update_indexes()
    assert index.read_bytes() == whole


def test_the_index_of_other_samples_is_not_used(tmp_path):
    manifest = write_shards(tmp_path, [5])
    shard = manifest.shards[0]
    assert load_index(tmp_path, sha256=shard.sha256, samples=5) is not None
    assert load_index(tmp_path, sha256=shard.sha256, samples=4) is None
    for digest in ("", "0" * 64, f"../index/{shard.sha256}"):
        assert load_index(tmp_path, sha256=digest, samples=5) is None
    members = scan_members(tmp_path / shard.name)
    save_index(tmp_path, members, sha256="1" * 64)
    index_path(tmp_path, "1" * 64).replace(index_path(tmp_path, shard.sha256))  # another shard's, of as many samples
    assert load_index(tmp_path, sha256=shard.sha256, samples=5) is None
    for places in ((0, 2), (3, 5)):  # a stranger's: images exchanged, or captions
        moved = members.copy()
        moved["offset"][list(places)] = members["offset"][list(places[::-1])]
        save_index(tmp_path, moved, sha256=shard.sha256)
        assert load_index(tmp_path, sha256=shard.sha256, samples=5) is None
    for numbers in ([0, 9], [0, 2], [1, 0], [9, 0]):  # a stranger's
        members["sample"][3:5] = numbers
        save_index(tmp_path, members, sha256=shard.sha256)
        assert load_index(tmp_path, sha256=shard.sha256, samples=5) is None


def test_what_is_no_index_is_neither_waited_for_nor_followed(tmp_path):
    manifest = write_shards(tmp_path / "data", [5])
    shard = manifest.shards[0]
    index = index_path(tmp_path / "data", shard.sha256)
    whole = index.read_bytes()
    forms: list[Callable[[Path], object]] = [os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
    for replaced in forms:
        index.unlink()
        replaced(index)
        assert load_index(tmp_path / "data", sha256=shard.sha256, samples=5) is None
        manifest.update_indexes()
        assert index.read_bytes() == whole
    index.unlink()
    index.mkdir()  # and one of a former shard
    index.with_name(f"{'0' * 64}.members").mkdir()
    manifest.update_indexes()

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / f"{'1' * 64}.members").touch()
    shutil.rmtree(index.parent)
    index.parent.symlink_to(tmp_path / "other")
    entry = (shard.name, shard.samples, shard.bytes, f"../../outside/{shard.sha256}")
    make_manifest([entry], root=tmp_path / "data").update_indexes()
    assert sorted(path.name for path in tmp_path.rglob("*.members")) == [f"{'1' * 64}.members"]


def test_only_indexes_of_other_shards_are_deleted(tmp_path):
    manifest = write_shards(tmp_path, [5])
    (index,) = (tmp_path / "index").iterdir()
    names = ["notes.members", "x.txt", f"{'0' * 64}.members", f".{'0' * 64}.members.{'0' * 32}.tmp"]
    for name in names:
        (index.parent / name).touch()
    (index.parent / "folder").mkdir()
    manifest.update_indexes()
    assert {path.name for path in index.parent.iterdir()} == {index.name, "folder", *names[:2]}
    shutil.rmtree(index.parent)
    index.parent.write_text("a file of the user's")
    assert index_shards(tmp_path, replace=True).n == 5
    assert index.parent.read_text() == "a file of the user's"


def test_the_indexes_of_joined_sources_are_used(tmp_path, monkeypatch):
    """The joined manifest has absolute names and no folder."""
    for name, first in (("a", 0), ("b", 40)):
        write_shards(tmp_path / name, [20, 20], first=first)
    sources = [str(tmp_path / "a"), str(tmp_path / "b")]

    def epoch():
        with open_loader(tmp_path, sources=sources, streams=2, shuffle_buffer=5) as loader:
            batches = [next(loader) for _ in range(loader.steps_per_epoch)]
            return [[batch.sample_id.tolist(), batch.text[:, 0].tolist()] for batch in batches]

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_records", lambda *_, **__: pytest.fail("it was parsed"))
        indexed = epoch()
    assert all(ids == captions for ids, captions in indexed)
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name / "index")
    assert epoch() == indexed
