"""Nested subsets: whether a row belongs depends on (seed, its uid or URL) alone.

A row's hash is XXH3-64 of its name with the seed, and a fraction f keeps the hashes below f * 2**64: every machine
computes the same subset, rows are processed in one pass, and a larger fraction contains every smaller one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from data_prep.download_config import SubsetConfig
from pipeline.errors import UserError


class Subset:
    """Selects rows by their names (uid where there is one, else URL)."""

    def __init__(self, config: SubsetConfig) -> None:
        self._config = config
        self._limit = round(config.fraction * 2**64)
        self._index = _open_index(config.index) if config.index else None

    @property
    def keeps_all(self) -> bool:
        return self._config.fraction == 1.0 and self._index is None

    def mask(self, names: Iterable[str]) -> np.ndarray:
        """A boolean per name: whether its row belongs."""
        names = list(names)
        mask = np.ones(len(names), dtype=bool)
        if self._index is not None:
            mask &= _contained(names, self._index)
        if self._config.fraction < 1.0:
            mask &= hashes(names, seed=self._config.seed) < np.uint64(self._limit)
        return mask


def hashes(names: Iterable[str], *, seed: int) -> np.ndarray:
    """XXH3-64 of each name, as uint64."""
    return np.fromiter((xxh3_64_intdigest(name.encode(), seed) for name in names), dtype=np.uint64)


def _open_index(path: str) -> Any:
    """The uid index, memory-mapped because it may have tens of gigabytes; its order is checked at 10,000 places."""
    if not Path(path).is_file():
        raise UserError(f"subset.index = {path!r} does not exist: fetch the published .npy of uids first.")
    try:
        index = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"subset.index = {path!r} is not a complete .npy file of uids ({error}).") from error
    dtype = index.dtype if isinstance(index, np.ndarray) else None
    if dtype is None or [kind for kind, *_ in (dtype.fields or {}).values()] != [np.uint64] * 2 or index.ndim != 1:
        held = "several arrays" if dtype is None else f"{dtype} of shape {index.shape}"
        raise UserError(f"subset.index = {path!r} holds {held}, not pairs of 64-bit halves (uint64).")
    if not len(index):
        raise UserError(f"subset.index = {path!r} holds no uids: nothing would be downloaded.")
    some = np.asarray(index[:: -(-len(index) // 10_000)])
    if (np.sort(some) != some).any():
        raise UserError(f"subset.index = {path!r} is not sorted, so uids in it would not be found: np.sort it first.")
    return index


def _contained(names: list[str], index: Any) -> np.ndarray:
    """Whether each 32-digit hexadecimal uid is in the sorted index (binary search; touches a few pages per uid)."""
    if wrong := next((name for name in names if not re.fullmatch(r"[0-9a-fA-F]{32}", name)), None):
        raise UserError(f"subset.index needs uids of 32 hexadecimal digits, but found one that is not ({wrong!r:.80}).")
    halves = [(int(name[:16], 16), int(name[16:], 16)) for name in names]
    wanted = np.array(halves, dtype=index.dtype)
    places = np.searchsorted(index, wanted)
    places[places == len(index)] = 0
    return np.asarray(index[places] == wanted)
