"""Render scenes as images: a pure function of (config, index).

Backgrounds: a few variants of each are painted once per process, then cropped and mirrored. Outlines of the shapes are
in the square [-1, 1] x [-1, 1], y pointing down.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from data_prep.scenes.scene import (
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    Draws,
    Scene,
    SceneItem,
    ScenesConfig,
    describe,
)

SUPERSAMPLING = 3  # masks are drawn this many times larger, then reduced, for smooth edges at small sizes
RADIUS = {"small": (0.18, 0.20), "medium": (0.28, 0.30), "large": (0.42, 0.46)}
GROUP_RADIUS = (0.14, 0.16)
GROUP_CELLS = [(x, y) for y in (0.19, 0.5, 0.81) for x in (0.19, 0.5, 0.81)]
DARK_EDGE, LIGHT_EDGE = (16, 16, 20), (235, 235, 235)  # outlines as in clip art: shapes look alike in every colour
Placement = tuple[SceneItem, float, float, float]  # item, centre x, centre y, radius; as shares of the side


def draw(config: ScenesConfig, index: int) -> Image.Image:
    """The RGB image of a scene, `image_size` pixels square."""
    scene = describe(index)
    draws = Draws(index, "image")
    image = background(scene.background, config.image_size, draws)
    if scene.relation is not None:
        placements = _pair(scene, draws)
    elif scene.count > 1:
        cells = draws.shuffled(GROUP_CELLS)[: scene.count]
        placements = (_jittered(scene.item, x, y, GROUP_RADIUS, draws) for x, y in cells)
    else:
        x, y = POSITIONS[scene.position or "centre"][0]
        placements = iter([_jittered(scene.item, x, y, RADIUS[scene.size or "medium"], draws)])
    for item, x, y, radius in placements:  # back to front
        _paste(image, item, (x, y, radius), draws)
    return image


def jpeg(config: ScenesConfig, index: int) -> bytes:
    """The published image as JPEG bytes."""
    buffer = io.BytesIO()
    draw(config, index).save(buffer, "JPEG", quality=88)
    return buffer.getvalue()


def _jittered(item: SceneItem, x: float, y: float, radius: tuple[float, float], draws: Draws) -> Placement:
    return item, x + draws.between(-0.02, 0.02), y + draws.between(-0.02, 0.02), draws.between(*radius)


def _pair(scene: Scene, draws: Draws) -> Iterator[Placement]:
    """Two objects; the relation is that of `scene.item` to the other: it is the left, upper, inner or front one."""
    assert scene.other is not None
    a, b = draws.between(0.17, 0.21), draws.between(0.17, 0.21)
    x, y = draws.between(0.44, 0.56), draws.between(0.44, 0.56)
    if scene.relation in ("beside", "above"):
        right, down = (0.25, 0.0) if scene.relation == "beside" else (0.0, 0.25)
        yield scene.item, x - right, y - down, a
        yield scene.other, x + right, y + down, b
    elif scene.relation == "inside":
        yield scene.other, x, y, draws.between(0.38, 0.42)
        yield scene.item, x, y, draws.between(0.13, 0.16)
    else:
        side = draws.pick(((-1, -1), (-1, 1), (1, -1), (1, 1)))
        yield scene.other, x + 0.11 * side[0], y + 0.11 * side[1], b * 1.15
        yield scene.item, x - 0.08 * side[0], y - 0.08 * side[1], a * 1.15


def _paste(image: Image.Image, item: SceneItem, where: tuple[float, float, float], draws: Draws) -> None:
    """Draw one object on the image: outline, fill colour and texture."""
    x, y, radius = where
    side = max(4, round(2 * radius * image.width))
    angle = draws.between(-0.12, 0.12)
    size = side * SUPERSAMPLING
    whole = _mask(item.shape, size, 1.0, angle)
    inner = _mask(item.shape, size, 0.6 if item.texture == "hollow" else 0.84, angle)
    colour = tuple(max(0, min(255, round(c + draws.between(-14, 14)))) for c in COLOURS[item.colour][0])
    left, top = round(x * image.width - side / 2), round(y * image.height - side / 2)
    if item.texture == "hollow":
        image.paste(colour, (left, top), ImageChops.subtract(whole, inner).reduce(SUPERSAMPLING))
        return
    edge = DARK_EDGE if sum(colour) > 150 else LIGHT_EDGE
    image.paste(edge, (left, top), whole.reduce(SUPERSAMPLING))
    image.paste(colour, (left, top), inner.reduce(SUPERSAMPLING))
    if item.texture != "plain":
        pattern = ImageChops.multiply(_pattern(item.texture, size, draws), inner)
        light = sum(colour) > 330
        second = tuple(c // 5 for c in colour) if light else tuple(200 + c // 5 for c in colour)
        image.paste(second, (left, top), pattern.reduce(SUPERSAMPLING))


def _mask(shape: str, size: int, scale: float, angle: float) -> Image.Image:
    mask = Image.new("L", (size, size))
    pen = ImageDraw.Draw(mask)
    half, cos, sin = size / 2, math.cos(angle), math.sin(angle)
    for fill, points in outline(shape, scale):
        pen.polygon([(half + half * (x * cos - y * sin), half + half * (x * sin + y * cos)) for x, y in points], fill)
    return mask


def _pattern(texture: str, size: int, draws: Draws) -> Image.Image:
    """The parts of a texture that have the second colour, as a mask over the object's square."""
    mask = Image.new("L", (size, size))
    pen = ImageDraw.Draw(mask)
    shift = draws.unit()
    if texture == "two-tone":
        pen.rectangle((size // 2, 0, size, size), 255)
    elif texture == "striped":
        step = size / 4
        for k in range(-1, 5):
            pen.rectangle((0, (k + shift) * step, size, (k + shift + 0.42) * step), 255)
    elif texture == "spotted":
        step = size / 4.5
        for row in range(-1, 6):
            for column in range(-1, 6):
                x, y = (column + shift + 0.5 * (row % 2)) * step, (row + shift) * step
                pen.ellipse((x - 0.27 * step, y - 0.27 * step, x + 0.27 * step, y + 0.27 * step), 255)
    else:
        step = size / 5
        for row in range(-1, 6):
            for column in range(-1 + row % 2, 6, 2):
                x, y = (column + shift) * step, (row + shift) * step
                pen.rectangle((x, y, x + step, y + step), 255)
    return mask


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
    pixels = _paint(name, size, rng)
    mean = pixels.mean((0, 1))
    pixels = mean + CONTRAST * (pixels - mean)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8), "RGB")


