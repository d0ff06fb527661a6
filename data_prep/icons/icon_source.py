"""Icons as rows of pairs: listed once with everything that is needed to render them, then rendered shard by shard."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import reasons
from data_prep.icons.held_out import HELD_OUT, Icon, hold_out, share_of
from data_prep.icons.icon_package import SetFacts, package_folder, read_icon_set, read_sets
from data_prep.pairs.listing import Listed, Listing, write_listing
from data_prep.pairs.pair import Pair
from data_prep.settings.icons_config import PACKAGE, HeldOutConfig
from pipeline.errors import UserError
from pipeline.files import write_json
from pipeline.pixels import read_rgb

LICENCE, BRAND, HIDDEN = "licence", "brand logos", "hidden"
NO_DRAWING, DUPLICATE, NOT_RENDERED, BLANK = "no drawing", "duplicate drawing", "not rendered", "blank image"
SETS_NAME = "sets.json"
_SIDE = 16  # the side of an icon that states none, in the package's format


@dataclass(frozen=True)
class IconOptions:
    """What decides which icons are listed, and how they look."""

    version: str
    licences: tuple[str, ...]
    fraction: float
    held_out: HeldOutConfig
    icon_size: int


@dataclass(frozen=True)
class IconSource:
    """The icons in the order of a hash of their names, so that every shard holds all styles."""

    listing: Listing
    options: IconOptions
    sets: Mapping[str, SetFacts]

    @property
    def rows(self) -> int:
        return self.listing.rows

    @property
    def facts(self) -> dict[str, Any]:
        options = {**asdict(self.options), "licences": list(self.options.licences)}
        renderer = f"resvg-py {importlib.metadata.version('resvg-py')}"
        return {"kind": "icons", "package": PACKAGE, **options, "renderer": renderer, "digest": self.listing.digest}

    def read(self, start: int, stop: int) -> Iterator[Pair]:
        for row in self.listing.read(start, stop):
            yield Pair(row.place, problem=row.problem, detail=row.detail) if row.problem else self.rendered(row)

    def rendered(self, row: Listed) -> Pair:
        """A listed icon with its picture, or why there is none."""
        about = self.sets[row.place.partition(":")[0]]
        try:
            picture = render(row.image, self.options.icon_size)
        except ValueError as error:
            return Pair(row.place, problem=NOT_RENDERED, detail=str(error))
        if picture is None:
            return Pair(row.place, problem=BLANK)
        facts = {"set": about.name, "author": about.author, "author_url": about.author_url}
        facts |= {"licence": about.licence, "licence_url": about.licence_url}
        return Pair(row.place, picture, row.captions, about=facts)


def render(svg: str, size: int) -> bytes | None:
    """An icon as a PNG of `size` x `size` pixels on white; None if all pixels are equal.

    Raises:
        ValueError: It is not SVG that can be rendered.
    """
    import resvg_py

    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background="white", skip_system_fonts=True)
    picture = read_rgb(png)
    if not np.ptp(np.asarray(picture), axis=(0, 1)).any():
        return None
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def open_icons(
    source: str, options: IconOptions, *, listing: Path, stored: Listing | None, package: str | None
) -> IconSource:
    """List the icons of the package, or continue with the list of an interrupted run, which needs no package.

    Args:
        source: The package's name and version, for messages.
        options: Which icons, and how.
        listing: Where the list is stored.
        stored: The list, if it has been made.
        package: Local folder or archive; None fetches it.

    Raises:
        UserError: The package cannot be had or is damaged, or resvg-py is not installed.
    """
    try:
        importlib.metadata.version("resvg-py")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            "Rendering icons needs resvg-py: pip install -c constraints.txt -e '.[icons]' in a copy of the repository, "
            "or pip install resvg-py."
        ) from error
    names = listing.with_name(SETS_NAME)
    if stored is None:
        with package_folder(package, options.version, scratch=listing.parent) as folder:
            sets = read_sets(folder)
            write_json(names, {one.prefix: asdict(one) for one in sets}, durable=True)
            stored = write_listing(listing, list_icons(folder, sets, options), root=folder, group_images=False)
    known = {prefix: SetFacts(**facts) for prefix, facts in json.loads(names.read_text(encoding="utf-8")).items()}
    return IconSource(stored, options, known)


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
