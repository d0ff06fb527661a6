"""A stored array with any damaged byte counts as missing, and never ends an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.evaluation.runner.array_file import load_array, store_array
from pipeline.evaluation.runner.results import OUTCOMES_SUFFIX, read_outcomes

ARRAY = np.arange(6.0).reshape(2, 3)
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


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_array_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    store_array(path, ARRAY)
    for _ in damaged(path):
        found = load_array(path)
        assert found is None or np.array_equal(found, ARRAY), "a space in the header may be another character"
    np.testing.assert_array_equal(load_array(path), ARRAY)


@pytest.mark.filterwarnings("ignore")
def test_damaged_outcomes_are_missing(tmp_path: Path) -> None:
    np.savez(tmp_path / f"task{OUTCOMES_SUFFIX}", rank=ARRAY)
    result = tmp_path / "task.json"
    for _ in damaged(tmp_path / f"task{OUTCOMES_SUFFIX}"):
        found = read_outcomes(result)
        assert found is None or all(np.array_equal(array, ARRAY) for array in found.values())
    found = read_outcomes(result)
    assert found is not None
    np.testing.assert_array_equal(found["rank"], ARRAY)
