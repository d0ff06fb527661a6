"""Captions of icons: their names, without the part that names a style.

1. The longest prefix, or else the longest suffix, that the set declares as a style is removed ("baseline" from
   "baseline-home", "outline-rounded" from "home-outline-rounded").
2. A last word in `STYLES` is removed as long as the name without it is another icon of the set ("heart-fill" beside
   "heart", but not "traffic-light" unless there is a "traffic").
3. Hyphens become spaces. A name without a letter gives no caption.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

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
    """The caption of an icon; empty if nothing is left that can be read.

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
