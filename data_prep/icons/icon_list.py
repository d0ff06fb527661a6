"""The icons of the package as rows: their captions, which are used, and which are held out for evaluation.

Everything is chosen by hashes, without a seed. Three tasks are held out, in this order:

- `unseen-sets-retrieval`: every icon of some authors, chosen until their icons are the wanted share of all. By author,
  because the sets of an author are often one drawing in several weights.
- `rare-phrases`: every icon with one of some rare captions, the classes of a zero-shot task.
- `retrieval`: pairs with distinct captions. The other icons with the same author and caption, which are mostly the same
  drawing in another style, are held out with them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep import reasons
from data_prep.icons.icon_package import HeldOutConfig, SetFacts, read_icon_set
from data_prep.pairs.listing import Listed
from pipeline.errors import UserError

LICENCE, BRAND, HIDDEN = "licence", "brand logos", "hidden"
NO_DRAWING, DUPLICATE, NOT_RENDERED, BLANK = "no drawing", "duplicate drawing", "not rendered", "blank image"
_SIDE = 16  # the side of an icon that states none, in the package's format


@dataclass(frozen=True)
class IconOptions:
    """What decides which icons are listed, and how they look."""

    version: str
    licences: tuple[str, ...]
    fraction: float
    held_out: HeldOutConfig
    icon_size: int


def list_icons(folder: Path, sets: list[SetFacts], options: IconOptions) -> list[Listed]:
    """Every icon of the package as a row, with its SVG or the reason why it is not used.

    Takes about three bytes of memory per byte of the sets that are used: 1 GB for the whole package.
    """
    drawings: set[bytes] = set()
    rows: list[Listed] = []
    for about in sets:
        rows += _rows_of(about, read_icon_set(folder, about.prefix), options, drawings)
    author = {about.prefix: about.author for about in sets}
    icons = [Icon(r.place, author[r.place.partition(":")[0]], r.captions[0]) for r in rows if not r.problem]
    held = hold_out(icons, options.held_out)
    found = []
    for row in rows:
        if row.place in held:
            svg = row.image if held[row.place] else ""
            found.append(Listed(row.place, svg, row.captions, problem=HELD_OUT, detail=held[row.place]))
        elif share_of(f"fraction {row.place}") < options.fraction:
            found.append(row)
    return sorted(found, key=lambda row: share_of(f"order {row.place}"))


def _rows_of(about: SetFacts, tree: Mapping[str, Any], options: IconOptions, drawings: set[bytes]) -> Iterator[Listed]:
    """The rows of one set. `drawings` has the digests of all drawings so far: a repeated one is not used again."""
    prefixes, suffixes = declared_styles(tree)
    names = tree["icons"].keys()
    is_brand = about.category == "Logos" or about.prefix.endswith("-brands")
    refused = LICENCE if about.licence not in options.licences else BRAND if is_brand else ""
    for name, icon in tree["icons"].items():
        place = f"{about.prefix}:{name}"
        if refused:
            yield Listed(place, problem=refused, detail=about.licence if refused == LICENCE else about.category)
            continue
        svg = svg_of(icon, tree)
        caption = caption_of(name, prefixes=prefixes, suffixes=suffixes, siblings=names)
        lacks = NO_DRAWING if not svg else reasons.NO_CAPTION if not caption else ""
        if problem := HIDDEN if icon.get("hidden") else lacks:
            yield Listed(place, problem=problem)
            continue
        digest = hashlib.sha256(svg.encode()).digest()
        if digest in drawings:
            yield Listed(place, problem=DUPLICATE)
            continue
        drawings.add(digest)
        yield Listed(place, svg, (caption,))


def svg_of(icon: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The icon as a square SVG document; empty if it has no drawing. Its sides are the icon's own, else its set's."""
    body = icon.get("body")
    if not isinstance(body, str) or not body.strip():
        return ""
    left, top = (icon.get(key, defaults.get(key, 0)) for key in ("left", "top"))
    width, height = (icon.get(key, defaults.get(key, _SIDE)) for key in ("width", "height"))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="100" height="100" viewBox="{left} {top} {width} {height}">{body}</svg>'
    )


STYLES = frozenset({
    "alt", "bold", "broken", "color", "duo", "duotone", "fill", "filled", "flat", "light", "line", "linear", "outline",
    "outlined", "regular", "remix", "round", "rounded", "sharp", "solid", "thin", "twotone", "variant",
})  # fmt: skip


