"""Files are replaced atomically."""

import os
import socket
import threading
from contextlib import ExitStack

import pytest

from pipeline import files
from pipeline.checkpoint.reader import damage
from pipeline.errors import UserError
from pipeline.files import (
    LEFTOVERS,
    UMASK,
    check_writable,
    file_lock,
    lock_holder,
    new_folder,
    path_below,
    plain_name,
    read_bounded,
    replacing,
    write_json,
    write_text,
)


def test_a_file_is_created_with_its_folders_and_replaced(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    assert write_text(path, "one") == path
    write_text(path, "zwei\u00e4")
    assert path.read_text(encoding="utf-8") == "zwei\u00e4"
    write_json(path, {"b": [1]})
    assert path.read_text() == '{\n "b": [\n  1\n ]\n}\n'
    assert os.listdir(path.parent) == ["a.txt"]


def test_error_leaves_only_the_old_file(tmp_path):
    path = write_text(tmp_path / "a", "old")

    def fail_half_way():
        with replacing(path) as temporary:
            temporary.write_text("half")
            assert path.read_text() == "old"
            assert temporary.parent == path.parent  # a rename across file systems would not be atomic
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_temporary_names_cannot_be_guessed(tmp_path):
    names = set()
    for _ in range(2):
        with replacing(tmp_path / "a") as file, new_folder(tmp_path / "b") as folder:
            file.touch()
            (folder / "c").touch()
            names |= {file.name, folder.name}
            assert file in tmp_path.glob(LEFTOVERS)
        (tmp_path / "b" / "c").unlink()
    assert len(names) == 4
    with pytest.raises(RuntimeError), new_folder(tmp_path / "d"):
        raise RuntimeError
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o777 & ~UMASK


def test_what_does_not_end_is_not_read(tmp_path):
    """Regression test: a link to /dev/zero in place of a checkpoint.json was read without end."""
    path = tmp_path / "checkpoint.json"
    for make in (lambda: path.symlink_to("/dev/zero"), lambda: os.mkfifo(path), path.touch):
        make()
        if path.is_file():
            os.truncate(path, 2**40)
        with pytest.raises((OSError, ValueError), match=r"not a regular file|larger than 256 MiB"):
            read_bounded(path)
        assert "cannot be read" in str(damage(tmp_path))
        path.unlink()


def test_durable_files_are_flushed_before_they_are_renamed(tmp_path, monkeypatch):
    flushed = []
    fsync = os.fsync

    def record(descriptor):
        flushed.append((os.fstat(descriptor).st_size, (tmp_path / "a").exists()))
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", record)
    write_text(tmp_path / "b", "12345")
    assert not flushed
    write_text(tmp_path / "a", "12345", durable=True)
    assert flushed == [(5, False)]


OUTSIDE = [
    "../x", "a/../../x", "/abs/x", "", ".", "..", "a//x", "a/", "C:x", "a\\..\\x", "a\0x", "a\nx", "x" * 256, "\ud800",
    7, None,
]  # fmt: skip


def test_names_from_outside_stay_within_their_folder(tmp_path):
    for name in OUTSIDE:
        with pytest.raises(UserError, match=r"The mirror's file.* only plain names"):
            path_below(tmp_path, name, what="The mirror's file")
    for name in ("a", ".hidden", "...", "a..b", "Zürich 1.jpg", "x" * 255):
        assert plain_name(name, what="It") == name
    assert path_below(tmp_path, "ema/a.json", what="It") == tmp_path / "ema" / "a.json"
    with pytest.raises(UserError, match=r"It is named 'ema/a\.json'"):
        plain_name("ema/a.json", what="It")


def test_a_place_for_a_result_is_refused_before_the_work(tmp_path):
    file = write_text(tmp_path / "file", "")
    assert check_writable(tmp_path / "new") == tmp_path / "new"
    for path in (tmp_path, tmp_path / "no" / "list", file / "list"):
        with pytest.raises(UserError, match=r"Cannot write .*its folder does not exist"):
            check_writable(path)


def test_a_lock_has_one_holder_or_several_that_share_it(tmp_path):
    path = tmp_path / "new" / ".lock"
    assert not lock_holder(path)
    for held, wanted in ((False, False), (False, True), (True, False)):
        with file_lock(path, shared=held):
            with pytest.raises(BlockingIOError), file_lock(path, shared=wanted, seconds=0):
                pass
            assert lock_holder(path) == ("" if held else f"{socket.gethostname()}, process {os.getpid()}")
    with file_lock(path, shared=True), file_lock(path, shared=True, seconds=0):
        pass
    waiting = ExitStack()
    waiting.enter_context(file_lock(path))
    threading.Timer(0.1, waiting.close).start()
    with file_lock(path, seconds=60):
        assert path.read_text().count("\n") == 1
