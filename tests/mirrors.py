"""Checkpoints that tests write to a mirror and fetch from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.checkpoint.mirror import fetch_newest
from pipeline.checkpoint.reader import Checkpoint, find_checkpoint
from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter
from pipeline.distributed.world import World
from tests.written_checkpoints import Towers, snapshot


def writer_of(
    run: Path,
    url: str,
    towers: Towers,
    on_event: Callable[[str], None] = print,
    **settings: Any,
) -> CheckpointWriter:
    config = CheckpointConfig(every=1, mirror=url, **settings)
    return CheckpointWriter(run, config=config, world=World(), architecture=towers[1], on_event=on_event)


def write(run: Path, url: str, towers: Towers, steps: list[int], **settings: Any) -> list[str]:
    events: list[str] = []
    writer = writer_of(run, url, towers, events.append, **settings)
    for step in steps:
        writer.save(snapshot(towers, step))
        writer.finish()
    writer.close()
    return events


def fetched(run: Path, url: str) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint that a run resumes from after asking its mirror, and the messages."""
    notes: list[str] = []
    fetch_newest(run, url, world=World(), on_event=notes.append)
    found = find_checkpoint(run, "latest", on_event=notes.append)
    assert found is not None
    return found, notes
