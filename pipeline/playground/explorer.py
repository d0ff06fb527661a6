"""What the page computes: features of texts and of the images of a folder, and the similarities between them.

Shape legend: n images, C classes, d feature dimension.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.cores import thread_map
from pipeline.data.shards.storage import list_shards, open_records
from pipeline.data.shards.tar_reader import DamagedTar
from pipeline.errors import UserError
from pipeline.evaluation.compute import Compute, class_vectors, encode_texts
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.pictures import FORMAT_SUFFIXES, ImageError
from pipeline.pictures.pixels import WHITE, Colour, read_file, read_rgb

BATCH = 32
SHOWN = 12
"""Results of a search."""
SIDE = 384
"""Pixels of the longer side of the images that the page shows."""
LARGEST_PIXELS = 64_000_000
KEPT_UPLOADS = 64
"""Features of this many images that were dropped onto the page are kept."""
MOST_CLASSES, MOST_TEMPLATES, MOST_PROMPTS, LONGEST_TEXT = 1000, 100, 10_000, 1000
Dropped = defaultdict[str, list[str]]
"""The names of what could not be used, by reason."""


def lines_of(dropped: Dropped) -> str:
    """One line per reason, with the first example."""
    return "\n".join(f"{len(names):,} skipped: {reason} (first: {names[0]})" for reason, names in dropped.items())


def read_images(folder: Path, *, limit: int, dropped: Dropped) -> Iterator[tuple[str, bytes]]:
    """The names and encoded images of the first `limit` samples in a folder of images, or of shards.

    Raises:
        UserError: There is nothing of that kind.
    """
    paths = [folder / name for name in list_shards(folder, ("",)) if not Path(name).name.startswith(".")]
    shards = [path for path in paths if path.suffix == ".tar"]
    images = [path for path in paths if path.suffix.lower().removeprefix(".") in FORMAT_SUFFIXES]
    if not shards and not images:
        formats = ", ".join(FORMAT_SUFFIXES)
        raise UserError(f"--images {folder}: there are no images in such a folder ({formats}) and no shards (*.tar).")
    if shards and images:
        dropped["images beside shards are not read"] += map(_shown, images)
    left = limit
    for path in shards or images:
        try:
            if not shards:
                yield _shown(path.relative_to(folder)), read_file(path)
                left -= 1
            else:
                with open_records(str(path)) as records:
                    for row, record in enumerate(itertools.islice(records, left)):
                        left -= 1
                        name = f"{_shown(Path(path.name))}, sample {row}"
                        if record.image is None:
                            dropped["image is missing"].append(name)
                        else:
                            yield name, record.image
        except (DamagedTar, OSError) as error:
            what = "the shard is damaged" if shards else "the file cannot be read"
            dropped[what].append(f"{_shown(path)}: {getattr(error, 'strerror', None) or error}")
        if not left:
            return


def _shown(path: Path) -> str:
    """A path as text; bytes that are no UTF-8 become replacement characters."""
    return os.fsencode(path).decode(errors="replace")


def open_image(body: bytes, *, name: str, background: Colour = WHITE) -> Any:
    """The image in RGB, turned as its EXIF data asks.

    Raises:
        UserError: It is not an image, damaged, or has too many pixels.
    """
    try:
        return read_rgb(body, max_pixels=LARGEST_PIXELS, background=background, turned=True)
    except ImageError as error:
        what = f"PNG, JPEG, WebP and others of at most {LARGEST_PIXELS:,} pixels"
        raise UserError(f"{name} cannot be used ({error}); the page takes {what}.") from error


class Explorer:
    """A model, the features of a gallery, and the images that were dropped onto the page.

    One thread at a time may call it.
    """

    def __init__(self, model: EvaluationModel) -> None:
        self.model = model
        self.names: list[str] = []
        self.thumbnails: list[bytes] = []
        self._device = next(model.towers.parameters()).device
        self._compute = Compute(self._device)
        self._gallery = torch.empty(0, model.dim)
        self._uploads: dict[str, Tensor] = {}
        self._classifier: tuple[Any, Tensor] = (None, torch.empty(0))
        """The latest class names and templates, and their vectors, [C, d]."""

    @property
    def scale(self) -> float:
        """1 / temperature of the weights; 100, CLIP's, for weights without one."""
        logit = self.model.towers.logit
        return 100.0 if logit is None else math.exp(logit[0])

    def add_images(self, folder: Path, *, limit: int, progress: Callable[[int], None] = lambda _: None) -> Dropped:
        """Encode the first `limit` images in a folder of images, or of shards. Returns what could not be used."""

        def prepare(named: tuple[str, bytes]) -> tuple[str, Tensor | None, bytes]:
            try:
                image = self._open(named[1], name=named[0])
            except UserError as error:
                return str(error), None, b""
            pixels, small = self.model.preprocess(image), io.BytesIO()
            image.thumbnail((SIDE, SIDE))
            image.save(small, "JPEG", quality=86)
            return named[0], pixels, small.getvalue()

        features, dropped = [self._gallery], Dropped(list)
        with ThreadPoolExecutor(4) as pool:
            images = read_images(folder, limit=limit, dropped=dropped)
            prepared = thread_map(pool, prepare, images, ahead=2 * BATCH)
            while some := list(itertools.islice(prepared, BATCH)):
                batch = []
                for name, pixels, small in some:
                    if pixels is None:
                        dropped["the image cannot be decoded"].append(name)
                        continue
                    self.names.append(name)
                    self.thumbnails.append(small)
                    batch.append(pixels)
                if batch:
                    features.append(self._encode(torch.stack(batch)))
                progress(len(self.names))
        self._gallery = torch.cat(features)
        return dropped

    def add_upload(self, body: bytes) -> str:
        """Encode an image that was dropped onto the page. Returns its name for `search` and `classify`.

        Raises:
            UserError: It is not an image, damaged, or too large.
        """
        name, known = hashlib.sha256(body).hexdigest()[:24], self._uploads
        if name not in known:
            known[name] = self._encode(self.model.preprocess(self._open(body, name="The file"))[None])[0]
        known[name] = known.pop(name)  # the newest is the last
        if len(known) > KEPT_UPLOADS:
            known.pop(next(iter(known)))
        return name

    def search(self, *, text: object = None, image: str | None = None) -> list[dict[str, Any]]:
        """The gallery images that are most similar to a text or an image: number, name and cosine.

        Raises:
            UserError: There is no gallery, the text is empty or too long, or the image is unknown.
        """
        if not self.names:
            raise UserError("There are no images to search: start with --images FOLDER.")
        if image is None:
            words = [_checked_text(text, "the text")]
            query = encode_texts(self.model, words, compute=self._compute, micro_batch=1)[0]
        else:
            query = self._features_of(image)
        scores, order = torch.sort(self._gallery @ query, descending=True, stable=True)
        best = zip(order[:SHOWN].tolist(), scores[:SHOWN].tolist(), strict=True)
        return [{"image": k, "name": self.names[k], "score": round(score, 4)} for k, score in best]

    def classify(
        self,
        image: str,
        classes: Sequence[str],
        templates: Sequence[str],
        *,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> list[dict[str, Any]]:
        """Zero-shot probabilities, highest first: softmax over the classes at the model's own temperature.

        Raises:
            UserError: The image is unknown, classes or templates cannot be used, or meanwhile the client `is_gone`.
        """
        names = _checked_lines(classes, "different classes", "a class name", least=2, most=MOST_CLASSES)
        prompts = _checked_lines(templates, "templates", "a template", least=1, most=MOST_TEMPLATES)
        if wrong := [template for template in prompts if "{c}" not in template]:
            raise UserError(f"The template {wrong[0]!r} needs {{c}} where the class name goes.")
        if (count := len(names) * len(prompts)) > MOST_PROMPTS:
            raise UserError(
                f"{len(names):,} classes with {len(prompts)} templates are {count:,} prompts, and {MOST_PROMPTS:,} are "
                "allowed: give fewer templates or classes."
            )
        features = self._features_of(image)
        if self._classifier[0] != (names, prompts):
            size, vectors = max(1, 8 * BATCH // len(prompts)), []
            for start in range(0, len(names), size):
                if is_gone():
                    raise UserError("The client is gone.")
                some = names[start : start + size]
                batch = min(2 * BATCH, len(some) * len(prompts))
                vectors.append(class_vectors(self.model, some, prompts, compute=self._compute, micro_batch=batch))
            self._classifier = (names, prompts), torch.cat(vectors)
        probabilities = torch.softmax(self.scale * (self._classifier[1] @ features), dim=0)
        values, order = torch.sort(probabilities, descending=True, stable=True)
        return [{"name": names[k], "probability": p} for k, p in zip(order.tolist(), values.tolist(), strict=True)]

    def gallery_number(self, text: str) -> int | None:
        """The gallery image that a text names by its number; None if there is none."""
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else len(self.names)
        return number if number < len(self.names) else None

    def _features_of(self, image: str) -> Tensor:
        """[d] of an upload, or of the gallery image `gallery:NUMBER`."""
        if image in self._uploads:
            return self._uploads[image]
        kind, _, number = image.partition(":")
        in_gallery = self.gallery_number(number) if kind == "gallery" else None
        if in_gallery is None:
            raise UserError("This image is not known any more: drop it again.")
        return self._gallery[in_gallery]

    def _open(self, body: bytes, *, name: str) -> Any:
        return open_image(body, name=name, background=self.model.architecture.background)

    def _encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(pixels.to(self._device)).float().cpu()


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"Type {what} first.")
    if len(text) > LONGEST_TEXT:
        raise UserError(f"{what.capitalize()} has {len(text):,} characters; {LONGEST_TEXT:,} are allowed.")
    return text.strip()


def _checked_lines(given: Sequence[str], what: str, one: str, *, least: int, most: int) -> tuple[str, ...]:
    if not isinstance(given, list | tuple):
        raise UserError("classes and templates must be lists of texts.")
    lines = tuple(dict.fromkeys(_checked_text(line, one) for line in given))
    if not least <= len(lines) <= most:
        raise UserError(f"Give {least} to {most:,} {what}, one a line; these are {len(lines):,}.")
    return lines
