"""The folder of a run at its start: it is locked, and a start that is refused changes nothing in it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.config import dump
from pipeline.distributed.exit_record import FOLDER_NAME as HEARTBEATS
from pipeline.distributed.exit_record import read_ends, record_exit, remove_records, stop_recording
from pipeline.distributed.heartbeat import Heartbeat
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import NO_LOCKS, file_lock, lock_holder, write_text
from pipeline.run_files import RUN_CONFIG_NAME
from pipeline.training.recipe import RunConfig
from pipeline.training.resume import ORIGIN_NAME, record_origin

LOCK_NAME = ".lock"
STARTING = ".starting"
"""Folder of the heartbeats until a start has passed all checks."""
RECORD_SECONDS = 15.0
"""In which all ranks have recorded that a start is refused, or have seen that one has."""
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

    Raises:
        UserError: What the block raises.
    """
    folder, world = Path(run.output), heartbeat.world

    def write() -> None:
        write_text(folder / RUN_CONFIG_NAME, dump(run))
        record_origin(run, resume)

    fresh = world.is_main and {path.name for path in folder.iterdir()} <= {LOCK_NAME, STARTING}
    fresh = world.gather_objects(fresh)[0]
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
