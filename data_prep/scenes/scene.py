"""The content of a scene, independent of image and caption: a pure function of (config, index)."""

from __future__ import annotations

from dataclasses import dataclass

from data_prep.scenes.draws import Draws
from data_prep.scenes.scenes_config import ScenesConfig
from data_prep.scenes.vocabulary import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    THEMES,
)

PLAIN = 0.3  # share of items that are plain, before a texture is drawn for the others


@dataclass(frozen=True, slots=True)
class SceneItem:
    """One kind of object."""

    shape: str
    colour: str
    texture: str


@dataclass(frozen=True, slots=True)
class Scene:
    """A single object (with size and, unless large, position), 2-5 equal objects, or two objects in a relation.

    Two scenes are equal when their descriptions are equal. The renderer draws exact positions, tones and angles from
    the index.
    """

    item: SceneItem
    background: str
    count: int = 1
    size: str | None = None
    position: str | None = None
    other: SceneItem | None = None
    relation: str | None = None


def describe(config: ScenesConfig, index: int) -> Scene:
    """The scene at `index`; training scenes are `range(config.pairs)`, held-out ones start at `HELD_OUT_START`."""
    draws = Draws(config.seed, index, "scene")
    if draws.chance(config.themed):
        shape, colour, background, texture = draws.zipf(THEMES, config.tail)
        item = SceneItem(shape, colour, texture)
    else:
        item = _item(draws, config.tail)
        background = draws.zipf(tuple(BACKGROUNDS), config.tail)
    kind = draws.weighted(("single", "group", "pair"), (0.7, 0.18, 0.12))
    if kind == "single":
        size = draws.zipf(tuple(SIZES), config.tail)
        position = None if size == "large" else draws.zipf(tuple(POSITIONS), config.tail)
        return Scene(item, background, size=size, position=position)
    if kind == "group":
        return Scene(item, background, count=draws.zipf(tuple(COUNTS)[1:], config.tail))
    other = _item(draws, config.tail)
    while other.shape == item.shape or other.colour == item.colour:
        other = _item(draws, config.tail)
    return Scene(item, background, other=other, relation=draws.zipf(tuple(RELATIONS), config.tail))


def _item(draws: Draws, tail: float) -> SceneItem:
    return SceneItem(
        shape=draws.zipf(tuple(SHAPES), tail),
        colour=draws.zipf(tuple(COLOURS), tail),
        texture="plain" if draws.chance(PLAIN) else draws.zipf(tuple(TEXTURES), tail),
    )
