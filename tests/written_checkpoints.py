"""Checkpoints that tests write, without training."""

import errno
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.reader import agreed_checkpoint
from pipeline.checkpoint.writer import CheckpointConfig, CheckpointWriter, Snapshot
from pipeline.distributed.world import World
from pipeline.model.architectures import Architecture
from pipeline.run_files import step_of

Towers = tuple[dict[str, torch.Tensor], Architecture]

CORRUPT = [["image is missing", "00000.tar", 2]]
POSITION = {"epoch": 0, "batch": 1, "order_hash": "0f", "corrupt": CORRUPT, "proof": "0f", "order": {}, "pixels": {}}
FAULTS = {"skipped": 0, "rollbacks": 0, "in_a_row": 0, "rolled_back_to": None}
HISTORY = {"best_loss": None, "best_step": None, "since_best": 0, "step": 0}
FACTS = {"config": {"batch_size": 8}, "data": POSITION, "faults": FAULTS, "validation": HISTORY, "features": {}}
"""What every checkpoint needs beside its step."""


def write(run, towers, steps, **settings):
    """Write the checkpoints of these steps (or snapshots), also to a mirror if there is one. Returns the messages."""
    events = list[str]()
    writer = writer_of(run, towers, on_event=events.append, **settings)
    for step in steps:
        writer.save(step if isinstance(step, Snapshot) else snapshot(towers, step))
        writer.finish()
    return events


def writer_of(run, towers, *, on_event=print, world=None, resumed_from=None, mirror_minutes=20.0, **settings):
    return CheckpointWriter(
        run,
        config=CheckpointConfig(**settings),
        world=world or World(),
        architecture=towers[1],
        on_event=on_event,
        resumed_from=resumed_from,
        mirror_minutes=mirror_minutes,
    )


def latest(run, *, on_event=print):
    """The checkpoint that `--resume latest` continues from; there must be one."""
    found = agreed_checkpoint(run, "latest", world=World(), on_event=on_event)
    assert found is not None
    return found


def snapshot(towers, step):
    return Snapshot(
        step=step,
        weights=towers[0],
        moments={("visual.proj", "exp_avg"): torch.full((2, 3), float(step))},
        counter=step,
        objective={"log_scale.value": torch.tensor(2.5)},
        rows={"u": (0, iter([torch.arange(4.0), torch.arange(4.0, 10.0)]))},
        logit=(2.5, None),
        facts={**FACTS, "samples": 8 * step},
    )


def failing(times):
    """Return a `save_file` that fails the given number of times before it works."""
    left = times

    def save(*args, **kwargs):
        nonlocal left
        left -= 1
        if left >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(*args, **kwargs)

    return save


def steps_in(mirror):
    return [step_of(Path(name)) for name in mirror.checkpoints(None)]


def fetched(run, url):
    """Return the checkpoint that a run resumes from after asking its mirror, and the messages."""
    notes = fetch(run, url)
    return latest(run, on_event=notes.append), notes


def fetch(run, url):
    """Ask the mirror as a run that continues does, and return the messages."""
    notes, mirror = list[str](), Mirror(url, run)
    mirror.at_start(lambda: mirror.fetch_newest(notes.append), world=World())
    return notes


def begin(run, url, *, resume=None, step=-1):
    """Ask the mirror as a new run does, or one that continues a checkpoint of another folder."""
    mirror = Mirror(url, run)
    mirror.at_start(lambda: mirror.refuse_taken(resume=resume, step=step), world=World())
