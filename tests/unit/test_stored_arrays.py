"""Stored pixels and outcomes with any damaged byte are right or count as missing, and never end an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.evaluation.run import images
from pipeline.evaluation.run.images import PixelCache
from pipeline.evaluation.run.results import OUTCOMES_SUFFIX, read_outcomes
from pipeline.files import sha256_of

ARRAY = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
VALUES = b"\0 '(,[{}\xff"
"""Bytes that break headers in different ways, apart from single bits."""


def damaged(path: Path) -> Iterator[None]:
    """Write every variant of a file with one other byte."""
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        for other in {*VALUES, byte ^ 1, byte ^ 4} - {byte}:
            path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
            yield
    path.write_bytes(whole)


def stored_pixels(folder: Path) -> tuple[Path, Callable[[], np.ndarray | None]]:
    cache = PixelCache(folder, data="digest", micro_batch=1)
    cache.store("224", 0, ARRAY)
    return next(folder.rglob("*.npz")), lambda: cache.load("224", 0)


def stored_outcomes(folder: Path) -> tuple[Path, Callable[[], np.ndarray | None]]:
    path = folder / f"task{OUTCOMES_SUFFIX}"
    np.savez(path, rank=ARRAY)
    digest = sha256_of(path)
    return path, lambda: (read_outcomes(folder / "task.json", digest) or {}).get("rank")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", [stored_pixels, stored_outcomes])
def test_a_damaged_array_is_missing_or_right(
    store: Callable[[Path], tuple[Path, Callable[[], np.ndarray | None]]], tmp_path: Path
) -> None:
    path, read = store(tmp_path)
    missing = 0
    for _ in damaged(path):
        array = read()
        missing += array is None
        assert array is None or np.array_equal(array, ARRAY), "the archive's own dates may change"
    assert missing > path.stat().st_size
    np.testing.assert_array_equal(read(), ARRAY)


def test_pixels_on_a_full_disk_name_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(images, "replacing", lambda path: nullcontext(Path("/dev/full")))
    with pytest.raises(TaskError, match=r"The cache .* cannot be written \(No space left on device\)"):
        PixelCache(tmp_path, data="digest", micro_batch=1).store("224", 0, np.zeros((1, 300, 300, 3), np.uint8))
