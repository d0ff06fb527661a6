"""How a run starts: it locks its folder, and finds the checkpoint from which it continues.

That is its own newest checkpoint, another run's (a fork), or one with another batch size.

A fork records its origin in RUN/origin.json. The command that began it can therefore be repeated unchanged, for example
by a scheduler: once the fork has checkpoints of its own, it continues from them.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.checkpoint.mirror import Mirror, at_start, fetch_newest, refuse_taken
from pipeline.checkpoint.reader import Checkpoint, agreed_checkpoint
from pipeline.config import dump
from pipeline.distributed.exit_record import FOLDER_NAME as HEARTBEATS
from pipeline.distributed.exit_record import read_ends, record_exit, remove_records, stop_recording
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import file_lock, lock_holder, write_text
from pipeline.run_files import FOLDER_NAME, RUN_CONFIG_NAME, checkpoint_folders, parse_as, read_as, read_meta
from pipeline.training.continuation import PREVIOUS, check_continuation
from pipeline.training.recipe import RunConfig

LOCK_NAME = ".lock"
STARTING = ".starting"
"""Folder of the heartbeats until a start has passed all checks."""
RECORD_SECONDS = 15.0
"""In which all ranks have recorded that a start is refused, or have seen that one has."""
LOCK_SECONDS = 100  # a file server may hold a dead machine's lock for 90
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # of a file system without locks


@contextmanager
def hold_folder(run: RunConfig, *, world: World) -> Iterator[None]:
    """Create the run's folder and lock it against other runs, also on other machines if the file system has locks.

    Raises:
        UserError: Another run is training in the folder, or it cannot be made. On every rank.
    """
    folder, problem = Path(run.output), ""
    with ExitStack() as stack:
        if world.is_main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(folder / LOCK_NAME))
                remove_records(folder / STARTING)
            except BlockingIOError:
                holder = lock_holder(folder / LOCK_NAME)
                problem = f"Another run is training in {folder} ({holder}): stop it first, or choose another output."
            except OSError as error:
                problem = (
                    f"output = {folder} cannot be the run's folder ({error.strerror}): name a folder that can be "
                    "made and written."
                )
        world.raise_together(problem)
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, after waiting for a run that is ending or has died."""
    if holder := lock_holder(path):
        print(f"Waiting up to {LOCK_SECONDS} s for {holder} to leave {path.parent}.", file=sys.stderr, flush=True)
    with ExitStack() as held:
        try:
            held.enter_context(file_lock(path, seconds=LOCK_SECONDS))
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        yield


@contextmanager
def folder_of_a_start(
    run: RunConfig, *, heartbeat: Heartbeat, resume: str | None = None, new_batch_size: bool = False
) -> Iterator[None]:
    """A refused start removes a folder that had nothing in it, and changes nothing in one that had.

    What `neuclip doctor` reads about the start before, and the run's settings, are replaced by `prepare_folder`, when
    every check has passed; in a new folder now, so that a start that is killed leaves them, too. So is the origin.

    Raises:
        UserError: What the block raises.
    """
    folder, world = Path(run.output), heartbeat.world
    fresh = world.is_main and {path.name for path in folder.iterdir()} <= {LOCK_NAME, STARTING}
    fresh = world.gather_objects(fresh)[0]
    if fresh:
        heartbeat.move(folder / HEARTBEATS)
        if world.is_main:
            write_text(folder / RUN_CONFIG_NAME, dump(run))
            record_origin(run, resume, new_batch_size=new_batch_size)
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
            _remove_start(folder, fresh=fresh)
        raise
    heartbeat.move(folder / HEARTBEATS)
    if world.is_main:
        remove_records(folder / STARTING)
        record_origin(run, resume, new_batch_size=new_batch_size)


def _remove_start(folder: Path, *, fresh: bool) -> None:
    """Remove what a refused start has written, and a new folder unless others have put files there."""
    remove_records(folder / STARTING)
    if fresh:
        for name in (RUN_CONFIG_NAME, ORIGIN_NAME, LOCK_NAME):
            (folder / name).unlink(missing_ok=True)
        remove_records(folder / HEARTBEATS)
        with suppress(OSError):  # not empty
            folder.rmdir()


def prepare_folder(run: RunConfig, *, world: World) -> None:
    """Write the resolved configuration into the run's folder, and remove the traces of its previous start."""
    folder = Path(run.output)
    if world.is_main:
        remove_records(folder / HEARTBEATS)  # maybe of more ranks
        (folder / HEARTBEATS).mkdir(parents=True, exist_ok=True)
        write_text(folder / RUN_CONFIG_NAME, dump(run))
    world.barrier()


ORIGIN_NAME = "origin.json"


@dataclass(frozen=True)
class Origin:
    """The checkpoint of another folder with which a run began."""

    checkpoint: str
    """Absolute path of its folder."""
    digest: str
    """SHA-256 of its `checkpoint.json`; empty if it could not be read: it may have been removed since."""
    new_batch_size: bool = False
    """The run was begun with `--new-batch-size`."""

    def is_of(self, other: Origin | None) -> bool:
        """Whether both are the same checkpoint, as far as it could be read."""
        if other is None or self.checkpoint != other.checkpoint:
            return False
        return not (self.digest and other.digest) or self.digest == other.digest


def origin_of_start(run: RunConfig, resume: str | None, *, new_batch_size: bool) -> Origin | None:
    """The origin of a run that begins with `--resume DIR`; None if DIR is in the run's own folder, or not given."""
    if resume is None or resume == "latest":
        return None
    path = Path(resume).resolve()
    if path.is_relative_to(Path(run.output).resolve()):
        return None
    digest = ""
    with suppress(OSError, ValueError):
        digest = str(read_meta(path).get("digest", ""))
    return Origin(str(path), digest, new_batch_size)


