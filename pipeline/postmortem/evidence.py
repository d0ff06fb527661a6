"""What a run's folder says about its last start: read once, nothing is changed."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import fallback_runs
from pipeline.checkpoint.reader import damage
from pipeline.config import flatten, read_yaml
from pipeline.distributed.exit_record import FOLDER_NAME as HEARTBEATS
from pipeline.distributed.exit_record import ExitRecord, read_ends
from pipeline.distributed.heartbeat import Beat, read_beat
from pipeline.errors import UserError
from pipeline.evaluation.watch.ledger import DONE, FINISHED, LEDGER_FOLDER
from pipeline.files import read_tree
from pipeline.run_files import (
    FOLDER_NAME,
    METRICS_NAME,
    PREFIX,
    RUN_CONFIG_NAME,
    checkpoint_folders,
    read_meta,
    read_records,
    read_run_id,
    step_of,
)
from pipeline.training.recipe import check_run, load_recipe
from pipeline.training.run_start import LOCK_NAME, Origin, read_origin

FROZEN_SECONDS, WATCH_SECONDS = 120.0, 12.0
"""A heartbeat that is older than the former, and does not change during the latter, is a frozen rank's."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A folder named like a checkpoint."""

    path: Path
    step: int
    problem: str
    """What is wrong with it; empty if every file is as it was written."""
    size: int
    """Bytes of its files."""
    ranks: int
    """Number of ranks that wrote it."""


@dataclass(frozen=True)
class RunEvidence:
    """The contents of a run's folder that bear on how it ended."""

    run: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings; empty if they cannot be read."""
    holder: str = ""
    """Who holds the folder's lock now, so trains in it; empty: nobody."""
    steps: int = 0
    """The last step in metrics.jsonl."""
    events: Sequence[str] = ()
    """Messages of the last start, oldest first."""
    beats: Sequence[tuple[Beat, float]] = ()
    """Heartbeats that are still there, each with its age in seconds. A rank that ends by itself removes its own."""
    exits: Sequence[ExitRecord] = ()
    checkpoints: Sequence[StoredCheckpoint] = ()
    """Oldest first, those in `checkpoint.fallback` included."""
    unfinished: Sequence[str] = ()
    """Checkpoints that were being written."""
    evaluations: Mapping[str, str] = field(default_factory=dict)
    """Outcome by checkpoint in the watchers' ledgers: `done`, `abandoned` or `unfinished`."""
    free: int = 0
    """Free bytes on the run's disk."""
    origin: Origin | None = None
    """The checkpoint with which a fork began; None: the run is none."""
    unscored: bool = False
    """The evaluation of the last step is not in metrics.jsonl, although it was due."""
    refusal: str = ""
    """Why the stored settings cannot be continued with; empty if they can."""
    missing: Sequence[str] = ()
    """Data and stored features that the settings name, but that are not on this machine."""

    @property
    def ranks(self) -> int:
        """Number of ranks of the last start, as far as it is known."""
        return 1 + max(
            [beat.rank for beat, _ in self.beats]
            + [record.rank for record in self.exits]
            + [checkpoint.ranks - 1 for checkpoint in self.checkpoints[-1:]],
            default=0,
        )

    @property
    def total_steps(self) -> int:
        """Steps of the whole run; 0 if the settings cannot be read."""
        samples, batch = self.config.get("samples"), self.config.get("batch_size")
        return samples // batch if isinstance(samples, int) and isinstance(batch, int) and batch else 0


