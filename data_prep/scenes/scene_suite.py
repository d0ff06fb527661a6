"""The held-out evaluation suite `scenes`, in the on-disk layout of the DataComp benchmark.

Zero-shot sets are in `wds_scenes-<attribute>_test/`, the retrieval set in `wds_scenes-retrieval_test/`: tars with
members such as `s0000000.jpg` and `s0000000.cls` (`.txt` for retrieval), and text files with classes, prompts and
the number of tars. Classes are balanced to within one image, so that chance is exactly 1 / number of classes: shape
1/10, colour 1/12, background 1/8, texture 1/6, count 1/5, position 1/9, size 1/3, relation 1/4; retrieval R@k: k /
pairs.

Held-out scenes have indices from `HELD_OUT_START` on. In addition, every description (shape, colour, texture, size,
position, background, ...) that also occurs among the training scenes is excluded, and so are repetitions within a set.
`suite.json` records the expected content of each set (samples, classes, SHA-256 of its tars), its chance level and the
number of excluded scenes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
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
Facts = dict[str, Any]


@dataclass(frozen=True)
class Attribute:
    """A zero-shot task: the class of a scene (None: not part of this task), the classes and the prompts."""

    label: Callable[[Scene], object]
    classes: Sequence[object]
    names: Sequence[str]
    templates: Sequence[str]


def _of_item(name: str) -> Callable[[Scene], object]:
    """An attribute of the object; scenes with two kinds of objects are excluded, as they have no single answer."""
    return lambda scene: getattr(scene.item, name) if scene.other is None else None


def _count(scene: Scene) -> int | None:
    """The count; large single objects are excluded, because their size would reveal the answer."""
    return scene.count if scene.other is None and scene.size != "large" else None


def _attribute(label: Callable[[Scene], object], table: dict, templates: Sequence[str]) -> Attribute:
    """The task whose classes are the entries of a table, under their canonical names."""
    return Attribute(label, list(table), [words(table, key)[0] for key in table], templates)


_THINGS = ("a {c} shape", "a {c} object", "a photo of a {c} thing", "an image of a {c} shape")
_PLACES = ("a shape {c}", "an object {c}", "a photo of a thing {c}", "an image of a shape {c}")
ATTRIBUTES: dict[str, Attribute] = {
    "shape": _attribute(
        _of_item("shape"), SHAPES, ("a {c}", "a photo of a {c}", "an image of a {c}", "a drawing of a {c}")
    ),
    "colour": _attribute(_of_item("colour"), COLOURS, _THINGS),
    "texture": _attribute(_of_item("texture"), TEXTURES, _THINGS),
    "background": _attribute(attrgetter("background"), BACKGROUNDS, _PLACES),
    "position": _attribute(attrgetter("position"), POSITIONS, _PLACES),
    "size": _attribute(attrgetter("size"), SIZES, _THINGS),
    "count": Attribute(
        _count,
        list(COUNTS),
        [f"{words(COUNTS, key)[0]} {'shape' if key == 1 else 'shapes'}" for key in COUNTS],
        ("{c}", "a photo of {c}", "an image of {c}", "picture of {c}"),
    ),
    "relation": _attribute(
        attrgetter("relation"),
        RELATIONS,
        ("a shape {c} another shape", "an object {c} another object", "a photo of a thing {c} another thing"),
    ),
}


def write_suite(config: ScenesConfig, folder: str | Path) -> list[str]:
    """Write all sets of the suite below `folder`; the files are bit-identical for the same config.

    Returns:
        The task keys: `scenes/<attribute>` and `scenes/retrieval`.
    """
    folder = Path(folder)
    training = {describe(config, index) for index in range(config.pairs)}
    facts: dict[str, Facts] = {}
    for name, attribute in ATTRIBUTES.items():
        facts[f"scenes/{name}"] = _write_zeroshot(config, attribute, training, folder / f"wds_scenes-{name}_test")
    facts["scenes/retrieval"] = _write_retrieval(config, training, folder / "wds_scenes-retrieval_test")
    summary = {"seed": config.seed, "training_pairs": config.pairs, "tasks": facts}
    (folder / "suite.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return list(facts)


def _write_zeroshot(config: ScenesConfig, attribute: Attribute, training: set[Scene], folder: Path) -> Facts:
    classes = list(attribute.classes)
    each, more = divmod(config.held_out, len(classes))
    room = {key: each + (k < more) for k, key in enumerate(classes)}
    chosen, taken, excluded = dict[int, int](), set[Scene](), Counter[str]()

    def is_wanted(scene: Scene) -> bool:
        label = attribute.label(scene)
        return label is not None and room[label] > 0

    for index, scene in _held_out(config, training, taken, excluded, is_wanted=is_wanted):
        taken.add(scene)
        label = attribute.label(scene)
        room[label] -= 1
        chosen[index] = classes.index(label)
        if len(chosen) == config.held_out:
            break
    samples = ((jpeg(config, index), str(label)) for index, label in chosen.items())
    digests = _write_set(folder, samples, "cls", classnames=attribute.names,
                         zeroshot_classification_templates=attribute.templates)  # fmt: skip
    facts = {"samples": len(chosen), "sha256": digests, "classes": len(classes), "chance": 1 / len(classes)}
    return {**facts, "excluded": dict(excluded)}


def _write_retrieval(config: ScenesConfig, training: set[Scene], folder: Path) -> Facts:
    chosen: dict[str, int] = {}  # caption -> index; unique, because a caption of two images would be ambiguous
    taken, excluded = set[Scene](), Counter[str]()
    for index, scene in _held_out(config, training, taken, excluded):
        if (caption := curated(config, index)) in chosen:
            excluded["repeated"] += 1
            continue
        taken.add(scene)
        chosen[caption] = index
        if len(chosen) == config.retrieval_pairs:
            break
    samples = ((jpeg(config, index), caption) for caption, index in chosen.items())
    digests = _write_set(folder, samples, "txt", dataset_type=["retrieval"])
    return {"samples": len(chosen), "sha256": digests, "chance": 1 / len(chosen), "excluded": dict(excluded)}


def _held_out(
    config: ScenesConfig,
    training: set[Scene],
    taken: set[Scene],
    excluded: Counter[str],
    *,
    is_wanted: Callable[[Scene], bool] = lambda scene: True,
) -> Iterator[tuple[int, Scene]]:
    """Index and description of wanted scenes that are not among the training scenes nor `taken`, without an end."""
    for index in itertools.count(HELD_OUT_START):
        scene = describe(config, index)
        if not is_wanted(scene):
            continue
        if scene in training or scene in taken:
            excluded["in_training" if scene in training else "repeated"] += 1
        else:
            yield index, scene


def _write_set(
    folder: Path, samples: Iterable[tuple[bytes, str]], suffix: str, **texts: Sequence[str]
) -> dict[str, str]:
    """Write JPEGs and their labels or captions, members with this suffix, and text files with lines.

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
            for k, (image, text) in batch
            for end, body in (("jpg", image), (suffix, text.encode()))
        )
        canonical_tar.write(folder / name, members)
        digests[name] = sha256_of(folder / name)
    for name, lines in {**texts, "test/nshards": [str(len(digests))]}.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return digests