def read_origin(folder: Path) -> Origin | None:
    """The origin that a run's folder records; None if it is no fork, or the record is damaged."""
    return read_as(Origin, folder / ORIGIN_NAME)


def record_origin(run: RunConfig, resume: str | None, *, new_batch_size: bool) -> None:
    """Write a fork's origin into its folder; a run that begins anew has none."""
    path = Path(run.output, ORIGIN_NAME)
    if (origin := origin_of_start(run, resume, new_batch_size=new_batch_size)) is not None:
        if not origin.digest and origin.is_of(read_origin(path.parent)):
            return  # what is recorded says more
        write_text(path, json.dumps(asdict(origin)) + "\n")
    elif resume is None:
        path.unlink(missing_ok=True)


def find_start(
    run: RunConfig,
    resume: str | None,
    *,
    world: World,
    new_batch_size: bool,
    mirror: str | None,
    on_event: Callable[[str], None],
) -> Checkpoint | None:
    """The checkpoint to continue from, its steps counted in this run's batches; None for a new run. Collective.

    Args:
        run: The configuration.
        resume: None, "latest" or the folder of a checkpoint.
        world: The ranks.
        new_batch_size: Allow a checkpoint of another batch size.
        mirror: The setting `checkpoint.mirror`; None if it is not to be asked.
        on_event: Called with messages, on rank 0.

    Raises:
        UserError: There is no such checkpoint, or the folder or the mirror has others that contradict it.
    """
    folder, fallback = Path(run.output), run.checkpoint.fallback
    # The writer opens it on rank 0 only; here, all ranks raise what is wrong with its address.
    copies = Mirror(mirror, folder, progress=world.progress) if mirror else None
    origin = origin_of_start(run, resume, new_batch_size=new_batch_size)
    if origin is not None and _has_begun(folder, origin, world=world, copies=copies):
        on_event(f"This run was begun from {resume} and has checkpoints of its own: it continues from the newest.")
        resume = "latest"
    if resume == "latest" and copies:
        at_start(lambda: fetch_newest(copies, on_event=on_event), copies, world=world)
    checkpoint = agreed_checkpoint(folder, resume, world=world, on_event=on_event, fallback=fallback)
    started = in_new_steps(checkpoint, run, allowed=new_batch_size) if checkpoint else None
    if started is not None:
        check_continuation(started, run)
        if origin is not None and resume != "latest" and started.step == run.total_steps:
            raise UserError(
                f"{resume} is at step {started.step} of {run.total_steps} of this run: there is nothing to train, and "
                f"{folder} would get no checkpoint. Give more samples (samples = {run.samples})."
            )
    elif resume == "latest":
        places = [str(folder / FOLDER_NAME), *filter(None, (fallback, mirror))]
        on_event(f"--resume latest found no checkpoint in {', '.join(places)}: the run starts anew.")
    if resume != "latest" and copies:
        step = started.step if started else -1
        at_start(lambda: refuse_taken(copies, resume=resume, step=step), copies, world=world)
    return started


def _has_begun(folder: Path, origin: Origin, *, world: World, copies: Mirror | None) -> bool:
    """Whether a fork has checkpoints of its own, also if its disk was lost and its mirror has them. Collective.

    Raises:
        UserError: The folder has checkpoints of a run with another origin. On every rank.
    """
    begun, problem = False, ""
    if world.is_main and (folders := checkpoint_folders(folder)):
        begun = origin.is_of(read_origin(folder))
        if not begun:
            missing = "" if Path(origin.checkpoint).exists() else ", which does not exist"
            problem = (
                f"{folder} has checkpoints ({folders[-1].name} and others) of a run that was not begun from "
                f"{origin.checkpoint}{missing}: choose another output, or continue that run with --resume latest."
            )
    elif world.is_main and copies:
        with suppress(Exception):  # of any client library; whoever uses the mirror next reports it
            newest = [*copies.checkpoints(None).values()][-1]
            begun = origin.is_of(parse_as(Origin, json.dumps(newest.get("origin"))))
    world.raise_together(problem)
    return bool(world.gather_objects(begun)[0])


def in_new_steps(checkpoint: Checkpoint, run: RunConfig, *, allowed: bool) -> Checkpoint:
    """The checkpoint with its step counted in this run's batches; unchanged if the batch size is the same.

    `allowed`: the option `--new-batch-size` is given.

    Raises:
        UserError: The batch size differs and the option is not given, or the run would continue in the same folder,
            whose checkpoints and metrics count other steps.
    """
    before = checkpoint.batch_size
    if before == run.batch_size:
        return checkpoint
    if not allowed:
        raise UserError(
            f"The checkpoint was written with batch_size = {before}, and this run has "
            f"{run.batch_size}. Continue with the former, or add --new-batch-size with a new "
            "output folder: steps are then counted in new batches, the schedule continues at the same share of "
            "`samples`, and the data after the samples already shown."
        )
    if checkpoint.path.resolve().is_relative_to(Path(run.output).resolve()):
        raise UserError(
            f"--new-batch-size counts steps anew, so that checkpoints and metrics in {run.output} would contradict "
            f"each other: choose another output, with --resume {checkpoint.path}."
        )
    step = max(1, round(checkpoint.step * before / run.batch_size))
    return replace(checkpoint, meta={**checkpoint.meta, "step": step, PREVIOUS: before})
