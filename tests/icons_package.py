"""A small package in the format of @iconify/json: hand-written icons of several sets, licences and defects."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

VERSION = "2.2.535"
COLOURS = ("red", "blue", "green", "orange", "purple", "black", "teal", "brown")
SHAPES = {
    "disc": '<circle cx="12" cy="12" r="{r}" fill="{c}"/>',
    "box": '<rect x="2" y="3" width="{r}" height="{r}" fill="{c}"/>',
    "bar": '<path d="M1 10h22v{r}H1z" fill="{c}"/>',
    "ring": '<circle cx="12" cy="12" r="{r}" fill="none" stroke="{c}" stroke-width="2"/>',
    "wedge": '<path d="M2 22L{r} 2l10 20z" fill="{c}"/>',
    "pole": '<path d="M10 1h{r}v22H10z" fill="{c}"/>',
}
SIZES = {"tiny": 3, "small": 5, "big": 8, "huge": 10}
BAR = '<path fill="currentColor" d="M2 10h20v4H2z"/>'


def drawn(stretch: float) -> dict[str, Any]:
    """192 icons such as "tiny-red-disc", and 32 discs in a second style; `stretch` makes sets differ."""
    icons = {
        f"{size}-{colour}-{shape}": {"body": body.format(r=round(radius * stretch, 2), c=colour)}
        for size, radius in SIZES.items()
        for colour in COLOURS
        for shape, body in SHAPES.items()
    }
    outlined = {name: icon["body"].replace("<circle", '<circle stroke="gray"') for name, icon in icons.items()}
    return icons | {f"{name}-outline": {"body": body} for name, body in outlined.items() if name.endswith("-disc")}


ODD = {
    "minus": {"body": BAR},
    "minus-outline": {"body": '<path fill="none" stroke="black" d="M2 10h20v4H2z"/>'},
    "traffic-light": {"body": '<path d="M9 2h6v20H9z"/>', "width": 12},
    "home-16": {"body": '<path d="M2 12L12 2l10 10v10H2z"/>'},
    "withdrawn": {"body": '<path d="M0 0h9v9H0z"/>', "hidden": True},
    "cut-off": {"body": '<path d="M0 0h9v9H0z"'},
    "white": {"body": '<path fill="white" d="M2 2h9v9H2z"/>'},
    "123": {"body": '<path d="M4 4h9v3H4z"/>'},
    "empty": {"body": ""},
    "nothing": {},
}
SETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"name": "Plain", "author": {"name": "Ada", "url": "https://example.org/ada"},
               "license": {"title": "MIT", "spdx": "MIT", "url": "https://example.org/mit"}, "category": "UI 24px"},
              {"icons": drawn(1), "width": 24, "height": 24}),
    "wide": ({"name": "Wide", "author": {"name": "Bea"}, "license": {"title": "Apache 2.0", "spdx": "Apache-2.0"}},
             {"icons": drawn(1.1), "width": 24, "height": 24}),
    "odd": ({"name": "Odd", "author": {"name": "Ada"}, "license": {"title": "CC0", "spdx": "CC0-1.0"}},
            {"icons": ODD, "suffixes": {"": "Plain", "16": "16 px"}, "width": 24, "height": 24}),
    "copy": ({"name": "Copy", "author": {"name": "Di"}, "license": {"title": "ISC", "spdx": "ISC"}},
             {"icons": {"dash": {"body": BAR}}, "width": 24, "height": 24}),
    "thin": ({"name": "Thin", "author": {"name": "Cy"}, "license": {"title": "MIT", "spdx": "MIT"}},
             {"icons": dict(list(drawn(0.7).items())[:12]), "width": 24, "height": 24}),
    "mine": ({"name": "Mine", "author": {"name": "Flo"}, "license": {"title": "GPL 3.0", "spdx": "GPL-3.0"}},
             {"icons": {"cog": {"body": BAR}}}),
    "shop": ({"name": "Shop", "author": {"name": "Gus"}, "license": {"title": "CC BY-NC 4.0", "spdx": "CC-BY-NC-4.0"}},
             {"icons": {"bag": {"body": BAR}, "till": {"body": BAR}}}),
    "marks": ({"name": "Marks", "author": {"name": "Hal"}, "license": {"title": "MIT", "spdx": "MIT"},
               "category": "Logos"}, {"icons": {"acme": {"body": BAR}}}),
    "fa-brands": ({"name": "Brands", "author": {"name": "Ike"}, "license": {"title": "MIT", "spdx": "MIT"}},
                  {"icons": {"acme": {"body": BAR}}}),
}  # fmt: skip


def write_package(folder: Path) -> Path:
    """Write the package as the npm client unpacks it. Returns its folder."""
    (folder / "json").mkdir(parents=True)
    (folder / "package.json").write_text(json.dumps({"name": "@iconify/json", "version": VERSION}))
    collections = {}
    for prefix, (facts, tree) in SETS.items():
        collections[prefix] = {"total": len(tree["icons"]), **facts}
        (folder / "json" / f"{prefix}.json").write_text(json.dumps({"prefix": prefix, **tree}))
    (folder / "collections.json").write_text(json.dumps(collections))
    return folder


def write_archive(path: Path, package: Path) -> Path:
    """Write a package folder as the archive of `npm pack`."""
    with tarfile.open(path, "w:gz") as tar:
        tar.add(package, "package")
    return path
