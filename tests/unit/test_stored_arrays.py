"""A stored array with any damaged byte counts as missing, and never ends an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.evaluation.run.images import load_array, store_array
from pipeline.evaluation.run.results import OUTCOMES_SUFFIX, read_outcomes
from pipeline.files import sha256_of

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
    store_array(path, ARRAY, "a key")
    for _ in damaged(path):
        found = load_array(path, "a key")
        assert found is None or np.array_equal(found, ARRAY), "a space in the header may be another character"
    np.testing.assert_array_equal(load_array(path, "a key"), ARRAY)


def test_an_array_is_that_of_its_key(tmp_path: Path) -> None:
    """A file that was renamed to that of another key is none, although it is whole."""
    store_array(tmp_path / "a.npy", ARRAY, "a key")
    store_array(tmp_path / "b.npy", ARRAY + 1, "another key")
    (tmp_path / "b.npy").replace(tmp_path / "a.npy")
    assert load_array(tmp_path / "a.npy", "a key") is None
    np.testing.assert_array_equal(load_array(tmp_path / "a.npy", "another key"), ARRAY + 1)


@pytest.mark.filterwarnings("ignore")
def test_damaged_outcomes_are_missing(tmp_path: Path) -> None:
    np.savez(tmp_path / f"task{OUTCOMES_SUFFIX}", rank=ARRAY)
    result, digest = tmp_path / "task.json", sha256_of(tmp_path / f"task{OUTCOMES_SUFFIX}")
    for _ in damaged(tmp_path / f"task{OUTCOMES_SUFFIX}"):
        assert read_outcomes(result, digest) is None
    found = read_outcomes(result, digest)
    assert found is not None
    np.testing.assert_array_equal(found["rank"], ARRAY)
