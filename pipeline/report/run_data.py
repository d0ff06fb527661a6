"""Reads a run's folder: everything that is available, and notes on what is missing. Does not import torch."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import flatten, parse_yaml
from pipeline.data.shards.manifest_format import Manifest, load_manifest
from pipeline.errors import UserError
from pipeline.files import read_tree
from pipeline.report.stored_scores import StoredEvaluation, read_evaluations, stored
from pipeline.run_files import METRICS_NAME, MOST_RECORDS, RUN_CONFIG_NAME, record_of

Row = dict[str, Any]
RECALLS = ("image_to_text_r1", "text_to_image_r1")
"""The retrieval scores of a validation, as fractions."""


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    """The training lines of metrics.jsonl in order, one per step (the last, where a resumed run logs it again)."""
    validations: tuple[Row, ...] = ()
    """One per step, with the samples seen by then."""
    events: tuple[Row, ...] = ()
    """The other lines that have a message."""
    manifests: tuple[Manifest, ...] = ()
    evaluations: tuple[StoredEvaluation, ...] = ()
    """In order of samples seen."""
    notes: tuple[str, ...] = ()
    """What is missing or damaged."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def failures(self) -> Counter[str]:
        """What gave no sample, by reason, over all sources; `counted` says of what."""
        return sum((Counter(m.failures) for m in self.manifests), Counter())

    @property
    def counted(self) -> str:
        """What the sources were made from: "URLs", "rows", or "rows and URLs" where they differ."""
        return " and ".join(sorted({manifest.counted for manifest in self.manifests}, key=str.lower))

    @property
    def latest(self) -> StoredEvaluation | None:
        """The evaluation of the checkpoint that has seen the most samples."""
        return self.evaluations[-1] if self.evaluations else None

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration by dotted key."""
        return flatten(self.config).get(key, default)

    @property
    def architecture(self) -> str | None:
        """The architecture's name: not the path of its file, nor `pretrained`, where a checkpoint has the name."""
        given = self.setting("model.arch")
        for path in sorted(self.folder.glob("checkpoints/step-*/open_clip_config.json")) if given else []:
            if "architecture" in (tree := read_tree(path)):
                return str(tree["architecture"])
        return given

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Samples seen and the values of a scalar, from the training lines where it is a finite number."""
        return _points(self.rows, key)

    def validation(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Samples seen and a score on held-out pairs: "loss", or one of `RECALLS`."""
        return _points(self.validations, key)

    def scalars(self) -> list[str]:
        """The names of all numeric values in the training lines, in order of appearance."""
        names = dict.fromkeys(key for row in self.rows for key, value in row.items() if is_finite(value))
        return [name for name in names if name not in ("step", "samples", "time", "epoch")]


def read_run(folder: str | Path) -> Run:
    """Read a run.

    Raises:
        UserError: The folder does not exist or contains no files of a run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"There is no run at {folder}: give the folder that `neuclip train` or `neuclip demo` wrote.")
    known = (RUN_CONFIG_NAME, METRICS_NAME, "evaluation")
    if not any((folder / name).exists() for name in known):
        raise UserError(
            f"{folder} is not a run's folder: it holds none of {', '.join(known)}. Nor is it a data set with a "
            f"manifest.json; `neuclip manifest {shlex.quote(str(folder))}` writes one for webdataset shards."
        )
    notes: list[str] = []
    config = stored(folder / RUN_CONFIG_NAME, parse_yaml, what="No configuration", notes=notes)
    config = config if isinstance(config, dict) else {}
    path = folder / METRICS_NAME
    lines = stored(path, bytes.splitlines, what="No training metrics", notes=notes, most=MOST_RECORDS) or []
    rows, validations, events = _parse_metrics(lines, notes)
    by_step = {row["step"]: row["samples"] for row in rows}
    per_step = rows[-1]["samples"] / rows[-1]["step"] if rows and rows[-1]["step"] else None

    def seen(step: int | None) -> int | None:
        """The samples seen by a step, or None if unknown."""
        return by_step.get(step, round(step * per_step) if per_step else None) if step is not None else None

    return Run(
        folder=folder,
        config=config,
        rows=tuple(rows),
        validations=tuple({**row, "samples": samples} for row in validations if (samples := seen(row["step"]))),
        events=tuple(events),
        manifests=_read_manifests(folder, config, notes),
        evaluations=read_evaluations(folder / "evaluation", seen, notes),
        notes=tuple(notes),  # to which the lines above have added
    )


def _parse_metrics(lines: Sequence[bytes], notes: list[str]) -> tuple[list[Row], list[Row], list[Row]]:
    """Training lines and validations, in order of steps, and lines with a message."""
    steps: dict[str, dict[int, Row]] = {"train": {}, "validation": {}}
    events, damaged = [], 0
    for line in lines:
        row: Any = record_of(line)
        try:
            if (kind := row["kind"]) in steps:
                whole = {key: int(row[key]) for key in ("step", "samples")[: 1 + (kind == "train")]}
                steps[kind][whole["step"]] = {**row, **whole}
            elif "message" in row:
                events.append({**row, "time": round(1e3 * row["time"]) / 1e3, "data": dict(row.get("data") or {})})
        except (ValueError, KeyError, TypeError, OverflowError):
            damaged += 1
    if damaged:
        notes.append(f"{damaged} of {len(lines)} lines of {METRICS_NAME} could not be read and are left out.")
    train, validations = ([of_kind[step] for step in sorted(of_kind)] for of_kind in steps.values())
    return train, validations, events


def _read_manifests(folder: Path, config: Mapping[str, Any], notes: list[str]) -> tuple[Manifest, ...]:
    if not (sources := flatten(config).get("data.sources")):
        notes.append("No ingestion figures: the configuration names no data (data.sources).")
        return ()
    manifests, here, output = [], folder.resolve(), Path(str(config.get("output")))
    # Relative paths are relative to the folder that the run was started in: the run's without its `output`.
    inside = not output.is_absolute() and here.parts[-len(output.parts) :] == output.parts
    started = Path(*here.parts[: -len(output.parts)]) if inside else here.parent
    for source in sources if isinstance(sources, list) else [sources]:
        given = str(source.get("manifest")) if isinstance(source, Mapping) else str(source)
        places = [Path(given), started / given, folder / given]
        try:
            place = next((place for place in places if place.exists()), places[0])
            manifests.append(load_manifest(place, allow_outside=True))  # a report reads no shards
        except UserError as error:
            notes.append(f"No ingestion figures of {given}: {error}")
    return tuple(manifests)


def _points(rows: Iterable[Row], key: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(row["samples"], row[key]) for row in rows if is_finite(row.get(key))]
    points = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def is_finite(value: Any) -> bool:
    """Whether a value of a record is a finite number; matplotlib has no axes for those above 1e300."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def flat(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A tree of plain values as (dotted key, text), in the order of the tree."""
    return [(key, "–" if value is None else str(value)) for key, value in flatten(tree).items()]
