"""The elements of scenes and the words for them.

Every table is in decreasing order of frequency: the first entries are the head of the distribution, the last its tail.
The first word of an entry is its class name in the evaluation sets, the others are synonyms that captions use.
"""

from __future__ import annotations

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
