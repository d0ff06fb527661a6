"""Backgrounds as RGB images: a few variants of each are painted once per process, then cropped and mirrored."""

from __future__ import annotations

import functools

import numpy as np
from PIL import Image, ImageFilter

from data_prep.scenes.draws import Draws
from data_prep.scenes.vocabulary import BACKGROUNDS

VARIANTS = 12
CONTRAST = 0.55  # of a background around its mean colour, reduced so that objects stand out
MARGIN = 1.25  # painted larger than needed, so that the crop position can vary


def background(name: str, side: int, draws: Draws) -> Image.Image:
    """A `side` x `side` RGB image of a background; the caller may draw on it."""
    canvas = _painted(name, side, draws.integer(VARIANTS))
    room = canvas.width - side
    left, top = draws.integer(room + 1), draws.integer(room + 1)
    image = canvas.crop((left, top, left + side, top + side))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draws.chance(0.5) else image


@functools.cache
def _painted(name: str, side: int, variant: int) -> Image.Image:
    size = round(side * MARGIN)
    rng = np.random.Generator(np.random.PCG64([list(BACKGROUNDS).index(name), variant]))
    pixels = _PAINTERS[name](size, rng)
    mean = pixels.mean((0, 1))
    pixels = mean + CONTRAST * (pixels - mean)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


def _clouds(size: int, rng: np.random.Generator, grain: float) -> np.ndarray:
    """Smooth noise in [0, 1], [size, size]; `grain` is the size of its spots as a share of the side."""
    cells = max(3, round(1 / grain))
    small = Image.fromarray((rng.random((cells, cells)) * 255).astype(np.uint8), "L")
    return np.asarray(small.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float64)[..., None] / 255


def _mix(low: tuple[int, int, int], high: tuple[int, int, int], share: np.ndarray) -> np.ndarray:
    return np.asarray(low) * (1 - share) + np.asarray(high) * share


def _sky(size: int, rng: np.random.Generator) -> np.ndarray:
    height = np.linspace(0, 1, size)[:, None, None]
    cover = np.clip(_clouds(size, rng, 0.3) * 0.7 + _clouds(size, rng, 0.12) * 0.5 - 0.45, 0, 0.45) * 2
    return _mix((112, 178, 240), (190, 222, 248), height) * (1 - cover) + 252 * cover


def _grass(size: int, rng: np.random.Generator) -> np.ndarray:
    blades = rng.normal(0, 26, (size, size, 1))
    blades = (blades + np.roll(blades, 1, 0) + np.roll(blades, 2, 0)) / 1.6
    return _mix((72, 132, 40), (116, 172, 62), _clouds(size, rng, 0.2)) + blades * (0.7, 1.0, 0.5)


def _night(size: int, rng: np.random.Generator) -> np.ndarray:
    pixels = _mix((8, 8, 30), (34, 24, 70), _clouds(size, rng, 0.4))
    for y, x in rng.integers(0, size - 1, (size * size // 130, 2)):
        pixels[y, x] = rng.uniform(140, 255)
        if rng.random() < 0.25:
            pixels[y : y + 2, x : x + 2] = 235
    return pixels


def _sand(size: int, rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[0:size, 0:size] / size
    ripples = np.sin(2 * np.pi * (9 * y + 0.8 * np.sin(2 * np.pi * (x + rng.random())) + rng.random()))
    return _mix((206, 172, 112), (232, 204, 148), 0.5 + 0.5 * ripples[..., None]) + rng.normal(0, 7, (size, size, 1))


def _brick(size: int, rng: np.random.Generator) -> np.ndarray:
    rows, length = round(size / 8), size / 4.5
    pixels = np.full((size, size, 3), (196, 186, 174), dtype=np.float64)
    course = size / rows
    for row in range(rows + 1):
        top = int(row * course)
        for k in range(-1, 6):
            left = int((k + 0.5 * (row % 2)) * length)
            tone = rng.uniform(0.82, 1.12)
            pixels[top + 1 : int(top + course), max(0, left + 1) : max(0, int(left + length))] = (
                np.array((158, 74, 58)) * tone
            )
    return pixels + rng.normal(0, 6, (size, size, 1))


def _water(size: int, rng: np.random.Generator) -> np.ndarray:
    y, x = np.mgrid[0:size, 0:size] / size
    phase = 2 * np.pi * rng.random(3)
    waves = np.sin(2 * np.pi * (7 * y + 0.35 * np.sin(2 * np.pi * 2.5 * x + phase[0])) + phase[1])
    crests = np.clip(waves - 0.75, 0, 1)[..., None] * 3
    return _mix((14, 84, 138), (38, 132, 178), 0.5 + 0.5 * waves[..., None]) * (1 - 0.5 * crests) + 120 * crests


def _wood(size: int, rng: np.random.Generator) -> np.ndarray:
    grain = Image.fromarray((rng.random((size, size)) * 255).astype(np.uint8), "L").filter(ImageFilter.BoxBlur((8, 0)))
    pixels = _mix((150, 98, 52), (196, 142, 88), np.asarray(grain, dtype=np.float64)[..., None] / 255)
    plank = size // 5
    for k in range(6):
        pixels[k * plank : (k + 1) * plank] *= rng.uniform(0.88, 1.1)
        pixels[k * plank : k * plank + 1] *= 0.55
    return pixels


def _snow(size: int, rng: np.random.Generator) -> np.ndarray:
    return _mix((214, 224, 238), (246, 249, 253), _clouds(size, rng, 0.25)) + rng.normal(0, 3, (size, size, 1))


_PAINTERS = {
    "sky": _sky,
    "grass": _grass,
    "night": _night,
    "sand": _sand,
    "brick": _brick,
    "water": _water,
    "wood": _wood,
    "snow": _snow,
}
