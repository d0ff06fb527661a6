"""Files of stored features: plain numpy files in which damaged or missing records are noticed."""

import errno
import os
import shutil
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.data.loading.stored_features import FeatureFile
from pipeline.errors import UserError

DIM, N = 6, 40


def make(folder, dtype="<f4"):
    file = FeatureFile(folder / "below" / "features.npy", samples=N, dim=DIM, dtype=dtype)
    file.create()
    return file


def values(ids):
    return torch.stack([torch.randn(DIM, generator=torch.Generator().manual_seed(i)) for i in ids])


def test_values_come_back_bit_for_bit_and_numpy_reads_the_file(tmp_path):
    for dtype in ("<f4", "<f2"):
        store, ids = make(tmp_path / dtype, dtype), [0, 7, N - 1]
        assert all(store.read(i) is None for i in range(N))
        store.write(ids, values(ids))
        expected = values(ids).numpy().astype(dtype)
        assert [store.read(i) for i in ids] == [row.tobytes() for row in expected]
        assert [store.read(i) is None for i in range(N)] == [i not in ids for i in range(N)]
        assert os.path.getsize(store.path) == store.file_bytes
        plain = np.load(store.path)
        assert np.array_equal(plain["values"][7], expected[1])
        assert np.flatnonzero(plain["crc32"]).tolist() == ids


def test_every_damage_of_a_record_is_noticed(tmp_path):
    store = make(tmp_path)
    store.write(range(N), values(range(N)))
    path, size = store.path, store.record_bytes
    first = len(store.header)
    body = bytearray(path.read_bytes())
    body[first + 3 * size + 9] ^= 1  # one bit of sample 3
    body[first + 5 * size + size // 2 : first + 6 * size] = bytes(size - size // 2)  # half of sample 5 was written
    body[first + 8 * size : first + 9 * size] = body[first + 9 * size : first + 10 * size]  # 9 where 8 should be
    body[first + 12 * size : first + 13 * size] = bytes(size)  # a block that never reached the disk
    path.write_bytes(body[: first + 38 * size])  # and the file's end is lost
    assert [i for i in range(N) if store.read(i) is None] == [3, 5, 8, 12, 38, 39]
    store.create()  # as the next start does
    store.write(range(N), values(range(N)))
    assert all(store.read(i) for i in range(N))


def fill(file, first):
    file.create()
    ids = range(first, N, 2)
    file.write(ids, values(ids))


def test_processes_create_and_fill_a_file_together(tmp_path):
    file = FeatureFile(tmp_path / "new" / "features.npy", samples=N, dim=DIM, dtype="<f4")
    processes = [get_context("fork").Process(target=fill, args=(file, first)) for first in (0, 1, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert [file.read(i) for i in range(N)] == [row.numpy().tobytes() for row in values(range(N))]


def test_what_is_not_finite_or_torn_by_a_full_disk_counts_as_missing(tmp_path, monkeypatch):
    store, bad, write = make(tmp_path), values(range(3)), os.pwrite
    bad[1, 2] = float("nan")
    store.write(range(3), bad)
    assert [store.read(i) is None for i in range(4)] == [False, True, False, True]
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:10], offset))
    with pytest.raises(OSError, match="is full"):
        store.write(range(3, 6), values(range(3)))
    assert all(store.read(i) is None for i in range(3, 6))


def test_too_little_space_foreign_files_and_failing_disks_are_reported(tmp_path, monkeypatch):
    path = tmp_path / "features.npy"
    file = FeatureFile(path, samples=10**6, dim=512, dtype="<f2")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(UserError, match=r"features of 1,000,000 samples need 1\.03 GB more .* where 1 GB are free"):
        file.create()
    path.write_text("something else")
    with pytest.raises(UserError, match="is not a file of features"):
        file.create()
    assert path.read_text() == "something else"
    monkeypatch.undo()
    store = make(tmp_path)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(UserError, match=r"features\.npy cannot be read: Input/output error"):
        store.read(0)
