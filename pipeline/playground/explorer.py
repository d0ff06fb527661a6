"""What the page computes: features of texts and images, and the similarities between them.

Shape legend: n images, m captions, C classes, d feature dimension.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.cores import thread_map
from pipeline.errors import UserError
from pipeline.evaluation.compute import Compute
from pipeline.evaluation.protocols.texts import class_vectors, encode_texts
from pipeline.model.evaluation_model import EvaluationModel
from pipeline.playground.gallery import Dropped, Sample, open_image, thumbnail

BATCH = 32
KEPT_UPLOADS = 64
"""Features of this many images that were dropped onto the page are kept."""
MOST_CLASSES, MOST_TEMPLATES, MOST_PROMPTS, LONGEST_TEXT = 1000, 100, 10_000, 1000


@dataclass(frozen=True)
class ClassSet:
    """Class names and templates to choose on the page, from a task of a suite."""

    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]


class Explorer:
    """A model, the features of a gallery and of captions, and the images that were dropped onto the page.

    One thread at a time may call it.
    """

    def __init__(self, model: EvaluationModel, *, class_sets: Sequence[ClassSet] = ()) -> None:
        self.model, self.class_sets = model, tuple(class_sets)
        self.names: list[str] = []
        self.thumbnails: list[bytes] = []
        self.image_captions: list[str | None] = []
        """The caption that each gallery image has in its shard."""
        self.captions: list[str] = []
        self._device = next(model.towers.parameters()).device
        self._compute = Compute(self._device)
        self._images = self._captions = torch.empty(0, model.dim)
        self._uploads: OrderedDict[str, Tensor] = OrderedDict()
        self._classifier: tuple[Any, Tensor] = (None, torch.empty(0))
        """The latest class names and templates, and their vectors, [C, d]."""

    @property
    def scale(self) -> float:
        """1 / temperature of the weights; 100, CLIP's, for weights without one."""
        logit = self.model.towers.logit
        return 100.0 if logit is None else math.exp(logit[0])

    def add_images(self, samples: Iterable[Sample], *, dropped: Dropped, progress: Callable[[int], None]) -> None:
        """Encode the images of samples as the gallery; those that cannot be used are counted in `dropped`."""

        def prepare(sample: Sample) -> tuple[Sample, Tensor | str, bytes]:
            try:
                image = self._open(sample.image, name=sample.name) if sample.image is not None else None
            except UserError as error:
                return sample, str(error), b""
            return (sample, "", b"") if image is None else (sample, self.model.preprocess(image), thumbnail(image))

        features = [self._images]
        with ThreadPoolExecutor(4) as pool:
            prepared = thread_map(pool, prepare, samples, ahead=2 * BATCH)
            while some := list(itertools.islice(prepared, BATCH)):
                pixels = []
                for sample, image, small in some:
                    if isinstance(image, str):
                        reason = "the image cannot be decoded" if image else "image is missing"
                        dropped.add(reason, image or sample.name)
                        continue
                    pixels.append(image)
                    self.names.append(sample.name)
                    self.image_captions.append(sample.caption)
                    self.thumbnails.append(small)
                if pixels:
                    features.append(self._encode(torch.stack(pixels)))
                progress(len(self.names))
        self._images = torch.cat(features)

    def add_captions(self, captions: Sequence[str], *, progress: Callable[[int], None]) -> None:
        """Encode captions; repeated ones are kept once."""
        self.captions, features = list(dict.fromkeys(captions)), [self._captions]
        for start in range(0, len(self.captions), 8 * BATCH):
            some = self.captions[start : start + 8 * BATCH]
            features.append(self._texts(some))
            progress(start + len(some))
        self._captions = torch.cat(features)

    def search(self, text: str, *, count: int) -> list[dict[str, Any]]:
        """The gallery images that are most similar to a text: number, name, caption and cosine.

        Raises:
            UserError: The text is empty or too long.
        """
        query = self._texts([_checked_text(text, "the text")])
        return [{**self._shown(k), "score": score} for k, score in _best((self._images @ query.T)[:, 0], count)]

    def some_images(self, *, count: int) -> list[dict[str, Any]]:
        """Gallery images drawn at random: number, name and caption."""
        drawn = random.sample(range(len(self.names)), min(count, len(self.names)))
        return [self._shown(k) for k in drawn]

    def _shown(self, k: int) -> dict[str, Any]:
        return {"image": k, "name": self.names[k], "caption": self.image_captions[k]}

    def add_upload(self, body: bytes) -> str:
        """Encode an image that was dropped onto the page. Returns its name for `classify` and `nearest_captions`.

        Raises:
            UserError: It is not an image, damaged, or too large.
        """
        name = hashlib.sha256(body).hexdigest()[:24]
        if name not in self._uploads:
            self._uploads[name] = self._encode(self.model.preprocess(self._open(body, name="The file"))[None])[0]
        self._uploads.move_to_end(name)
        if len(self._uploads) > KEPT_UPLOADS:
            self._uploads.popitem(last=False)
        return name

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
        cosines = self._classifier[1] @ features
        probabilities = torch.softmax(self.scale * cosines, dim=0)
        order = torch.sort(probabilities, descending=True, stable=True).indices.tolist()
        return [{"name": names[k], "probability": float(probabilities[k]), "score": float(cosines[k])} for k in order]

    def nearest_captions(self, image: str, *, count: int) -> list[dict[str, Any]]:
        """The captions that are most similar to an image, with their cosines.

        Raises:
            UserError: The image is unknown.
        """
        scores = self._captions @ self._features_of(image)
        return [{"caption": self.captions[k], "score": score} for k, score in _best(scores, count)]

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
        return self._images[in_gallery]

    def _open(self, body: bytes, *, name: str) -> Any:
        return open_image(body, name=name, background=self.model.architecture.background)

    def _encode(self, pixels: Tensor) -> Tensor:
        return self.model.encode_image(pixels.to(self._device)).float().cpu()

    def _texts(self, texts: Sequence[str]) -> Tensor:
        return encode_texts(self.model, texts, compute=self._compute, micro_batch=min(8 * BATCH, len(texts)))


def _best(scores: Tensor, count: int) -> list[tuple[int, float]]:
    """Numbers and values of the highest scores; equal ones in their order."""
    order = torch.sort(scores, descending=True, stable=True).indices[:count].tolist()
    return [(k, round(float(scores[k]), 4)) for k in order]


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"Type {what} first.")
    if len(text) > LONGEST_TEXT:
        raise UserError(f"{what.capitalize()} has {len(text):,} characters; {LONGEST_TEXT:,} are allowed.")
    return text.strip()


def _checked_lines(given: Sequence[str], what: str, one: str, *, least: int, most: int) -> tuple[str, ...]:
    lines = tuple(dict.fromkeys(_checked_text(line, one) for line in given))
    if not least <= len(lines) <= most:
        raise UserError(f"Give {least} to {most:,} {what}, one a line; these are {len(lines):,}.")
    return lines
