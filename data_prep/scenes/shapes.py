"""Outlines of the shapes in the square [-1, 1] x [-1, 1], y pointing down."""

from __future__ import annotations

import functools
import math

Point = tuple[float, float]
Layers = tuple[tuple[int, tuple[Point, ...]], ...]  # (fill: 255 adds, 0 cuts out; polygon), in drawing order


@functools.cache
def outline(shape: str, scale: float = 1.0) -> Layers:
    """The polygons of a shape, shrunk by `scale` about its centre.

    Cut-outs grow instead, so that the inner outline of a ring or a crescent has an edge on both sides.
    """
    if shape == "ring":
        return (255, _disc(0.95 * scale)), (0, _disc(0.5 / scale**0.7))
    if shape == "crescent":
        return (255, _disc(0.95 * scale)), (0, _disc(0.74, x=0.42 - 0.3 * (1 - scale)))
    return ((255, tuple((x * scale, y * scale) for x, y in _POLYGONS[shape])),)


def _disc(radius: float, x: float = 0.0) -> tuple[Point, ...]:
    return tuple((x + radius * math.cos(t), radius * math.sin(t)) for t in _angles(36))


def _angles(count: int) -> list[float]:
    return [2 * math.pi * k / count for k in range(count)]


def _star() -> tuple[Point, ...]:
    radii = (1.0, 0.42)
    turns = _angles(10)
    return tuple((radii[k % 2] * math.sin(t), 0.06 - radii[k % 2] * math.cos(t)) for k, t in enumerate(turns))


def _heart() -> tuple[Point, ...]:
    return tuple(
        (
            0.059 * 16 * math.sin(t) ** 3,
            -0.062 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) - 0.14,
        )
        for t in _angles(40)
    )


def _cross(arm: float = 0.32, reach: float = 0.92) -> tuple[Point, ...]:
    a, r = arm, reach
    right = [(a, -a), (r, -a), (r, a), (a, a)]
    return ((-a, -r), (a, -r), *right, (a, r), (-a, r), *((-x, -y) for x, y in right))


_POLYGONS: dict[str, tuple[Point, ...]] = {
    "circle": _disc(0.9),
    "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "star": _star(),
    "triangle": ((0, -0.9), (0.92, 0.74), (-0.92, 0.74)),
    "heart": _heart(),
    "cross": _cross(),
    "diamond": ((0, -1), (0.62, 0), (0, 1), (-0.62, 0)),
    "arrow": ((0, -0.98), (0.82, -0.1), (0.32, -0.1), (0.32, 0.95), (-0.32, 0.95), (-0.32, -0.1), (-0.82, -0.1)),
}
