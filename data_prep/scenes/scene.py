"""Scenes: the settings of the built-in corpus, its random draws, the words for what is in a scene, and its content.

A scene is a pure function of its index, independent of image and caption.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

# Held-out indices start here, so that a larger corpus never overlaps with the evaluation sets.
HELD_OUT_START = 10_000_000


FAULTS = (
    ("not_found", 0.030),  # 404
    ("forbidden", 0.008),  # 403
    ("gone", 0.004),  # 410
    ("truncated", 0.003),  # a JPEG that stops half-way, published like this: its hash is right, decoding fails
    ("incomplete", 0.004),  # the connection closes before the announced length
    ("html", 0.008),  # 200 with a web page instead of an image
    ("wrong_hash", 0.006),  # a good image of another scene than the published one
    ("oversize", 0.0005),  # a valid JPEG of huge dimensions
    ("disconnect", 0.002),  # the connection closes without an answer
    ("transient", 0.010),  # 503 to the first request, then the image
    ("slow", 0.010),  # the image, after a delay
    ("stall", 0.0005),  # no answer until the client's time-out has passed
    ("noai", 0.002),  # the image, with `X-Robots-Tag: noai`: its owner does not want it used for training
)
"""Share of the URLs that misbehave, by kind, of the order seen on aged web crawls; slow answers are rare, so that the
demo does not wait long."""


@dataclass(frozen=True)
class ScenesConfig:
    """The built-in corpus: training pairs, and evaluation sets of held-out scenes."""

    pairs: int = 20_000  # training pairs, one URL each; fewer than HELD_OUT_START
    image_size: int = 96  # side of the square images in pixels
    held_out: int = 1_000  # images per zero-shot task
    retrieval_pairs: int = 1_000  # pairs of the retrieval set
    faults: tuple[tuple[str, float], ...] = FAULTS  # what remains is served as published


T = TypeVar("T")


class Draws:
    """The stream of draws for a purpose, such as `Draws(index, "caption")`, and for one scene.

    Only `random.Random.random()` is used, the only method whose sequence Python guarantees to be stable.
    """

    def __init__(self, index: int, purpose: str) -> None:
        digest = hashlib.blake2b(f"0/{index}/{purpose}".encode(), digest_size=8).digest()
        self.unit = random.Random(int.from_bytes(digest, "big")).random  # uniform in [0, 1)

    def chance(self, probability: float) -> bool:
        return self.unit() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.unit()

    def integer(self, stop: int) -> int:
        """Uniform over 0 ... stop - 1."""
        return int(self.unit() * stop)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.integer(len(options))]

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """One option with probability proportional to its weight."""
        left = self.unit() * sum(weights)
        for option, weight in zip(options, weights, strict=True):
            left -= weight
            if left < 0:
                return option
        return options[-1]

    def zipf(self, options: Iterable[T]) -> T:
        """One of the options, which are in decreasing order of frequency: the k-th has weight k ** -TAIL."""
        options = tuple(options)
        return self.weighted(options, [(k + 1) ** -TAIL for k in range(len(options))])

    def favoured(self, options: Sequence[T], favour: float = 0.55) -> T:
        """The first option (canonical word) with probability `favour`, otherwise any of the others (synonyms)."""
        if len(options) == 1 or self.unit() < favour:
            return options[0]
        return self.pick(options[1:])

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return [options[k] for _, k in sorted((self.unit(), k) for k in range(len(options)))]


# Every table is in decreasing order of frequency: the first entries are the head of the distribution.
# The first word of an entry is its class name in the evaluation sets, the others are synonyms that captions use.
Colour = tuple[int, int, int]

SHAPES: dict[str, tuple[str, ...]] = {
    "circle": ("circle", "disc", "round shape", "ball"),
    "square": ("square", "box", "block"),
    "star": ("star", "five-pointed star", "starlet"),
    "triangle": ("triangle", "wedge", "three-sided shape"),
    "heart": ("heart", "love heart", "valentine"),
    "ring": ("ring", "hoop", "band"),
    "cross": ("cross", "plus sign", "plus"),
    "crescent": ("crescent", "moon", "half moon"),
    "diamond": ("diamond", "rhombus", "lozenge"),
    "arrow": ("arrow", "pointer", "arrow sign"),
}

COLOURS: dict[str, tuple[Colour, tuple[str, ...]]] = {
    "red": ((220, 32, 36), ("red", "crimson", "scarlet")),
    "blue": ((36, 78, 222), ("blue", "azure", "royal blue")),
    "yellow": ((248, 218, 42), ("yellow", "lemon", "golden")),
    "green": ((28, 148, 60), ("green", "emerald", "leaf green")),
    "white": ((247, 247, 244), ("white", "ivory", "snow-white")),
    "orange": ((247, 134, 22), ("orange", "tangerine", "amber")),
    "black": ((24, 24, 28), ("black", "jet-black", "ebony")),
    "purple": ((128, 46, 176), ("purple", "violet", "plum")),
    "pink": ((250, 138, 192), ("pink", "rose", "blush")),
    "brown": ((118, 70, 34), ("brown", "chestnut", "chocolate")),
    "turquoise": ((44, 202, 196), ("turquoise", "cyan", "teal")),
    "grey": ((128, 130, 136), ("grey", "gray", "ash grey")),
}

BACKGROUNDS: dict[str, tuple[str, ...]] = {
    "sky": ("in a cloudy sky", "in the clouds", "against a blue sky", "up in the sky"),
    "grass": ("on grass", "in a meadow", "on a green lawn", "on the lawn"),
    "night": ("in the night sky", "at night", "under the stars", "in outer space"),
    "sand": ("on sand", "in the desert", "on a sandy beach", "on the dunes"),
    "brick": ("on a brick wall", "against red bricks", "in front of a brick wall", "on the bricks"),
    "water": ("on water", "in the sea", "over ocean waves", "in the pool"),
    "wood": ("on a wooden table", "on wood", "on wooden boards", "on a plank floor"),
    "snow": ("on snow", "in the snow", "on a snowy field", "on white snow"),
}

TEXTURES: dict[str, tuple[str, ...]] = {
    "plain": ("plain", "solid", "uniform"),
    "striped": ("striped", "stripy", "banded"),
    "spotted": ("spotted", "dotted", "polka-dot"),
    "hollow": ("hollow", "outlined", "empty"),
    "checkered": ("checkered", "chequered", "chessboard"),
    "two-tone": ("two-tone", "half-and-half", "split"),
}

SIZES: dict[str, tuple[str, ...]] = {
    "large": ("large", "big", "huge"),
    "medium": ("medium-sized", "mid-sized", "average-sized"),
    "small": ("small", "little", "tiny"),
}

COUNTS: dict[int, tuple[str, ...]] = {
    1: ("a single", "one", "a lone"),
    2: ("two", "a pair of", "2"),
    3: ("three", "3", "a trio of"),
    4: ("four", "4", "a set of four"),
    5: ("five", "5", "a group of five"),
}

# Centre (x, y) of the object as a share of the image's side, and the words.
POSITIONS: dict[str, tuple[tuple[float, float], tuple[str, ...]]] = {
    "centre": ((0.50, 0.50), ("in the centre", "in the middle", "at the center")),
    "left": ((0.26, 0.50), ("on the left side", "at the left edge", "on the left")),
    "right": ((0.74, 0.50), ("on the right side", "at the right edge", "on the right")),
    "top": ((0.50, 0.26), ("at the top", "at the upper edge", "up top")),
    "bottom": ((0.50, 0.74), ("at the bottom", "at the lower edge", "down below")),
    "top left": ((0.26, 0.26), ("in the top left corner", "in the upper left", "top left")),
    "bottom right": ((0.74, 0.74), ("in the bottom right corner", "in the lower right", "bottom right")),
    "top right": ((0.74, 0.26), ("in the top right corner", "in the upper right", "top right")),
    "bottom left": ((0.26, 0.74), ("in the bottom left corner", "in the lower left", "bottom left")),
}

# Relations of the first object to the second. Class names are undirected ("next to"), because an image does not show
# which of its two objects a class prompt names first; captions can also be directed.
RELATIONS: dict[str, tuple[str, ...]] = {
    "beside": ("next to", "to the left of", "beside", "left of"),
    "above": ("above", "over", "higher than"),
    "inside": ("inside", "within", "enclosed by"),
    "before": ("in front of", "overlapping", "partly covering"),
}

# Frequent motifs: (shape, colour, background, texture).
THEMES: tuple[tuple[str, str, str, str], ...] = (
    ("star", "yellow", "night", "plain"),
    ("heart", "red", "wood", "plain"),
    ("circle", "orange", "sky", "plain"),
    ("circle", "white", "grass", "spotted"),
    ("ring", "red", "water", "striped"),
    ("square", "brown", "sand", "checkered"),
)

GENERIC = ("shape", "object", "thing")


def words(table: dict, key: object) -> tuple[str, ...]:
    """The names of `key` in any table above, canonical first."""
    entry = table[key]
    return entry[1] if isinstance(entry[1], tuple) else entry


TAIL = 0.5  # Zipf exponent of the attributes' frequencies
THEMED = 0.12  # share of scenes drawn from the frequent motifs
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


def describe(index: int) -> Scene:
    """The scene at `index`; training scenes are `range(pairs)`, held-out ones start at `HELD_OUT_START`."""
    draws = Draws(index, "scene")
    if draws.chance(THEMED):
        shape, colour, background, texture = draws.zipf(THEMES)
        item = SceneItem(shape, colour, texture)
    else:
        item = _item(draws)
        background = draws.zipf(BACKGROUNDS)
    kind = draws.weighted(("single", "group", "pair"), (0.7, 0.18, 0.12))
    if kind == "single":
        size = draws.zipf(SIZES)
        return Scene(item, background, size=size, position=None if size == "large" else draws.zipf(POSITIONS))
    if kind == "group":
        return Scene(item, background, count=draws.zipf(tuple(COUNTS)[1:]))
    other = _item(draws)
    while other.shape == item.shape or other.colour == item.colour:
        other = _item(draws)
    return Scene(item, background, other=other, relation=draws.zipf(RELATIONS))


def _item(draws: Draws) -> SceneItem:
    shape, colour = draws.zipf(SHAPES), draws.zipf(COLOURS)
    return SceneItem(shape, colour, "plain" if draws.chance(PLAIN) else draws.zipf(TEXTURES))
