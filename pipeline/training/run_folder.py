"""The folder of a run at its start: its lock, the checkpoint from which it continues, and what a refused start leaves.

A run continues from its own newest checkpoint or, as a fork, from another run's. A fork records its origin in
RUN/origin.json. The command that began it can therefore be repeated unchanged, for example by a scheduler: once the
fork has checkpoints of its own, it continues from them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.config import UNSET, Tree, departed, dump, flatten
from pipeline.distributed.exit_record import FOLDER_NAME as HEARTBEATS
from pipeline.distributed.exit_record import read_ends, record_exit, remove_records, stop_recording
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import NO_LOCKS, file_lock, lock_holder, write_text
from pipeline.run_files import FOLDER_NAME, RUN_CONFIG_NAME, checkpoint_folders, read_as, read_meta
from pipeline.training.recipe import RunConfig

ORIGIN_NAME = "origin.json"
LOCK_NAME = ".lock"
STARTING = ".starting"
"""Folder of the heartbeats until a start has passed all checks."""
RECORD_SECONDS = 15.0
"""In which all ranks have recorded that a start is refused, or have seen that one has."""
OTHERWISE = (
    "Use the former, or begin a new run with the weights: another output, and model.arch=pretrained "
    "model.pretrained={} instead of --resume."
)
"""What to do where a run cannot continue from a checkpoint."""
LOCK_SECONDS = 100  # a file server may hold a dead machine's lock for 90


@contextmanager
def hold_folder(run: RunConfig, *, world: World) -> Iterator[None]:
    """Create the run's folder and lock it against other runs, also on other machines if the file system has locks.

    Raises:
        UserError: Another run is training in the folder, or it cannot be made. On every rank.
    """
    folder, path = Path(run.output), Path(run.output, LOCK_NAME)

    def lock() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if holder := lock_holder(path):  # a run that is ending or has died
                print(f"Waiting up to {LOCK_SECONDS} s for {holder} to leave {folder}.", file=sys.stderr, flush=True)
            stack.enter_context(file_lock(path, seconds=LOCK_SECONDS))
        except BlockingIOError as error:
            raise UserError(
                f"Another run is training in {folder} ({lock_holder(path)}): stop it first, or choose another output."
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise UserError(
                    f"output = {folder} cannot be the run's folder ({error.strerror}): name a folder that can be "
                    "made and written."
                ) from error
        remove_records(folder / STARTING)

    with ExitStack() as stack:
        world.work_on_main(lock)
        yield


@contextmanager
def folder_of_a_start(run: RunConfig, *, heartbeat: Heartbeat, resume: str | None = None) -> Iterator[None]:
    """A refused start removes a folder that had nothing in it, and changes nothing in one that had.

    The run's settings, its origin and what `neuclip doctor` reads about a start replace those of the start before when
    every check has passed; in a new folder they are written before, so that a start that is killed leaves them, too.
    """
    folder, world = Path(run.output), heartbeat.world

    def write() -> None:
        write_text(folder / RUN_CONFIG_NAME, dump(run))
        path = folder / ORIGIN_NAME
        if origin := Origin.of_start(run, resume):
            if origin.digest or not path.exists():  # else what is recorded says more
                write_text(path, json.dumps(asdict(origin)) + "\n")
        elif resume is None:
            path.unlink(missing_ok=True)

    (fresh, *_) = world.gather_objects(world.is_main and {p.name for p in folder.iterdir()} <= {LOCK_NAME, STARTING})
    if fresh:
        heartbeat.move(folder / HEARTBEATS)
        if world.is_main:
            write()
    try:
        yield
    except UserError as error:
        heartbeat.stop()
        record_exit(error.exit_code, f"{type(error).__name__}: {error}")  # for the others, if they were not refused
        stop_recording()
        if world.is_main:
            deadline = time.monotonic() + RECORD_SECONDS
            while len(read_ends(heartbeat.folder)) < world.size and time.monotonic() < deadline:
                time.sleep(0.05)
            remove_records(folder / STARTING)
            if fresh:
                for name in (RUN_CONFIG_NAME, ORIGIN_NAME, LOCK_NAME):
                    (folder / name).unlink(missing_ok=True)
                remove_records(folder / HEARTBEATS)
                with suppress(OSError):  # others have put files there
                    folder.rmdir()
        raise
    if world.is_main:
        remove_records(folder / HEARTBEATS)  # maybe of more ranks
        write()
    world.barrier()
    heartbeat.move(folder / HEARTBEATS)
    if world.is_main:
        remove_records(folder / STARTING)


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another folder with which a run began."""

    checkpoint: str
    """Absolute path of its folder."""
    digest: str
    """SHA-256 of its `checkpoint.json`; empty if it could not be read: it may have been removed since."""

    @classmethod
    def of_start(cls, run: RunConfig, resume: str | None) -> Origin | None:
        """That of a run that begins with `--resume DIR`; None if DIR is in the run's own folder, or not given."""
        path = Path(resume or "latest").resolve()
        if resume in (None, "latest") or path.is_relative_to(Path(run.output).resolve()):
            return None
        digest = ""
        with suppress(OSError, ValueError):
            digest = str(read_meta(path).get("digest", ""))
        return cls(str(path), digest)

    def is_of(self, other: Origin | None) -> bool:
        """Whether both are the same checkpoint, as far as it could be read."""
        if other is None or self.checkpoint != other.checkpoint:
            return False
        return not (self.digest and other.digest) or self.digest == other.digest


