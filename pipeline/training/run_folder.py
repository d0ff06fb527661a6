"""A run's folder: a lock, so that one run at a time trains in it, and the run's settings."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from pipeline.config import dump
from pipeline.distributed.exit_record import FOLDER_NAME as HEARTBEATS
from pipeline.distributed.exit_record import reserve_space, start_recording, stop_recording
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.training.recipe import CONFIG_NAME, RunConfig

LOCK_NAME = ".lock"
LOCK_SECONDS = 100  # a file server may hold a dead machine's lock for 90


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
                lock = stack.enter_context((folder / LOCK_NAME).open("a+"))
                problem = _lock(lock, folder)
            except OSError as error:
                problem = (
                    f"output = {folder} cannot be the run's folder ({error.strerror}): name a folder that can be made "
                    "and written."
                )
        world.raise_together(problem)
        start_recording(folder, rank=world.rank)
        yield


def _lock(file: IO[str], folder: Path) -> str:
    """Take the lock, waiting for a run that is ending or has died. Returns an error message if it remains locked."""
    for second in range(LOCK_SECONDS):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # loading processes do not inherit this kind of lock
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return ""  # a file system without locks
            if second == 0:
                print(
                    f"Waiting up to {LOCK_SECONDS} s for {_holder(file)} to leave {folder}.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(1.0)
        else:
            file.truncate(0)
            file.write(f"{socket.gethostname()}, process {os.getpid()}\n")
            file.flush()
            return ""
    return f"Another run is training in {folder} ({_holder(file)}): stop it first, or choose another output."


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip() or "another run"


@contextmanager
def folder_of_a_start(run: RunConfig, *, world: World) -> Iterator[None]:
    """Write the run's settings into its folder; if the start is refused, remove a folder that had nothing else in it.

    Raises:
        UserError: What the block raises.
    """
    folder = Path(run.output)
    fresh = world.is_main and {path.name for path in folder.iterdir()} <= {LOCK_NAME}
    prepare_folder(run, world=world)
    try:
        yield
    except UserError:
        if not world.is_main:
            stop_recording()  # rank 0 records the reason, or removes the folder
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def prepare_folder(run: RunConfig, *, world: World) -> None:
    """Write the resolved configuration into the run's folder."""
    folder = Path(run.output)
    if world.is_main:
        shutil.rmtree(folder / HEARTBEATS, ignore_errors=True)  # of the run's previous start, maybe on more ranks
        (folder / HEARTBEATS).mkdir(parents=True)
        write_text(folder / CONFIG_NAME, dump(run))
    world.barrier()
    reserve_space()
