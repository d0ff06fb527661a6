"""Checkpoints that tests write to a mirror and fetch from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.distributed.world import World
from pipeline.run_files import step_of
from tests import written_checkpoints
from tests.written_checkpoints import Towers, latest, snapshot


def writer_of(
    run: Path, url: str, towers: Towers, on_event: Callable[[str], None] = print, **settings: Any
) -> CheckpointWriter:
    return written_checkpoints.writer_of(run, towers, on_event=on_event, mirror=url, **settings)


def write(run: Path, url: str, towers: Towers, steps: list[int], **settings: Any) -> list[str]:
    events: list[str] = []
    writer = writer_of(run, url, towers, events.append, **settings)
    for step in steps:
        writer.save(snapshot(towers, step))
        writer.finish()
    return events


def steps_in(mirror: Mirror) -> list[int]:
    return [step_of(Path(name)) for name in mirror.checkpoints(None)]


def fetched(run: Path, url: str) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint that a run resumes from after asking its mirror, and the messages."""
    notes = fetch(run, url)
    return latest(run, on_event=notes.append), notes


def fetch(run: Path, url: str) -> list[str]:
    """Ask the mirror as a run that continues does, and return the messages."""
    notes, mirror = list[str](), Mirror(url, run)
    mirror.at_start(lambda: mirror.fetch_newest(notes.append), world=World())
    return notes


def begin(run: Path, url: str, *, resume: str | None = None, step: int = -1) -> None:
    """Ask the mirror as a new run does, or one that continues a checkpoint of another folder."""
    mirror = Mirror(url, run)
    mirror.at_start(lambda: mirror.refuse_taken(resume=resume, step=step), world=World())
