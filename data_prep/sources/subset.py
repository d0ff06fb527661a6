"""Nested subsets: whether a row belongs depends on (seed, its uid or URL) alone.

A row's hash is XXH3-64 of its name with the seed, and a fraction f keeps the hashes below f * 2**64: every machine
computes the same subset, rows are processed in one pass, and a larger fraction contains every smaller one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
    try:
        index = np.load(path, mmap_mode="r")
    except (ValueError, EOFError, OSError) as error:
        raise UserError(
            f"subset.index = {path!r} is not a complete .npy file of uids ({error}): fetch the published one first."
        ) from error
    dtype = index.dtype if isinstance(index, np.ndarray) else np.dtype(object)
    is_of_uids = [kind for kind, *_ in (dtype.fields or {}).values()] == [np.uint64] * 2 and index.ndim == 1
    some = np.asarray(index[:: max(1, -(-len(index) // 10_000))]) if is_of_uids else None
    if some is None or not len(some) or (np.sort(some) != some).any():
        held = f"{len(index):,} of {dtype}" if is_of_uids else f"{dtype}s"
        raise UserError(
            f"subset.index = {path!r} must be one sorted array of pairs of 64-bit halves (uint64), and holds {held}: "
            "np.sort one that is not, else uids in it would not be found."
        )
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