def read_evidence(run: Path, *, verify: bool = True) -> RunEvidence:
    """Read a run's folder. Without `verify`, only the sizes of a checkpoint's files are compared, not their hashes.

    Raises:
        UserError: It is not the folder of a run.
    """
    if not (run / RUN_CONFIG_NAME).is_file() and not (run / FOLDER_NAME).is_dir() and not (run / LOCK_NAME).is_file():
        raise UserError(f"{run} is not the folder of a run: it has no {RUN_CONFIG_NAME} and no {FOLDER_NAME}/.")
    config = _read_config(run / RUN_CONFIG_NAME)
    settings = flatten(config)
    records = read_records(run / METRICS_NAME)
    fallback = settings.get("checkpoint.fallback")
    runs = [run, *fallback_runs(fallback if isinstance(fallback, str) else None, run)]
    steps = [record.get("step") for record in records if record.get("kind") == "train"]
    found = RunEvidence(
        run=run,
        config=config,
        holder=(holder := _holder(run / LOCK_NAME)),
        steps=max((step for step in steps if isinstance(step, int)), default=0),
        events=_last_start(records),
        beats=_beats(run, running=bool(holder)),
        exits=read_ends(run / HEARTBEATS),
        checkpoints=sorted(_stored(runs, verify=verify), key=lambda checkpoint: checkpoint.step),
        unfinished=[path.name.removeprefix(".") for path in sorted((run / FOLDER_NAME).glob(f".{PREFIX}*"))],
        evaluations=_evaluations(run),
        free=shutil.disk_usage(run).free,
        origin=read_origin(run),
    )
    evaluated = {record.get("step") for record in records if record.get("kind") == "evaluation"}
    section = config.get("evaluation")
    due = isinstance(section, Mapping) and bool(section.get("suite"))
    found = replace(found, unscored=due and found.total_steps not in evaluated)
    return _with_tried_settings(found) if config else found


def _with_tried_settings(found: RunEvidence) -> RunEvidence:
    """Try the stored settings, as `neuclip train --dry-run` does, and look for what they name."""
    try:
        run = load_recipe(found.run / RUN_CONFIG_NAME, [f"output={json.dumps(str(found.run))}"])
        check_run(run, world_size=found.ranks)
    except UserError as error:
        return replace(found, refusal=str(error))
    named = [
        *(("data.sources", source.manifest) for source in run.data.sources),
        *(("validation.sources", source.manifest) for source in run.validation.sources),
        *((setting, folder) for setting, folders in run.data.stored_features.items() for folder in folders),
    ]
    return replace(found, missing=[f"{setting}={path}" for setting, path in named if not Path(path).exists()])


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return read_yaml(path)
    except (UserError, ValueError):
        return {}


def _last_start(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Messages since the run was last resumed."""
    messages = [str(record["message"]) for record in records if record.get("kind") == "event" and "message" in record]
    starts = [number for number, message in enumerate(messages) if message.startswith("Resumed from")]
    return messages[starts[-1] :] if starts else messages


def _beats(run: Path, *, running: bool) -> list[tuple[Beat, float]]:
    """The last heartbeats with their ages. In a run that trains, one that changes is new, whatever the clocks say."""
    found = _read_beats(run)
    if running and any(abs(age) > FROZEN_SECONDS for _, age in found):
        time.sleep(WATCH_SECONDS)
        before = {beat for beat, _ in found}
        found = [(beat, age if beat in before else 0.0) for beat, age in _read_beats(run)]
    return found


def _read_beats(run: Path) -> list[tuple[Beat, float]]:
    found, now, run_id = [], time.time(), read_run_id(run)
    for path in sorted((run / HEARTBEATS).glob("rank-*.json")):
        with suppress(FileNotFoundError):  # a rank that has ended since
            beat, age = read_beat(path), now - path.stat().st_mtime
            if beat is not None and beat.run_id in ("", run_id):
                found.append((beat, age))
    return found


def _stored(runs: Sequence[Path], *, verify: bool) -> Iterator[StoredCheckpoint]:
    for path in (path for run in runs for path in checkpoint_folders(run)):
        with suppress(FileNotFoundError):  # a run that goes on has removed it since
            files = [file for file in path.rglob("*") if file.is_file()]
            try:
                ranks = max(1, int(read_meta(path).get("world_size", 1)))
            except (OSError, ValueError, TypeError, OverflowError):
                ranks = 1
            size = sum(file.stat().st_size for file in files)
            yield StoredCheckpoint(path, step_of(path), damage(path, contents=verify) or "", size, ranks)


def _holder(path: Path) -> str:
    """Who holds the lock of a run's folder; empty if nobody does."""
    try:
        with path.open("r+", encoding="utf-8") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return file.read().strip() or "another process"
    except OSError:
        pass
    return ""


def _evaluations(run: Path) -> dict[str, str]:
    found = {}
    for folder in sorted((run / LEDGER_FOLDER).glob(f"*/{PREFIX}*")):
        done = read_tree(folder / DONE)
        found[folder.name] = str(done.get("outcome", FINISHED)) if done else "unfinished"
    return found
