"""Images in folders that have the names of classes, with captions made from these."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from data_prep.pairs.listing import PairRow, PairSource
from data_prep.pairs.members import is_image, walk
from data_prep.pairs.pair import read_image
from data_prep.reasons import NO_CAPTION
from pipeline.errors import UserError


def open_classes(root: Path, folders: Sequence[Path], templates: Sequence[str]) -> PairSource:
    """Images in folders with the names of their classes, which take the place of `{class}` in each template.

    `{parent}` stands for the name of the folder above that of the class.

    Raises:
        UserError: A template has no such place, or there are no such folders with images.
    """
    if wrong := [template for template in templates if "{class}" not in template]:
        raise UserError(f"--caption-template {wrong[0]!r} has no {{class}}, the place for the name of a folder.")

    tops, with_parent = (root, *folders), any("{parent}" in template for template in templates)

    def rows() -> Iterator[PairRow]:
        for here, name in ((Path(here, name), name) for top in folders for here, files in walk(top) for name in files):
            if is_image(name):
                place = here.relative_to(root).as_posix()
                if here.parent in tops or (with_parent and here.parent.parent in tops):
                    yield PairRow(place, problem=NO_CAPTION, detail="it is in no folder of a class")
                else:
                    label, parent = _words(here.parent), _words(here.parent.parent)
                    texts = (text.replace("{class}", label).replace("{parent}", parent) for text in templates)
                    yield PairRow(place, str(here), tuple(texts))

    classes = {Path(row.image).parent for row in rows() if not row.problem}
    if not classes:
        raise UserError(f"{root} has no folders with images, whose names would be the classes of --caption-template.")
    notes = [f"classes: {_names(classes)}"]
    if (above := {folder.parent for folder in classes if folder.parent not in tops}) and not with_parent:
        notes.append(f"in no caption: the folders above, {_names(above)}; {{parent}} in a template takes their names")
    about = {"kind": "folders of classes", "caption": list(templates)}
    return PairSource(about, rows(), root, read_image, notes=tuple(notes))


def _words(folder: Path) -> str:
    return re.sub(r"[_\s]+", " ", folder.name)


def _names(folders: Collection[Path]) -> str:
    names = sorted({folder.name for folder in folders})
    return f"{len(names):,} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
