"""What the page computes: features of texts and images, and the similarities between them.

Shape legend: n images, m captions, C classes, d feature dimension.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
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

    Safe to call from several threads: one of them computes at a time.
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
        self._classifiers: OrderedDict[tuple[tuple[str, ...], tuple[str, ...]], Tensor] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def scale(self) -> float:
        """1 / temperature of the weights; 100, CLIP's, for weights without one."""
        logit = self.model.towers.logit
        return 100.0 if logit is None else math.exp(logit[0])

    def add_images(self, samples: Iterable[Sample], *, dropped: Dropped, progress: Callable[[int], None]) -> None:
        """Encode the images of samples as the gallery; those that cannot be decoded are counted in `dropped`."""

        def prepare(sample: Sample) -> tuple[Sample, Tensor, bytes] | str:
            try:
                image = open_image(sample.image or b"", name=sample.name, background=self.model.architecture.background)
                return sample, self.model.preprocess(image), thumbnail(image)
            except UserError as error:
                return str(error)

        def with_image() -> Iterator[Sample]:
            for sample in samples:
                if sample.image is None:
                    dropped.add("image is missing", sample.name)
                else:
                    yield sample

        def usable(pool: Executor) -> Iterator[tuple[Sample, Tensor, bytes]]:
            for ready in thread_map(pool, prepare, with_image(), ahead=2 * BATCH):
                if isinstance(ready, str):
                    dropped.add("the image cannot be decoded", ready)
                else:
                    yield ready

        features = [self._images]
        with ThreadPoolExecutor(4) as pool:
            images = usable(pool)
            while batch := list(itertools.islice(images, BATCH)):
                features.append(self._encode(torch.stack([pixels for _, pixels, _ in batch])))
                for sample, _, small in batch:
                    self.names.append(sample.name)
                    self.image_captions.append(sample.caption)
                    self.thumbnails.append(small)
                progress(len(self.names))
        self._images = torch.cat(features)

    def add_captions(self, captions: Sequence[str], *, progress: Callable[[int], None]) -> None:
        """Encode captions; repeated ones are kept once."""
        unique = list(dict.fromkeys(captions))
        features = [self._captions]
        for start in range(0, len(unique), 8 * BATCH):
            features.append(self._texts(unique[start : start + 8 * BATCH]))
            progress(min(start + 8 * BATCH, len(unique)))
        self.captions, self._captions = unique, torch.cat(features)

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
        known = self._uploads.get(name)
        if known is None:
            image = open_image(body, name="The file", background=self.model.architecture.background)
            known = self._encode(self.model.preprocess(image)[None])[0]
        self._remember(self._uploads, name, known)
        return name

    def classify(
        self, image: str, classes: Sequence[str], templates: Sequence[str], *, gone: threading.Event | None = None
    ) -> list[dict[str, Any]]:
        """Zero-shot probabilities, highest first: softmax over the classes at the model's own temperature.

        Raises:
            UserError: The image is unknown, classes or templates cannot be used, or `gone` was set meanwhile.
        """
        names, prompts = _checked_classes(classes), _checked_templates(templates)
        if (count := len(names) * len(prompts)) > MOST_PROMPTS:
            raise UserError(
                f"{len(names):,} classes with {len(prompts)} templates are {count:,} prompts, and {MOST_PROMPTS:,} are "
                "allowed: give fewer templates or classes."
            )
        features = self._features_of(image)
        key = (names, prompts)
        if key not in self._classifiers:
            size, vectors = max(1, 8 * BATCH // len(prompts)), []
            for start in range(0, len(names), size):
                if gone is not None and gone.is_set():
                    raise UserError("The client is gone.")
                some = names[start : start + size]
                batch = min(2 * BATCH, len(some) * len(prompts))
                with self._lock:
                    vectors.append(class_vectors(self.model, some, prompts, compute=self._compute, micro_batch=batch))
            self._remember(self._classifiers, key, torch.cat(vectors))
        cosines = self._classifiers[key] @ features
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
        kind, _, number = image.partition(":")
        if kind == "gallery" and (in_gallery := self.gallery_number(number)) is not None:
            return self._images[in_gallery]
        if image not in self._uploads:
            raise UserError("This image is not known any more: drop it again.")
        return self._uploads[image]

    def _encode(self, pixels: Tensor) -> Tensor:
        with self._lock:
            return self.model.encode_image(pixels.to(self._device)).float().cpu()

    def _texts(self, texts: Sequence[str]) -> Tensor:
        with self._lock:
            return encode_texts(self.model, texts, compute=self._compute, micro_batch=min(8 * BATCH, len(texts)))

    def _remember(self, cache: OrderedDict[Any, Tensor], key: Any, value: Tensor) -> None:
        with self._lock:
            cache[key] = value
            cache.move_to_end(key)
            while len(cache) > KEPT_UPLOADS:
                cache.popitem(last=False)


def _best(scores: Tensor, count: int) -> list[tuple[int, float]]:
    """Numbers and values of the highest scores; equal ones in their order."""
    order = torch.sort(scores, descending=True, stable=True).indices[: max(0, count)].tolist()
    return [(k, round(float(scores[k]), 4)) for k in order]


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"Type {what} first.")
    if len(text) > LONGEST_TEXT:
        raise UserError(f"{what.capitalize()} has {len(text):,} characters; {LONGEST_TEXT:,} are allowed.")
    return text.strip()


def _checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_checked_text(name, "a class name") for name in classes))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise UserError(f"Give 2 to {MOST_CLASSES:,} different classes, one a line; these are {len(names):,}.")
    return names


def _checked_templates(templates: Sequence[str]) -> tuple[str, ...]:
    checked = tuple(dict.fromkeys(_checked_text(template, "a template") for template in templates))
    wrong = next((template for template in checked if "{c}" not in template), None)
    if wrong is not None:
        raise UserError(f"The template {wrong!r} needs {{c}} where the class name goes.")
    if not 1 <= len(checked) <= MOST_TEMPLATES:
        raise UserError(f"Give 1 to {MOST_TEMPLATES} templates, one a line; these are {len(checked)}.")
    return checked
