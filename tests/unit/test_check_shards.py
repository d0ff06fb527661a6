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


def test_every_answer_of_a_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, mode: str, **options: object) -> io.BytesIO:
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
        (Store(ImportError("Install s3fs to access S3")), "a package that is not installed: Install s3fs"),
        (unreadable, r"exists, but cannot be read \(TypeError: unexpected keyword"),
    ]:
        monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, store=store: (store, url))
        with pytest.raises(UserError, match=words):
            check_shards(REMOTE, World())
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url: (matching, url))
    assert check_shards(REMOTE, World()) == 1
