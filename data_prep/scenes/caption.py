"""Captions from a grammar with synonyms: a pure function of the index.

`curated` captions resemble those of a careful annotator (all attributes of the scene, no noise) and are used in
retrieval sets. `web` captions resemble alt-text (missing attributes, varying word order, noise) and are used in the URL
table.
"""

from __future__ import annotations

from data_prep.scenes.scene import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    GENERIC,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Draws,
    Scene,
    SceneItem,
    describe,
    words,
)

# Levels of detail of web captions and their frequencies: half are terse and name one or two things. An attribute is
# mentioned with probability detail ** EASE: attributes that are easy to see are omitted more often, as otherwise no
# caption would teach those that are hard to see.
DETAIL = (0.15, 0.5, 1.0), (0.5, 0.4, 0.1)
EASE = {"background": 2.0, "colour": 0.8, "size": 1.5, "texture": 0.2, "position": 0.3}
OPENINGS = ("", "a photo of ", "an image of ", "picture of ", "a drawing of ", "photo: ", "look at ")


NOISE = 0.2  # share of web captions that are noisy
_TAILS = (" - stock photo", " | buy online", " (free download)", " #art #shapes", "...", " — page 3", " wallpaper HD")
_HEADS = ("NEW! ", "Stock image: ", "[OC] ", "Download ", "File:", "Best of 2019: ")
_JUNK = ("IMG_{n}.JPG", "untitled-{n}", "DSC0{n}", "image", "{n}x{n} wallpaper", "click to enlarge", "photo {n} of 12")


def web(index: int) -> str:
    """The training caption of a scene."""
    draws = Draws(index, "caption")
    text = _sentence(describe(index), draws, detail=draws.weighted(*DETAIL))
    if not draws.chance(NOISE):
        return text
    neighbour = _sentence(describe(index + 1), draws, detail=draws.weighted(*DETAIL))
    # One kind of noise: decoration, changed case, typo, truncation, junk, or the neighbour's caption.
    kind = draws.weighted(
        ("decorated", "case", "typo", "cut", "junk", "mismatch"), (0.40, 0.15, 0.15, 0.10, 0.12, 0.08)
    )
    if kind == "decorated":
        return text + draws.pick(_TAILS) if draws.chance(0.6) else draws.pick(_HEADS) + text
    if kind == "case":
        return text.upper() if draws.chance(0.4) else text.title()
    if kind == "typo":
        at = draws.integer(len(text) - 1)
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    if kind == "cut":
        kept = text.split()
        return " ".join(kept[: max(2, int(len(kept) * draws.between(0.4, 0.8)))])
    if kind == "junk":
        return draws.pick(_JUNK).format(n=1000 + draws.integer(9000))
    return neighbour


def curated(index: int) -> str:
    """A clean and complete caption of a scene."""
    return _sentence(describe(index), Draws(index, "curated"), detail=1.0)


def _sentence(scene: Scene, draws: Draws, *, detail: float) -> str:
    """One caption; with `detail` 1 it mentions every attribute."""
    place = where = ""
    if draws.chance(detail ** EASE["background"]):
        place = draws.favoured(words(BACKGROUNDS, scene.background))
    if scene.position is not None and draws.chance(detail ** EASE["position"]):
        where = draws.favoured(words(POSITIONS, scene.position), 0.7)
    subject = _pair(scene, draws, detail=detail) if scene.relation else _subject(scene, draws, detail=detail)
    opening = draws.favoured(OPENINGS)
    if detail < 1 and draws.chance(0.15):
        return ", ".join(part for part in draws.shuffled([subject, where, place]) if part)
    return opening + " ".join(part for part in (subject, where, place) if part)


def _subject(scene: Scene, draws: Draws, *, detail: float) -> str:
    if scene.count > 1:
        return f"{draws.favoured(COUNTS[scene.count], 0.7)} {_noun(scene.item, draws, detail=detail, many=True)}"
    noun = _noun(scene.item, draws, detail=detail)
    # "Medium-sized" is mentioned less often.
    if scene.size is not None and draws.chance(detail ** EASE["size"] * (0.6 if scene.size == "medium" else 1.0)):
        noun = f"{draws.favoured(SIZES[scene.size])} {noun}"
    return f"{draws.favoured(COUNTS[1])} {noun}" if draws.chance(0.2) else _with_article(noun)


def _pair(scene: Scene, draws: Draws, *, detail: float) -> str:
    assert scene.other is not None
    assert scene.relation is not None
    first, second = (_with_article(_noun(item, draws, detail=detail)) for item in (scene.item, scene.other))
    if detail < 1 and draws.chance(0.15):
        second = f"another {draws.pick(GENERIC)}"
    return f"{first} {draws.favoured(RELATIONS[scene.relation], 0.65)} {second}"


def _noun(item: SceneItem, draws: Draws, *, detail: float, many: bool = False) -> str:
    """Texture, colour and shape, for example "striped red star"; sometimes "thing" instead of the shape."""
    adjectives = []
    if draws.chance(detail ** EASE["texture"] * (0.3 if item.texture == "plain" else 1.0)):
        adjectives.append(draws.favoured(TEXTURES[item.texture], 0.7))
    if draws.chance(detail ** EASE["colour"]):
        adjectives.append(draws.favoured(words(COLOURS, item.colour), 0.7))
    generic = draws.chance(0.08 * (1 - detail))
    noun = draws.pick(GENERIC) if generic else draws.favoured(SHAPES[item.shape], 0.85)
    if many:
        noun += "es" if noun.endswith(("s", "x")) else "s"
    return " ".join([*draws.shuffled(adjectives), noun])


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"
