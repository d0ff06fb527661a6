"""Shards behind URLs and failing connections, and those that are not what their manifest says."""

import errno
import io
import itertools
import threading
from unittest.mock import patch

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from pipeline.data.loading.stream_reader import ALTERED, SequentialReader
from pipeline.data.shards import storage
from pipeline.data.shards.check_shards import check_shards
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.data.shards.storage import open_records, scan_members
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.shards import reader, write_shards


def alter(path):
    """Change a byte of the first sample's caption, so that the tar stays readable and only its hash is wrong."""
    data = path.read_bytes()
    place = data.index(b"caption 0")
    path.write_bytes(data[:place] + b"C" + data[place + 1 :])


def test_an_altered_shard_is_noticed_at_its_end_wherever_reading_begins(tmp_path, caplog):
    """What was passed on before the end of the shard cannot be taken back."""
    manifest = write_shards(tmp_path, [3, 2])
    alter(tmp_path / "00000.tar")
    records = reader(manifest, altered_shards="stop").read(0)
    assert [next(records).caption, next(records).caption] == [b"Caption 0", b"caption 1"]
    with pytest.raises(UserError, match=r"00000.tar are not those of its manifest: .* its 3 samples, ids 0 to 2, may"):
        next(records)
    assert len(list(reader(manifest, altered_shards="stop").read(3))) == 2, "the other shard is intact"
    rows = [(f"file://{tmp_path / s.name}", s.samples, s.bytes, s.sha256) for s in manifest.shards]
    for given, position in itertools.product((manifest, make_manifest(rows)), (0, 1, 2)):  # URLs are hashed, too
        caplog.clear()
        one = reader(given, altered_shards="skip")
        problems = [record.problem for record in one.read(position)]
        assert problems == [""] * (2 - position) + [ALTERED, "", ""]
        assert [record.problem for record in one.read(0)] == [ALTERED] * 3 + [""] * 2
        assert caplog.text.count("ids 0 to 2") == 1
    unhashed = make_manifest([(s.name, s.samples, s.bytes, "") for s in manifest.shards], root=tmp_path)
    for read in (reader(manifest, altered_shards="ignore"), reader(unhashed, altered_shards="stop")):
        assert [record.problem for record in read.read(0)] == [""] * 5


class Flaky(MemoryFileSystem):
    """A store whose constructor refuses unknown arguments, like S3's."""

    protocol = "flaky"
    whole = b""

    def __init__(self):
        super().__init__()

    def _open(self, path, mode="rb", **options):
        assert options["block_size"] > 0
        return io.BytesIO(self.whole)


class Dropping(io.BytesIO):
    """A connection that fails after `after` bytes."""

    def __init__(self, data, after):
        super().__init__(data[:after])
        self.whole = after >= len(data)

    def seekable(self):
        return False

    def read(self, size=-1):
        if not (data := super().read(size)) and not self.whole:
            raise ConnectionError("reset by peer")
        return data


def test_a_server_is_read_ahead_while_samples_are_decoded(tmp_path, monkeypatch):
    manifest, remote = in_flaky_store(tmp_path, monkeypatch, samples=40)
    monkeypatch.setattr(storage, "BUFFER", 2048)
    ahead, fetched = threading.Event(), list[tuple[int, int]]()

    class Ranges(AbstractBufferedFile):
        def _fetch_range(self, start, end):
            fetched.append((start, end))
            if threading.current_thread() is not threading.main_thread():
                ahead.set()
            return Flaky.whole[start:end]

    def opened(self, path, mode="rb", **options):
        return Ranges(self, path, mode, size=len(self.whole), **options)

    monkeypatch.setattr(Flaky, "_open", opened)
    records = reader(remote).read(0)
    first = next(records)
    assert ahead.wait(30), "nothing is read while the caller works"
    assert len(fetched) <= 3, "more than the block ahead is in memory"
    everything = list(reader(manifest).read(0))
    assert first == everything[0]
    records.close()
    assert list(reader(remote).read(0)) == everything
    fetched.clear()
    with open_records("flaky://bucket/00000.tar", skip=38, index=scan_members(tmp_path / "00000.tar")) as found:
        assert [record.caption for record in found] == [b"caption 38", b"caption 39"]
    assert fetched[0][0] > len(Flaky.whole) // 2, "nothing before the first sample is read"


