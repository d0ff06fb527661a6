"""The memory of batches: when a block is written again, and what happens on a GPU, with a fake driver."""

import gc
from types import SimpleNamespace

import pytest
import torch

from pipeline.data.loading.blocks import SPARE, Blocks


def fill(blocks, number):
    """What two workers write of a batch."""
    blocks.rows(number, 0, 1).fill_(number)
    blocks.rows(number, 1, 3).fill_(number)


@pytest.mark.parametrize("kept", [0, 1, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_block_is_written_again_when_its_batch_is_gone(ahead, kept):
    """The step's own batch and the one fetched ahead are not copied; if more are kept, they are."""
    blocks, batches, places = Blocks(4, 2, ahead=ahead, pin=False), [], set()
    for number in range(ahead):
        fill(blocks, number)
    for number in range(20):
        fill(blocks, number + ahead)
        batches.append((number, blocks.take()))
        assert all((image == n).all() for n, image in batches)
        places.add(batches[-1][1].data_ptr())
        del batches[: len(batches) - kept]
    own = {blocks._images[i].ctypes.data for i in range(ahead + SPARE)}
    assert (places <= own) == (kept <= 1)


class Driver:
    """Of a GPU that can page-lock memory, or not."""

    def __init__(self, error):
        self.error, self.locked = error, dict[int, int]()

    def cudaHostRegister(self, start, size, flags):
        if not self.error:
            self.locked[start] = size
        return self.error

    def cudaHostUnregister(self, start):
        del self.locked[start]
        return 0


@pytest.mark.parametrize("error", [0, 801])
def test_memory_is_page_locked_once_and_freed_after_its_last_batch(error, monkeypatch, caplog):
    driver, empty, pinned = Driver(error), torch.empty, []

    def fake(*shape, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(cudart=lambda: driver))
    monkeypatch.setattr(torch, "zeros", lambda *_, device: empty(0))
    monkeypatch.setattr(torch, "empty", fake)
    blocks = Blocks(4, 2, ahead=1, pin=True)
    fill(blocks, 0)
    image = blocks.take()
    assert list(driver.locked.values()) == ([] if error else [(1 + SPARE) * 4 * 2 * 2 * 3])
    assert pinned == ([True] if error else []), "batches are copied to page-locked memory only where the driver refuses"
    assert ("cannot page-lock shared memory (error 801)" in caplog.text) == bool(error)
    del blocks
    gc.collect()
    assert bool(driver.locked) == (not error), "a batch is still in use"
    assert (image == 0).all()
    del image
    assert not driver.locked
