"""Values and paired differences over seeds: their t, p-values of Student's distribution, Holm's correction, cells."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
LEVEL = 0.05
"""Error rate over all comparisons of a page."""


@dataclass(frozen=True)
class Spread:
    """Values over seeds, or paired differences of them; what needs two seeds is None for one.

    Their mean, sample standard deviation, the mean's standard error, its t and two-sided p.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """The values; None if there are none."""
        found = tuple(values)
        return cls(found) if found else None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def sd(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def standard_error(self) -> float | None:
        return None if self.sd is None else self.sd / math.sqrt(len(self.values))

    @property
    def t(self) -> float | None:
        error = self.standard_error
        return self.mean / error if error else None

    @property
    def p(self) -> float | None:
        return None if self.t is None else two_sided_p(self.t, degrees=len(self.values) - 1)

    @property
    def half_width(self) -> float | None:
        """Half of the 95% interval of the mean."""
        error = self.standard_error
        return None if error is None else error * quantile(LEVEL, degrees=len(self.values) - 1)


def two_sided_p(t: float, *, degrees: int) -> float:
    """P(|T| >= |t|) for Student's distribution with a whole number of degrees (Abramowitz and Stegun, 26.7.3 and 4)."""
    angle = math.atan2(abs(t), math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term = total = cosine if degrees % 2 else 1.0
    for k in range(3 if degrees % 2 else 2, degrees, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    if degrees % 2 == 0:
        within = sine * total
    else:
        within = 2 / math.pi * (angle + (sine * total if degrees > 1 else 0.0))
    return max(0.0, 1.0 - within)


def quantile(p: float, *, degrees: int) -> float:
    """The t that has a two-sided p of `p`, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided_p(middle, degrees=degrees) > p else (low, middle)
    return (low + high) / 2


def holm(p_values: Mapping[Name, float]) -> dict[Name, float]:
    """Holm's adjusted p-values: a comparison is significant at a level if its adjusted p is at most that level.

    The error rate holds over all comparisons that are given, whatever their dependence.
    """
    adjusted, largest = {}, 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return adjusted


def significant(compared: Mapping[Name, Spread]) -> set[Name]:
    """The comparisons that are significant at LEVEL after Holm's correction over all of them."""
    adjusted = holm({name: found.p for name, found in compared.items() if found.p is not None})
    return {name for name, p in adjusted.items() if p <= LEVEL}


def difference(own: Mapping[Name, float], other: Mapping[Name, float]) -> Spread | None:
    """Paired differences of values by seed, over the seeds that both have; None if there is none."""
    return Spread.of(own[seed] - other[seed] for seed in own if seed in other)


def shown(value: Spread | None, form: str, unit: str = "") -> str:
    """`12.3 ± 0.4`, mean and standard deviation, or `–` if there is no value."""
    if value is None:
        return "–"
    return f"{value.mean:{form}}{unit}" + (f" ± {value.sd:{form.replace('+', '')}}" if value.sd is not None else "")


def shown_difference(found: Spread | None, form: str, *, error: float | None, is_clear: bool) -> str:
    """`-0.123 ± 0.004 (-9.1)`: mean, `error` and t of paired differences; bold if `is_clear`."""
    if found is None:
        return "–"
    if found.t is None or error is None:
        return f"{found.mean:{form}}"
    text = f"{found.mean:{form}} ± {error:{form[1:]}} ({found.t:+.1f})"
    return f"**{text}**" if is_clear else text


def as_lines(rows: Sequence[Sequence[str]], *, labels: int = 1) -> list[str]:
    """A table as Markdown lines, the first `labels` columns left-aligned; a row with one cell is a group heading."""
    width = len(rows[0])
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * labels + "|---:" * (width - labels) + "|"]
    return lines + [
        f"| {row[0]} |" + " |" * (width - 1) if len(row) == 1 else f"| {' | '.join(row)} |" for row in rows[1:]
    ]