def _paint(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """The colours of a background, [size, size, 3]."""
    y, x = np.mgrid[0:size, 0:size] / size
    match name:
        case "sky":
            height = np.linspace(0, 1, size)[:, None, None]
            cover = np.clip(_clouds(size, rng, 0.3) * 0.7 + _clouds(size, rng, 0.12) * 0.5 - 0.45, 0, 0.45) * 2
            return _mix((112, 178, 240), (190, 222, 248), height) * (1 - cover) + 252 * cover
        case "grass":
            blades = rng.normal(0, 26, (size, size, 1))
            blades = (blades + np.roll(blades, 1, 0) + np.roll(blades, 2, 0)) / 1.6
            return _mix((72, 132, 40), (116, 172, 62), _clouds(size, rng, 0.2)) + blades * (0.7, 1.0, 0.5)
        case "night":
            pixels = _mix((8, 8, 30), (34, 24, 70), _clouds(size, rng, 0.4))
            for row, column in rng.integers(0, size - 1, (size * size // 130, 2)):
                pixels[row, column] = rng.uniform(140, 255)
                if rng.random() < 0.25:
                    pixels[row : row + 2, column : column + 2] = 235
            return pixels
        case "sand":
            ripples = np.sin(2 * np.pi * (9 * y + 0.8 * np.sin(2 * np.pi * (x + rng.random())) + rng.random()))
            pixels = _mix((206, 172, 112), (232, 204, 148), 0.5 + 0.5 * ripples[..., None])
            return pixels + rng.normal(0, 7, (size, size, 1))
        case "brick":
            rows, length = round(size / 8), size / 4.5
            pixels = np.full((size, size, 3), (196, 186, 174), dtype=np.float64)
            for row in range(rows + 1):
                top, bottom = int(row * (size / rows)) + 1, int(int(row * (size / rows)) + size / rows)
                for k in range(-1, 6):
                    left = int((k + 0.5 * (row % 2)) * length)
                    tone = rng.uniform(0.82, 1.12)
                    right = max(0, int(left + length))
                    pixels[top:bottom, max(0, left + 1) : right] = np.array((158, 74, 58)) * tone
            return pixels + rng.normal(0, 6, (size, size, 1))
        case "water":
            phase = 2 * np.pi * rng.random(3)
            waves = np.sin(2 * np.pi * (7 * y + 0.35 * np.sin(2 * np.pi * 2.5 * x + phase[0])) + phase[1])
            crests = np.clip(waves - 0.75, 0, 1)[..., None] * 3
            return _mix((14, 84, 138), (38, 132, 178), 0.5 + 0.5 * waves[..., None]) * (1 - 0.5 * crests) + 120 * crests
        case "wood":
            noise = Image.fromarray((rng.random((size, size)) * 255).astype(np.uint8), "L")
            grain = np.asarray(noise.filter(ImageFilter.BoxBlur((8, 0))), dtype=np.float64)[..., None] / 255
            pixels, plank = _mix((150, 98, 52), (196, 142, 88), grain), size // 5
            for k in range(6):
                pixels[k * plank : (k + 1) * plank] *= rng.uniform(0.88, 1.1)
                pixels[k * plank : k * plank + 1] *= 0.55
            return pixels
    assert name == "snow"
    return _mix((214, 224, 238), (246, 249, 253), _clouds(size, rng, 0.25)) + rng.normal(0, 3, (size, size, 1))


def _clouds(size: int, rng: np.random.Generator, grain: float) -> np.ndarray:
    """Smooth noise in [0, 1], [size, size, 1]; `grain` is the size of its spots as a share of the side."""
    cells = max(3, round(1 / grain))
    small = Image.fromarray((rng.random((cells, cells)) * 255).astype(np.uint8), "L")
    return np.asarray(small.resize((size, size), Image.Resampling.BICUBIC), dtype=np.float64)[..., None] / 255


def _mix(low: tuple[int, int, int], high: tuple[int, int, int], share: np.ndarray) -> np.ndarray:
    return np.asarray(low) * (1 - share) + np.asarray(high) * share


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


_POLYGONS: dict[str, tuple[Point, ...]] = {
    "circle": _disc(0.9),
    "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "star": tuple(
        (radius * math.sin(t), 0.06 - radius * math.cos(t))
        for radius, t in zip((1.0, 0.42) * 5, _angles(10), strict=True)
    ),
    "triangle": ((0, -0.9), (0.92, 0.74), (-0.92, 0.74)),
    "heart": tuple(
        (
            0.059 * 16 * math.sin(t) ** 3,
            -0.062 * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) - 0.14,
        )
        for t in _angles(40)
    ),
    "cross": (
        (-0.32, -0.92), (0.32, -0.92), (0.32, -0.32), (0.92, -0.32), (0.92, 0.32), (0.32, 0.32),
        (0.32, 0.92), (-0.32, 0.92), (-0.32, 0.32), (-0.92, 0.32), (-0.92, -0.32), (-0.32, -0.32),
    ),
    "diamond": ((0, -1), (0.62, 0), (0, 1), (-0.62, 0)),
    "arrow": ((0, -0.98), (0.82, -0.1), (0.32, -0.1), (0.32, 0.95), (-0.32, 0.95), (-0.32, -0.1), (-0.82, -0.1)),
}  # fmt: skip
