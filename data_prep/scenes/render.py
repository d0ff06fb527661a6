"""Render scenes as images: a pure function of (config, index)."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from PIL import Image, ImageChops, ImageDraw

from data_prep.scenes.backgrounds import background
from data_prep.scenes.draws import Draws
from data_prep.scenes.scene import Scene, SceneItem, describe
from data_prep.scenes.scenes_config import ScenesConfig
from data_prep.scenes.shapes import outline
from data_prep.scenes.vocabulary import COLOURS, POSITIONS, Colour

SUPERSAMPLING = 3  # masks are drawn this many times larger, then reduced, for smooth edges at small sizes
RADIUS = {"small": (0.18, 0.20), "medium": (0.28, 0.30), "large": (0.42, 0.46)}
GROUP_RADIUS = (0.14, 0.16)
GROUP_CELLS = [(x, y) for y in (0.19, 0.5, 0.81) for x in (0.19, 0.5, 0.81)]
DARK_EDGE, LIGHT_EDGE = (16, 16, 20), (235, 235, 235)  # outlines as in clip art: shapes look alike in every colour
Placement = tuple[SceneItem, float, float, float]  # item, centre x, centre y, radius; as shares of the side


def draw(config: ScenesConfig, index: int) -> Image.Image:
    """The RGB image of a scene, `image_size` pixels square."""
    scene = describe(config, index)
    draws = Draws(config.seed, index, "image")
    image = background(scene.background, config.image_size, draws)
    for item, x, y, radius in _placements(scene, draws):
        _paste(image, item, (x, y, radius), draws)
    return image


def jpeg(config: ScenesConfig, index: int) -> bytes:
    """The published image as JPEG bytes."""
    buffer = io.BytesIO()
    draw(config, index).save(buffer, "JPEG", quality=config.jpeg_quality)
    return buffer.getvalue()


def _placements(scene: Scene, draws: Draws) -> Iterator[Placement]:
    """Positions of the objects, back to front."""
    if scene.relation is not None:
        yield from _pair(scene, draws)
    elif scene.count > 1:
        for x, y in draws.shuffled(GROUP_CELLS)[: scene.count]:
            jitter = draws.between(-0.02, 0.02), draws.between(-0.02, 0.02)
            yield scene.item, x + jitter[0], y + jitter[1], draws.between(*GROUP_RADIUS)
    else:
        x, y = POSITIONS[scene.position or "centre"][0]
        jitter = draws.between(-0.02, 0.02), draws.between(-0.02, 0.02)
        yield scene.item, x + jitter[0], y + jitter[1], draws.between(*RADIUS[scene.size or "medium"])


def _pair(scene: Scene, draws: Draws) -> Iterator[Placement]:
    """Two objects; the relation is that of `scene.item` to the other: it is the left, upper, inner or front one."""
    assert scene.other is not None
    a, b = draws.between(0.17, 0.21), draws.between(0.17, 0.21)
    x, y = draws.between(0.44, 0.56), draws.between(0.44, 0.56)
    if scene.relation == "beside":
        yield scene.item, x - 0.25, y, a
        yield scene.other, x + 0.25, y, b
    elif scene.relation == "above":
        yield scene.item, x, y - 0.25, a
        yield scene.other, x, y + 0.25, b
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
    colour = _shaded(COLOURS[item.colour][0], draws)
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


def _shaded(colour: Colour, draws: Draws) -> Colour:
    """The colour in a slightly different tone."""
    return tuple(max(0, min(255, round(c + draws.between(-14, 14)))) for c in colour)  # type: ignore[return-value]


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
