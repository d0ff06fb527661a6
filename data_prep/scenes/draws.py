"""Random draws that depend only on a name: the same on every machine, process and Python version."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of draws named by `parts`, for example `Draws(seed, index, "caption")`.

    Only `random.Random.random()` is used, the only method whose sequence Python guarantees to be stable.
    """

    def __init__(self, *parts: object) -> None:
        name = "/".join(str(part) for part in parts)
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def unit(self) -> float:
        """Uniform in [0, 1)."""
        return self._random.random()

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random.random()

    def integer(self, stop: int) -> int:
        """Uniform over 0 ... stop - 1."""
        return int(self._random.random() * stop)

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """One option with probability proportional to its weight."""
        left = self._random.random() * sum(weights)
        for option, weight in zip(options, weights, strict=True):
            left -= weight
            if left < 0:
                return option
        return options[-1]

    def zipf(self, options: Sequence[T], exponent: float) -> T:
        """One of the options, which are in decreasing order of frequency: the k-th has weight k ** -exponent."""
        return self.weighted(options, [(k + 1) ** -exponent for k in range(len(options))])

    def favoured(self, options: Sequence[T], favour: float = 0.55) -> T:
        """The first option (canonical word) with probability `favour`, otherwise any of the others (synonyms)."""
        if len(options) == 1 or self.unit() < favour:
            return options[0]
        return options[1 + int(self._random.random() * (len(options) - 1))]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        keyed = [(self._random.random(), k) for k in range(len(options))]
        return [options[k] for _, k in sorted(keyed)]
