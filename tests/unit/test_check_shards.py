"""Every response of an object store about a shard results in a clear message."""

from __future__ import annotations

import io
from pathlib import Path

import fsspec
import pytest

from pipeline.data.shards.check_shards import check_shards
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.distributed.world import World
from pipeline.errors import UserError
from tests.shards import write_shards

REMOTE = make_manifest([("s3://bucket/00000.tar", 5, 100, "")])


class ClientError(Exception):
    """Like botocore's exceptions, not an OSError."""


class Store:
    """A file system that returns a fixed size, or raises an exception instead."""

    def __init__(self, answer: object, content: bytes = b"") -> None:
        self.answer, self.content = answer, content

    def size(self, path: str) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def open(self, path: str, mode: str, **options: object) -> io.BytesIO:
        return io.BytesIO(self.content)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ClientError("An error occurred (403): Forbidden"), r"cannot be accessed \(An error occurred \(403\)"),
        (ClientError(), r"cannot be accessed \(ClientError\)"),
        (PermissionError("denied"), r"cannot be accessed \(denied\)"),
        (FileNotFoundError("no such key"), r"1 are missing \(s3://bucket/00000.tar\)"),
        (None, "does not report its size"),
        (99, "has 99 bytes, not 100"),
    ],
)
def test_every_store_response_is_reported(monkeypatch: pytest.MonkeyPatch, answer: object, words: str) -> None:
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (Store(answer), url))
    with pytest.raises(UserError, match=words):
        check_shards(REMOTE, World())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(UserError, match="a package that is not installed: Install s3fs"):
        check_shards(REMOTE, World())


def test_matching_remote_shard_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, [5])
    store = Store(100, (tmp_path / "00000.tar").read_bytes())
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (store, url))
    assert check_shards(REMOTE, World()) == 1


def test_unreadable_remote_shard_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str, **options: object) -> io.BytesIO:
        raise TypeError("unexpected keyword argument 'block_size'")

    store = Store(100)
    monkeypatch.setattr(store, "open", refuse)
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (store, url))
    with pytest.raises(UserError, match=r"exists, but cannot be read \(TypeError: unexpected keyword"):
        check_shards(REMOTE, World())
