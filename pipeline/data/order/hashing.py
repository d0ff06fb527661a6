"""Counter-based random numbers: every random choice about data is a hash of named integers, not a generator's state.

The hash is SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). It
is defined by integer arithmetic alone, so the order of a run survives new versions of every library.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15

U64 = NDArray[np.uint64]


class Purpose(IntEnum):
    """What a number is drawn for; different purposes never share a draw."""

    PERMUTE = 1
    INTERLEAVE = 3
    SHUFFLE = 4
    REFILL = 5
    CROP = 6
    ORDER = 7
    PROBE = 8
    CAPTION = 9
    AUGMENT = 12


def mix(x: int) -> int:
    """SplitMix64's finalizer on one 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key(*parts: int) -> int:
    """A 64-bit key from any number of integers; their order matters."""
    state = 0
    for part in parts:
        state = mix((state ^ (part & MASK)) + GAMMA)
    return state


def draws(state: int, counters: NDArray[np.integer]) -> U64:
    """The 64-bit draws of key `state` at `counters`, [n] -> [n]; the same counter always gives the same draw."""
    x = counters.astype(np.uint64)
    x = (x + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(state)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(state: int, counter: int) -> int:
    """`draws` for one counter."""
    return mix((counter + 1) * GAMMA + state)


def uniform(state: int, counter: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (draw(state, counter) >> 11) * 2.0**-53


def permutation(state: int, n: int) -> NDArray[np.int64]:
    """A permutation of range(n): the stable argsort of n draws, int64 [n]."""
    return np.argsort(draws(state, np.arange(n)), kind="stable")


def order_hash(sample_id: NDArray[np.int64], *, epoch: int, batch: int, first_row: int) -> int:
    """A 64-bit hash of which samples are in which rows; hashes of disjoint rows add up to that of the batch."""
    rows = np.arange(first_row, first_row + len(sample_id), dtype=np.uint64) << np.uint64(40)
    hashes = draws(key(Purpose.ORDER, epoch, batch), rows + sample_id.astype(np.uint64))
    return int(hashes.sum(dtype=np.uint64))