def read_origin(folder: Path) -> Origin | None:
    """The origin that a run's folder records; None if it is no fork, or the record is damaged."""
    return read_as(Origin, folder / ORIGIN_NAME)


def find_start(
    run: RunConfig, resume: str | None, *, world: World, mirror: str | None, on_event: Callable[[str], None]
) -> Checkpoint | None:
    """The checkpoint to continue from; None for a new run. Collective.

    `resume` is as in `train`; the mirror is asked unless it is None; `on_event` gets messages, on rank 0.

    Raises:
        UserError: There is no such checkpoint, or the folder or the mirror has others that contradict it.
    """
    folder = Path(run.output)
    # The writer opens it on rank 0 only; here, all ranks raise what is wrong with its address.
    copies = Mirror(mirror, folder, progress=world.progress) if mirror else None
    origin = Origin.of_start(run, resume)
    if origin is not None and _has_begun(folder, origin, world=world, copies=copies):
        on_event(f"This run was begun from {resume} and has checkpoints of its own: it continues from the newest.")
        resume = "latest"
    if resume == "latest" and copies:
        copies.at_start(lambda: copies.fetch_newest(on_event), world=world)
    checkpoint = agreed_checkpoint(folder, resume, world=world, on_event=on_event)
    if checkpoint is not None:
        check_continuation(checkpoint, run)
        if origin is not None and resume != "latest" and checkpoint.step == run.total_steps:
            raise UserError(
                f"{resume} is at step {checkpoint.step} of {run.total_steps} of this run: there is nothing to train, "
                f"and {folder} would get no checkpoint. Give more samples (samples = {run.samples})."
            )
    elif resume == "latest":
        places = ", ".join([str(folder / FOLDER_NAME), *([mirror] if mirror else [])])
        on_event(f"--resume latest found no checkpoint in {places}: the run starts anew.")
    if resume != "latest" and copies:
        step = checkpoint.step if checkpoint else -1
        copies.at_start(lambda: copies.refuse_taken(resume=resume, step=step), world=world)
    return checkpoint


def _has_begun(folder: Path, origin: Origin, *, world: World, copies: Mirror | None) -> bool:
    """Whether a fork has checkpoints of its own, also if its disk was lost and its mirror has them. Collective. A
    `UserError` on every rank if the folder has checkpoints of a run with another origin."""

    def begun() -> bool:
        if folders := checkpoint_folders(folder):
            if origin.is_of(read_origin(folder)):
                return True
            missing = "" if Path(origin.checkpoint).exists() else ", which does not exist"
            raise UserError(
                f"{folder} has checkpoints ({folders[-1].name} and others) of a run that was not begun from "
                f"{origin.checkpoint}{missing}: choose another output, or continue that run with --resume latest."
            )
        with suppress(Exception):  # of any client library; whoever uses the mirror next reports it
            newest = [*copies.checkpoints(None).values()][-1] if copies else {}
            return origin.is_of(read_as(Origin, json.dumps(newest.get("origin"))))
        return False

    return bool(world.gather_objects(world.work_on_main(begun))[0])


def check_continuation(checkpoint: Checkpoint, run: RunConfig) -> None:
    """Raise a `UserError` if a checkpoint has trained more steps than the run has, or other batches, or if its state is
    another objective's or optimizer's."""
    name, steps = checkpoint.path.name, run.total_steps
    settings = flatten(checkpoint.meta["config"])
    now = {"batch_size": run.batch_size, "objective.name": run.objective.name, "optimizer.name": run.optimizer.name}
    for key, value in now.items():
        if (before := settings.get(key, value)) != value:
            raise UserError(
                f"{name} was written with {key} = {before!r}, and this run has {value!r}, which cannot continue with "
                f"its state. {OTHERWISE.format(checkpoint.path)}"
            )
    if checkpoint.step > steps:
        raise UserError(
            f"samples = {run.samples} is {steps} step{'s' * (steps != 1)} of batch_size = {run.batch_size}, but {name} "
            f"has trained {checkpoint.step} ({checkpoint.meta['samples']:,} samples). Give more samples, or another "
            "output with --resume and the folder of an earlier checkpoint."
        )


def changed_settings(before: Tree, now: Tree) -> list[str]:
    """The settings that differ, without `output`: first those that both have.

    One that only one of both has differs, too: the default of a new setting may compute in another way than the version
    that did not have it. Not so one that has left and was not set.
    """
    old, new = flatten(before), flatten(now)
    old = {key: value for key, value in old.items() if value not in UNSET or departed(key) is None}
    return [
        f"{key} {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys(), key=lambda key: (key not in old or key not in new, key))
        if old.get(key, "absent") != new.get(key, "absent") and key != "output"
    ]
