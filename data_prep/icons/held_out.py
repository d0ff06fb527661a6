"""Which icons are used, and which are held out for evaluation. Everything is chosen by hashes, without a seed.

Three tasks are held out, in this order:

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data_prep.settings.icons_config import HeldOutConfig
from pipeline.errors import UserError

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
