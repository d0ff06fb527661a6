"""Which column holds the image and which the caption: given by the user, or found by common names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pipeline.config import suggest
from pipeline.errors import UserError

IMAGE_NAMES = (
    "image", "image_path", "image_file", "image_name", "filepath", "file_path", "file_name", "filename", "path", "file",
    "img", "img_path", "jpg", "jpeg", "png", "webp",
)  # fmt: skip
CAPTION_NAMES = (
    "caption", "captions", "text", "texts", "txt", "title", "description", "alt_text", "alt", "sentence", "sentences",
    "raw", "comment", "prompt", "label_text",
)  # fmt: skip
URL_NAMES = ("url", "image_url", "img_url", "urls", "link")


def choose_columns(
    present: Iterable[str],
    *,
    image: str | None,
    caption: str | None,
    where: str,
    texts: Iterable[str] | None = None,
    note: str = "",
) -> tuple[str, str]:
    """The columns of image and caption.

    Args:
        present: The existing columns.
        image: The user's choice, or None to find it.
        caption: The user's choice, or None to find it.
        where: What the columns belong to, for messages.
        texts: The columns that can hold a caption, if the source knows their types.
        note: A further sentence for the message that no column is found.

    Raises:
        UserError: A named column does not exist, none is found, or several match.
    """
    names = list(present)
    found_image = image if image is not None else _find(names, IMAGE_NAMES)
    if found_image is None and (url := _find(names, URL_NAMES)):
        raise UserError(
            f"{where} has URLs (column {url!r}) and no images: `neuclip download output=FOLDER source.table=FILE "
            f"source.url={url}` fetches them and makes the shards."
        )
    allowed = [name for name in (names if texts is None else texts) if name != found_image]
    found_caption = caption if caption is not None else _find(allowed, CAPTION_NAMES)
    for kind, option, name in (("image", "--image", found_image), ("caption", "--caption", found_caption)):
        if name is None:
            raise UserError(
                f"{where} has no column with a usual name for the {kind}: name it with {option}. "
                f"Columns: {', '.join(names)}. {note}".rstrip()
            )
        if name not in names:
            raise UserError(f"{where} has no column {name!r} ({option}). {suggest(name, tuple(names))}")
    assert found_image is not None
    assert found_caption is not None
    return found_image, found_caption


def _find(names: Sequence[str], usual: Sequence[str]) -> str | None:
    """The column whose name comes first among the usual ones; "Image Path" and "image-path" are image_path."""
    folded = {re.sub(r"[\s-]+", "_", name.strip().lower()): name for name in reversed(names)}
    return next((folded[name] for name in usual if name in folded), None)
