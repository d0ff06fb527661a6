"""The held-out icons as an evaluation suite in the layout of the DataComp benchmark, which `neuclip evaluate` reads."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.evalsets.write_sets import SHARD_SIZE, write_retrieval, write_zeroshot
from data_prep.icons.held_out import HELD_OUT, TASKS
from data_prep.icons.icon_source import IconSource
from data_prep.pairs.listing import Listed
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.evaluation.datasets.suite_facts import FACTS_NAME, read_facts
from pipeline.files import write_json

TEMPLATES = ("{c}", "{c} icon")


def suite_folder(output: Path) -> Path:
    """The folder of the suite: beside the shards, because every tar below the shards' folder is one of them."""
    return output.with_name(f"{output.name}-suite")


def write_icon_suite(source: IconSource, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the tasks `icons/...`; nothing is written if the folder has those of the same icons.

    Retrieval tasks have a `manifest.json`, too: `validation.sources` can name their folders. `suite.json` is written
    last. It has the counts and digests that every evaluation checks, and how many icons could not be rendered.

    Returns:
        The facts of each task.
    """
    facts_path, made_from = folder / FACTS_NAME, json.loads(json.dumps(source.facts))
    if facts_path.is_file() and json.loads(facts_path.read_bytes()).get("source") == made_from:
        return read_facts(folder)
    facts_path.unlink(missing_ok=True)
    held: dict[str, list[Listed]] = {}
    for row in source.listing.read(0, source.rows):
        if row.problem == HELD_OUT and row.detail:
            held.setdefault(row.detail, []).append(row)
    tasks = {}
    for task in (task for task in TASKS if task in held):
        place = folder / f"wds_icons-{task}_test"
        if place.exists():
            shutil.rmtree(place)
        tasks[f"icons/{task}"] = _write_task(task, held[task], source, place)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(facts_path, {"source": made_from, "tasks": tasks})
    return tasks


def _write_task(task: str, rows: list[Listed], source: IconSource, place: Path) -> dict[str, Any]:
    missing: Counter[str] = Counter()

    def pictures() -> Iterator[tuple[str, bytes, str]]:
        for row in rows:
            pair = source.rendered(row)
            if pair.problem:
                missing[pair.problem] += 1
            else:
                assert isinstance(pair.image, bytes)
                yield "png", pair.image, pair.captions[0]

    classes: dict[str, Any] = {}
    if task != "rare-phrases":
        digests = write_retrieval(pictures(), place)
        _write_manifest(place, digests, len(rows) - missing.total())
    else:
        names = sorted({row.captions[0] for row in rows})
        labelled = ((suffix, image, names.index(caption)) for suffix, image, caption in pictures())
        digests = write_zeroshot(labelled, place, classnames=names, templates=TEMPLATES)
        classes = {"classes": len(names), "chance": 1 / len(names)}
    return {"samples": len(rows) - missing.total(), **classes, "sha256": digests, "excluded": dict(missing)}


def _write_manifest(place: Path, digests: dict[str, str], samples: int) -> None:
    """Make the pairs of a retrieval task usable as `validation.sources`."""
    rest = [min(SHARD_SIZE, samples - k * SHARD_SIZE) for k in range(len(digests))]
    sizes = [(place / name).stat().st_size for name in digests]
    make_manifest(zip(digests, rest, sizes, digests.values(), strict=True), root=place).save(place)
