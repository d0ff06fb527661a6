"""Stored image features: plain numpy files in which damaged or missing records are noticed."""

from __future__ import annotations

import errno
import os
import shutil
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.data.loading.feature_file import FeatureFile, FeatureStore
from pipeline.errors import UserError

DIM, N = 6, 40


def make(folder: Path, dtype: torch.dtype = torch.float32) -> FeatureStore:
    file = FeatureFile(folder / "below" / "features.npy", samples=N, dim=DIM, dtype=dtype)
    file.create()
    return FeatureStore(file)


def values(ids: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([torch.randn(DIM, generator=torch.Generator().manual_seed(int(i))) for i in ids]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_come_back_bit_for_bit_and_numpy_reads_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    store, ids = make(tmp_path, dtype), np.array([0, 7, N - 1])
    assert all(store.read(i) is None for i in range(N))
    store.write(ids, values(ids, dtype))
    for row, sample_id in zip(values(ids, dtype), ids.tolist(), strict=True):
        assert store.read(sample_id) == row.view(torch.uint8).numpy().tobytes()
    assert [store.read(i) is None for i in range(N)] == [i not in ids for i in range(N)]
    plain = np.load(store.file.path)
    assert plain.shape == (N,)
    assert os.path.getsize(store.file.path) == store.file.file_bytes
    assert np.array_equal(
        plain["values"][7], values(ids, dtype)[1].view(torch.uint8).numpy().view(plain["values"].dtype)
    )
    assert np.flatnonzero(plain["crc32"]).tolist() == ids.tolist()


def test_every_damage_of_a_record_is_noticed(tmp_path: Path) -> None:
    store, ids = make(tmp_path), np.arange(N)
    store.write(ids, values(ids))
    path, size = store.file.path, 4 + 4 * DIM
    first = len(store.file.header)
    body = bytearray(path.read_bytes())
    body[first + 3 * size + 9] ^= 1  # one bit of sample 3
    body[first + 5 * size + size // 2 : first + 6 * size] = bytes(size - size // 2)  # half of sample 5 was written
    body[first + 8 * size : first + 9 * size] = body[first + 9 * size : first + 10 * size]  # 9 where 8 should be
    body[first + 12 * size : first + 13 * size] = bytes(size)  # a block that never reached the disk
    path.write_bytes(body[: first + 38 * size])  # and the file's end is lost
    assert [i for i in range(N) if store.read(i) is None] == [3, 5, 8, 12, 38, 39]
    store.file.create()  # as the next run does
    store.write(ids, values(ids))
    assert all(store.read(i) for i in range(N))


def fill(file: FeatureFile, first: int) -> None:
    file.create()
    ids = np.arange(first, N, 2)
    FeatureStore(file).write(ids, values(ids))


def test_processes_create_and_fill_a_file_together(tmp_path: Path) -> None:
    file = FeatureFile(tmp_path / "new" / "features.npy", samples=N, dim=DIM, dtype=torch.float32)
    processes = [get_context("fork").Process(target=fill, args=(file, first)) for first in (0, 1, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = FeatureStore(file)
    assert [store.read(i) for i in range(N)] == [row.numpy().tobytes() for row in values(np.arange(N))]


def test_values_that_are_not_finite_are_not_kept(tmp_path: Path) -> None:
    store, bad = make(tmp_path), values(np.arange(3))
    bad[1, 2] = float("nan")
    store.write(np.arange(3), bad)
    assert [store.read(i) is None for i in range(3)] == [False, True, False]


def test_a_disk_that_fills_up_ends_the_writing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, write, written = make(tmp_path), os.pwrite, 0

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += 1
        if written == 3:
            return write(descriptor, data[:10], offset)  # what a disk does that has ten bytes left
        if written > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    store.write(np.arange(6), values(np.arange(6)))
    assert [store.read(i) is not None for i in range(6)] == [True, True, False, False, False, False]
    assert written == 3
    assert "takes no more features (it is full). What is stored can be read" in caplog.text


def test_too_little_space_and_foreign_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "features.npy"
    file = FeatureFile(path, samples=10**6, dim=512, dtype=torch.bfloat16)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**9))
    with pytest.raises(UserError, match=r"features of 1,000,000 images need 1\.03 GB more .* where 1 GB are free"):
        file.create()
    path.write_text("something else")
    with pytest.raises(UserError, match="is not a file of image features"):
        file.create()
    assert path.read_text() == "something else"
