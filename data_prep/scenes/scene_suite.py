"""The held-out evaluation suite `scenes`, in the on-disk layout of the DataComp benchmark.

Zero-shot sets are in `wds_scenes-<attribute>_test/`, the retrieval set in `wds_scenes-retrieval_test/`. Classes are
balanced to within one image, so that chance is 1 / number of classes. Scenes whose description also occurs among the
training scenes are excluded, and so are repetitions within a set. `suite.json` records the content of each set
(samples, classes, SHA-256 of its tars), its chance level and the number of excluded scenes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.dataset import canonical_tar
from data_prep.scenes.caption import curated
from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    HELD_OUT_START,
    POSITIONS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    Scene,
    ScenesConfig,
    describe,
    words,
)
from pipeline.files import sha256_of

SHARD_SIZE = 1_000

_THINGS = ("a {c} shape", "a {c} object", "a photo of a {c} thing", "an image of a {c} shape")
_PLACES = ("a shape {c}", "an object {c}", "a photo of a thing {c}", "an image of a shape {c}")
ATTRIBUTES: dict[str, tuple[dict, Sequence[str]]] = {
    "shape": (SHAPES, ("a {c}", "a photo of a {c}", "an image of a {c}", "a drawing of a {c}")),
    "colour": (COLOURS, _THINGS),
    "texture": (TEXTURES, _THINGS),
    "background": (BACKGROUNDS, _PLACES),
    "position": (POSITIONS, _PLACES),
    "size": (SIZES, _THINGS),
    "count": (COUNTS, ("{c}", "a photo of {c}", "an image of {c}", "picture of {c}")),
    "relation": (
        RELATIONS,
        ("a shape {c} another shape", "an object {c} another object", "a photo of a thing {c} another thing"),
    ),
}
"""The zero-shot tasks: the table whose keys are the classes, and the prompts."""


def label_of(scene: Scene, attribute: str) -> Any:
    """The class of a scene in the task of an attribute, a key of its table; None if it is not part of the task."""
    if attribute == "count" and scene.size == "large":
        return None  # its size would reveal the answer
    if attribute in ("background", "position", "size", "relation"):
        return getattr(scene, attribute)
    # Scenes with two kinds of objects have no single answer.
    return None if scene.other else getattr(scene if attribute == "count" else scene.item, attribute)


def write_suite(config: ScenesConfig, folder: str | Path) -> list[str]:
    """Write all sets of the suite below `folder`; the files are bit-identical for the same config.

    Returns:
        The task keys: `scenes/<attribute>` and `scenes/retrieval`.
    """
    folder = Path(folder)
    training = {describe(index) for index in range(config.pairs)}
    facts: dict[str, Any] = {}
    for name in ATTRIBUTES:
        facts[f"scenes/{name}"] = _write_zeroshot(config, name, training, folder / f"wds_scenes-{name}_test")
    facts["scenes/retrieval"] = _write_retrieval(config, training, folder / "wds_scenes-retrieval_test")
    summary = {"seed": 0, "training_pairs": config.pairs, "tasks": facts}
    (folder / "suite.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return list(facts)


def _write_zeroshot(config: ScenesConfig, attribute: str, training: set[Scene], folder: Path) -> dict[str, Any]:
    table, templates = ATTRIBUTES[attribute]
    classes, names = list(table), [words(table, key)[0] for key in table]
    if attribute == "count":
        names = [f"{name} {'shape' if key == 1 else 'shapes'}" for key, name in zip(classes, names, strict=True)]
    each, more = divmod(config.held_out, len(classes))
    room = {key: each + (k < more) for k, key in enumerate(classes)}
    chosen, excluded = _held_out(training, config.held_out, lambda index, scene: label_of(scene, attribute), room=room)
    samples = [(index, str(classes.index(label))) for index, label in chosen.items()]
    texts = {"classnames": names, "zeroshot_classification_templates": templates}
    digests = _write_set(config, folder, samples, "cls", **texts)
    facts = {"samples": len(samples), "sha256": digests, "classes": len(classes), "chance": 1 / len(classes)}
    return {**facts, "excluded": excluded}


def _write_retrieval(config: ScenesConfig, training: set[Scene], folder: Path) -> dict[str, Any]:
    # Captions are unique: one of two images would be ambiguous.
    chosen, excluded = _held_out(training, config.retrieval_pairs, lambda index, scene: curated(index))
    digests = _write_set(config, folder, chosen.items(), "txt", dataset_type=["retrieval"])
    return {"samples": len(chosen), "sha256": digests, "chance": 1 / len(chosen), "excluded": excluded}


def _held_out(
    training: set[Scene],
    count: int,
    text_of: Callable[[int, Scene], Any],
    *,
    room: Mapping[Any, int] | None = None,
) -> tuple[dict[int, Any], dict[str, int]]:
    """Indices of held-out scenes with their classes, of each of which there is `room` for so many, or with captions,
    which are unique; and how many scenes were excluded for which reason."""
    chosen, used, taken, excluded = dict[int, Any](), Counter[Any](), set[Scene](), Counter[str]()
    for index in itertools.count(HELD_OUT_START):
        scene = describe(index)
        text = text_of(index, scene)
        if room is not None and used[text] >= room.get(text, 0):
            continue
        if scene in training or scene in taken or (room is None and used[text]):
            excluded["in_training" if scene in training else "repeated"] += 1
            continue
        taken.add(scene)
        used[text] += 1
        chosen[index] = text
        if len(chosen) == count:
            break
    return chosen, dict(excluded)


def _write_set(
    config: ScenesConfig, folder: Path, samples: Iterable[tuple[int, str]], suffix: str, **texts: Sequence[str]
) -> dict[str, str]:
    """Write the JPEGs of scenes with their labels or captions, members with this suffix, and text files with lines.

    Returns:
        The SHA-256 of each tar, by its name `test/<k>.tar`.
    """
    (folder / "test").mkdir(parents=True, exist_ok=True)
    digests: dict[str, str] = {}
    numbered = enumerate(samples)
    while batch := list(itertools.islice(numbered, SHARD_SIZE)):
        name = f"test/{len(digests)}.tar"
        members = (
            (f"s{k:07d}.{end}", body)
            for k, (index, text) in batch
            for end, body in (("jpg", jpeg(config, index)), (suffix, text.encode()))
        )
        canonical_tar.write(folder / name, members)
        digests[name] = sha256_of(folder / name)
    for name, lines in {**texts, "test/nshards": [str(len(digests))]}.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return digests