def declared_styles(icon_set: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The prefixes and suffixes that a set declares, longest first."""
    found = []
    for kind in ("prefixes", "suffixes"):
        names: Iterable[str] = (icon_set.get(kind) or {}).keys()
        found.append(sorted((name for name in names if name), key=lambda name: (-len(name), name)))
    return found[0], found[1]


def caption_of(name: str, *, prefixes: Iterable[str], suffixes: Iterable[str], siblings: Collection[str]) -> str:
    """The caption of an icon: its name, without the part that names a style; empty if no letter is left.

    1. The longest prefix, or else the longest suffix, that the set declares as a style is removed ("baseline" from
       "baseline-home", "outline-rounded" from "home-outline-rounded").
    2. A last word in `STYLES` is removed as long as the name without it is another icon of the set ("heart-fill" beside
       "heart", but not "traffic-light" unless there is a "traffic").
    3. Hyphens become spaces.

    Args:
        name: The icon's name within its set.
        prefixes: Declared prefixes, longest first.
        suffixes: Declared suffixes, longest first.
        siblings: The names of the set.
    """
    prefix = next((one for one in prefixes if name.startswith(f"{one}-")), None)
    suffix = next((one for one in suffixes if name.endswith(f"-{one}")), None)
    if prefix is not None:
        name = name.removeprefix(f"{prefix}-")
    elif suffix is not None:
        name = name.removesuffix(f"-{suffix}")
    while True:
        rest, _, last = name.rpartition("-")
        if last not in STYLES or rest not in siblings:
            break
        name = rest
    words = " ".join(re.split(r"[-_\s]+", name.strip("-_ ")))
    return words if any(letter.isalpha() for letter in words) else ""


HELD_OUT = "held out"
RARE = range(4, 21)
"""How many icons have a rare caption."""
KNOWN_WORD = 20
"""Captions that a word must occur in to be part of a rare caption: its words are known, the combination is not."""
TASKS = ("retrieval", "unseen-sets-retrieval", "rare-phrases")


@dataclass(frozen=True, slots=True)
class Icon:
    """A usable icon."""

    place: str
    """PREFIX:NAME."""
    author: str
    caption: str


def share_of(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def hold_out(icons: Sequence[Icon], wanted: HeldOutConfig) -> dict[str, str]:
    """The held-out icons: place -> task, or "" for one that is in no task but must not be trained on.

    Raises:
        UserError: There are too few icons for what is wanted.
    """
    held: dict[str, str] = {}
    authors = _authors(icons, wanted.sets)
    unseen = [icon for icon in icons if icon.author in authors]
    held |= dict.fromkeys((icon.place for icon in unseen), "")
    held |= {icon.place: "unseen-sets-retrieval" for icon in _distinct(unseen, wanted.pairs)}
    rest = [icon for icon in icons if icon.author not in authors]
    phrases = _rare(rest, wanted.phrases)
    held |= {icon.place: "rare-phrases" for icon in rest if icon.caption in phrases}
    rest = [icon for icon in rest if icon.caption not in phrases]
    captions = len({icon.caption for icon in rest})
    if 2 * wanted.pairs > captions:
        raise UserError(
            f"held_out.pairs = {wanted.pairs:,}, but there are only {captions:,} distinct captions, and at least half "
            "of them must be left for training: hold out fewer."
        )
    chosen = _distinct(rest, wanted.pairs)
    alike = {(icon.author, icon.caption) for icon in chosen}
    held |= {icon.place: "" for icon in rest if (icon.author, icon.caption) in alike}
    return held | {icon.place: "retrieval" for icon in chosen}


def _authors(icons: Iterable[Icon], share: float) -> set[str]:
    """Authors whose icons are together at most this share of all, by their hashes; none has more than half of it."""
    counts = Counter(icon.author for icon in icons)
    room = share * counts.total()
    largest = room / 2
    chosen = set()
    for author in sorted(counts, key=share_of):
        if counts[author] <= min(room, largest):
            room -= counts[author]
            chosen.add(author)
    return chosen


def _rare(icons: Iterable[Icon], count: int) -> set[str]:
    """Rare captions of two or more words, used by at least two authors."""
    authors: dict[str, set[str]] = defaultdict(set)
    times: Counter[str] = Counter()
    for icon in icons:
        times[icon.caption] += 1
        authors[icon.caption].add(icon.author)
    words = Counter(word for caption in times for word in set(caption.split()))
    candidates = [
        caption
        for caption, number in times.items()
        if number in RARE
        and len(authors[caption]) > 1
        and re.fullmatch(r"[a-z]+( [a-z]+)+", caption)
        and all(words[word] >= KNOWN_WORD for word in caption.split())
    ]
    if len(candidates) < count:
        raise UserError(f"held_out.phrases = {count:,}, but only {len(candidates):,} captions qualify: hold out fewer.")
    return set(sorted(candidates, key=share_of)[:count])


def _distinct(icons: Iterable[Icon], count: int) -> list[Icon]:
    """The first icons with distinct captions, in the order of their hashes."""
    first: dict[str, Icon] = {}
    for icon in sorted(icons, key=lambda icon: share_of(icon.place)):
        if len(first) == count:
            break
        first.setdefault(icon.caption, icon)
    return list(first.values())