class Streamed(io.BytesIO):
    """What fsspec opens if a server says that it does not send ranges."""

    def seek(self, offset, whence=0):
        if (offset, whence) != (self.tell(), 0):
            raise ValueError("Cannot seek streaming HTTP file")
        return offset


def test_a_server_that_sends_no_ranges_is_read_from_the_start(tmp_path, monkeypatch):
    in_flaky_store(tmp_path, monkeypatch, samples=5)
    monkeypatch.setattr(Flaky, "_open", lambda self, path, mode="rb", **_: Streamed(self.whole))
    for index in (None, scan_members(tmp_path / "00000.tar")):
        with open_records("flaky://bucket/00000.tar", skip=3, index=index) as found:
            assert [record.caption for record in found] == [b"caption 3", b"caption 4"]


def in_flaky_store(folder, monkeypatch, *, samples):
    """A shard on the disk, and the same shard in a store of type `Flaky`."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    manifest = write_shards(folder, [samples])
    monkeypatch.setattr(Flaky, "whole", (folder / "00000.tar").read_bytes())
    return manifest, make_manifest([("flaky://bucket/00000.tar", samples, manifest.shards[0].bytes, "")])


def test_a_connection_that_drops_repeatedly_loses_nothing_while_samples_arrive(tmp_path, monkeypatch):
    manifest, remote = in_flaky_store(tmp_path, monkeypatch, samples=40)
    # Each time, all earlier bytes are read again, so the connection must last longer each time.
    budgets = iter([manifest.shards[0].bytes * part // 8 for part in (2, 4, 6, 16)])
    monkeypatch.setattr(Flaky, "_open", lambda self, path, mode="rb", **_: Dropping(self.whole, next(budgets)))
    one = reader(remote, retries=1)
    assert list(one.read(0)) == list(reader(manifest).read(0))
    assert one.pause.__self__ == [1.0, 1.0, 1.0], "three failures, each the first at its position"


def test_running_out_of_file_descriptors_does_not_count_as_a_broken_shard(tmp_path):
    manifest, exhausted = write_shards(tmp_path, [3]), OSError(errno.EMFILE, "Too many open files")
    words = r"Too many open files.*ulimit -n.*data.streams"
    with (
        patch(f"{SequentialReader.__module__}.open_records", side_effect=exhausted),
        pytest.raises(UserError, match=words),
    ):
        list(reader(manifest).read(0))


REMOTE = make_manifest([("s3://bucket/00000.tar", 5, 100, "")])


class ClientError(Exception):
    """Like botocore's exceptions, not an OSError."""


class Store:
    """A file system that returns a fixed size, or raises an exception instead."""

    def __init__(self, answer, content=b""):
        self.answer, self.content = answer, content

    def size(self, path):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def open(self, path, mode, **options):
        return io.BytesIO(self.content)


def test_every_answer_of_a_store_is_reported(tmp_path, monkeypatch):
    def refuse(path, mode, **options):
        raise TypeError("unexpected keyword argument 'block_size'")

    write_shards(tmp_path, [5])
    matching, unreadable = Store(100, (tmp_path / "00000.tar").read_bytes()), Store(100)
    monkeypatch.setattr(unreadable, "open", refuse)
    for store, words in [
        (Store(ClientError("An error occurred (403): Forbidden")), r"cannot be accessed \(An error occurred \(403\)"),
        (Store(ClientError()), r"cannot be accessed \(ClientError\)"),
        (Store(PermissionError("denied")), r"cannot be accessed \(denied\)"),
        (Store(FileNotFoundError("no such key")), r"1 are missing \(s3://bucket/00000.tar\)"),
        (Store(None), "does not report its size"),
        (Store(99), "has 99 bytes, not 100"),
        (Store(ImportError("Install s3fs to access S3")), r"cannot be accessed \(Install s3fs"),
        (unreadable, r"exists, but cannot be read \(TypeError: unexpected keyword"),
    ]:
        monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, store=store: (store, url))
        with pytest.raises(UserError, match=words):
            check_shards(REMOTE, World())
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (matching, url))
    assert check_shards(REMOTE, World()) == 1
