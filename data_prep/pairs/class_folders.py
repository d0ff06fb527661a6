"""Images in folders that have the names of classes, with captions made from these."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.members import is_image, walk
from data_prep.pairs.pair import read_image
from data_prep.reasons import NO_CAPTION
from pipeline.errors import UserError


def open_classes(root: Path, folders: Sequence[Path], templates: Sequence[str]) -> PairSource:
    """Images in folders with the names of their classes, which take the place of `{class}` in each template.

    Raises:
        UserError: A template has no such place, or there are no such folders with images.
    """
    if wrong := [template for template in templates if "{class}" not in template]:
        raise UserError(f"--caption-template {wrong[0]!r} has no {{class}}, the place for the name of a folder.")

    def rows() -> Iterator[PairRow]:
        for here, name in ((Path(here, name), name) for top in folders for here, files in walk(top) for name in files):
            if is_image(name):
                place = here.relative_to(root).as_posix()
                if here.parent in (root, *folders):
                    yield PairRow(place, problem=NO_CAPTION, detail="it is in no folder of a class")
                else:
                    label = re.sub(r"[_\s]+", " ", here.parent.name)
                    yield PairRow(place, str(here), tuple(text.replace("{class}", label) for text in templates))

    classes = sorted({Path(row.image).parent.name for row in rows() if not row.problem})
    if not classes:
        raise UserError(f"{root} has no folders with images, whose names would be the classes of --caption-template.")
    shown = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    about = {"kind": "folders of classes", "caption": list(templates)}
    return PairSource(about, rows(), root, read_image, notes=(f"classes: {len(classes):,} ({shown})",))
