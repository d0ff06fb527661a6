"""Noise of web captions."""

from __future__ import annotations

from data_prep.scenes.draws import Draws

_TAILS = (" - stock photo", " | buy online", " (free download)", " #art #shapes", "...", " — page 3", " wallpaper HD")
_HEADS = ("NEW! ", "Stock image: ", "[OC] ", "Download ", "File:", "Best of 2019: ")
_JUNK = ("IMG_{n}.JPG", "untitled-{n}", "DSC0{n}", "image", "{n}x{n} wallpaper", "click to enlarge", "photo {n} of 12")


def spoil(text: str, neighbour: str, draws: Draws) -> str:
    """`text` with one kind of noise: decoration, changed case, typo, truncation, junk, or its neighbour's caption."""
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
