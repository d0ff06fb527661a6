"""A copy of a run's checkpoints in an object store, for machines that are taken away with their disks.

Finished checkpoints are uploaded in the background; a run on a fresh machine downloads the newest one.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoint.layout import BEST_NAME, LATEST_NAME, best_checkpoint, id_in, is_foreign, run_id_of
from pipeline.checkpoint.mirror_store import ADVICE, MirrorStore, Owner, check_recipe
from pipeline.checkpoint.reader import damage, taken_by
from pipeline.config import Tree
from pipeline.distributed.peers import work_on_main
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_text
from pipeline.run_files import FOLDER_NAME, finished_checkpoints, is_name, step_of

ATTEMPTS, PAUSE_SECONDS = 3, 5.0
ANSWER_SECONDS, NOTE_SECONDS = 120.0, 10.0
"""How long a start waits for the mirror to take and return a small file, and when it says so."""
BEAT_SECONDS, WATCH_SECONDS = 20.0, 50.0
"""How often a process that uploads says that it lives, and how long a fresh machine waits for it to say so."""


class Mirror:
    """Uploads the newest finished checkpoint in the background, one at a time. Rank 0 only.

    If checkpoints are finished faster than they are uploaded, those in between are skipped. While it is open, it owns
    the run's folder in the mirror: it says so there every few seconds, and stops when another process says so.

    Checkpoints that `outdated` returns (`layout.outdated` with the run's settings) are removed, except the best one and
    `resumed_from`, which the run continues. `on_event` is called with a message for every upload.
    """

    def __init__(
        self,
        store: MirrorStore,
        *,
        outdated: Callable[..., list[str]],
        run_id: str,
        resumed_from: str,
        on_event: Callable[[str], None],
    ) -> None:
        self._store, self._outdated, self._on_event = store, outdated, on_event
        self._run_id, self._resumed_from = run_id, resumed_from
        self._changed = threading.Condition()
        self._next: Path | None = None
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._uploads = self._failures = 0
        self._verified: set[str] = set()
        self._holder = f"{socket.gethostname()}, process {os.getpid()}, {uuid.uuid4().hex[:8]}"
        self._closed, self._owning, self._beats = threading.Event(), threading.Lock(), 0
        self._claimed = self._taken = False
        self._owner_thread = threading.Thread(target=self._beat, name="mirror-owner", daemon=True)
        self._owner_thread.start()

    @property
    def busy(self) -> set[Path]:
        """Checkpoints that must not be deleted now."""
        with self._changed:
            return {path for path in (self._next, self._current) if path is not None}

    def close(self, *, seconds: float = 2 * PAUSE_SECONDS) -> None:
        """Let other processes write to the mirror; if its server hangs, wait so long."""
        self._closed.set()
        self._owner_thread.join(timeout=seconds)

    def _beat(self) -> None:
        """Own the mirror until `close`, or until another process does."""
        pause = 0.0
        while not self._closed.wait(pause):
            pause = BEAT_SECONDS
            with suppress(Exception):  # of any client library; uploads report that the mirror is away
                if not self._own():
                    return
        with suppress(Exception):
            self._own(Owner(self._run_id, "", ""))

    def _own(self, owner: Owner | None = None) -> bool:
        """Say that this process owns the mirror. Returns whether it does: once it has said so, another one may."""
        with self._owning:
            found = self._store.owner() if self._claimed else None
            if found is not None and (found.run_id != self._run_id or found.holder not in ("", self._holder)):
                if not self._taken:
                    self._on_event(
                        f"WARNING: another process has taken over the mirror {self._store.url} ({found.holder}, run "
                        f"{found.run_id}; this is run {self._run_id}): this one copies nothing more there. Stop one "
                        "of the two, or continue this one with another checkpoint.mirror."
                    )
                self._taken = True
            if not self._taken:
                self._beats += 1
                self._store.claim(owner or Owner(self._run_id, self._holder, str(self._beats)))
                self._claimed = True
            return not self._taken

    def offer(self, path: Path) -> None:
        """Upload a finished checkpoint as soon as the current upload ends."""
        with self._changed:
            self._next = path
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until everything is uploaded or given up, and return whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout=seconds)

    def abandon_after(self, step: int, *, seconds: float) -> None:
        """Remove checkpoints of steps after `step`, to which the run has rolled back.

        An upload that is under way is waited for, `seconds` at most.
        """
        try:
            if not self.wait(seconds):
                raise TimeoutError(f"an upload has taken more than {seconds:.0f} s")
            names = self._own_names() if self._own() else []
            for name in names:
                if step_of(Path(name)) > step:
                    self._store.remove(name)
            older = [name for name in names if step_of(Path(name)) <= step]
            if older:
                self._store.point(LATEST_NAME, older[-1])
        except Exception as error:  # of any client library
            self._on_event(
                f"The mirror {self._store.url} could not be rolled back ({error}): remove later steps there."
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current, self._next = self._next, None
                if self._current is None:
                    self._thread = None
                    self._changed.notify_all()
                    return
            self._upload(self._current)

    def _upload(self, path: Path) -> None:
        self._uploads += 1
        for attempt in range(ATTEMPTS):
            try:
                start = time.monotonic()
                if not self._own():
                    return
                if is_foreign(other := self._store.run_id(path.name), self._run_id):
                    problem = f"run {other} has one of this name there: move or remove it"
                    break
                self._store.upload(path)
                self._verified.add(path.name)
                if best_checkpoint(path.parents[1]) == path:
                    self._store.point(BEST_NAME, path.name)
                held = {self._resumed_from, self._store.read(BEST_NAME)}
                for name in self._outdated(self._own_names(), written=path.name, is_good=self._is_good, held=held):
                    self._store.remove(name)
                self._on_event(f"Checkpoint {path.name} is in the mirror ({time.monotonic() - start:.0f} s).")
                return
            except Exception as error:  # the run continues: a network that fails must not end a week of training
                problem = f"{type(error).__name__}: {error}"
                time.sleep(PAUSE_SECONDS * (attempt + 1 < ATTEMPTS))
        self._failures += 1
        self._on_event(
            f"Checkpoint {path.name} is NOT in the mirror {self._store.url} ({problem}). {self._failures} of "
            f"{self._uploads} uploads have failed since the start. Training continues."
        )

    def _own_names(self) -> list[str]:
        """This run's checkpoints in the mirror, oldest first."""
        return [name for name in self._store.names() if self._store.run_id(name) in ("", self._run_id)]

    def _is_good(self, name: str) -> bool:
        """Whether a checkpoint in the mirror is complete; its contents were compared when it was uploaded."""
        if name not in self._verified and not self._store.problem(name):
            self._verified.add(name)
        return name in self._verified


def refuse_taken(run: Path, url: str, *, resume: str | None, step: int, world: World, minutes: float = 30.0) -> None:
    """Refuse to start at a step if the mirror has later ones: of this run, or of another one whose folder has its name.

    Otherwise they would stay the newest ones there, and a fresh machine would continue from them. Collective.

    Args:
        run: The run's folder.
        url: The setting `checkpoint.mirror`.
        resume: What the run continues from; None: it is new.
        step: The step at which it starts; -1: it is new.
        world: The ranks.
        minutes: As for `work_on_main`.

    Raises:
        UserError: It has, or it cannot be written and read. On every rank.
    """

    def check() -> str:
        store = MirrorStore(url, run)
        check_in_time(store)
        later = [name for name in store.names() if step_of(Path(name)) > step]
        problem = _of_another_run(store, run, resume=resume)
        return taken_by(f"The mirror {store.url}", later, resume) if later and not (problem and resume) else problem

    _ask(url, check, world=world, minutes=minutes)


def check_in_time(store: MirrorStore) -> None:
    """`MirrorStore.check` in bounded time: clients try again for many minutes when a server takes requests and hangs.

    Raises:
        TimeoutError: The mirror has not answered.
        Exception: As for `MirrorStore.check`.
    """
    errors: list[Exception] = []

    def ask() -> None:
        try:
            store.check()
        except Exception as error:  # of any client library
            errors.append(error)

    thread = threading.Thread(target=ask, name="mirror-check", daemon=True)
    thread.start()
    thread.join(NOTE_SECONDS)
    if thread.is_alive():
        left = ANSWER_SECONDS - NOTE_SECONDS
        print(f"Waiting up to {left:.0f} s for checkpoint.mirror {store.url} to answer.", file=sys.stderr, flush=True)
        thread.join(left)
    if thread.is_alive():
        raise TimeoutError(f"it has not answered for {ANSWER_SECONDS:.0f} s")
    for error in errors:
        raise error


def _of_another_run(store: MirrorStore, run: Path, *, resume: str | None) -> str:
    """Why a run cannot use a mirror that belongs to another run, or to another machine on which this one runs now.

    A machine whose folder has no run yet may continue with `--resume latest` the one of a machine that is gone.
    """
    owner, names, ours = store.owner(), store.names(), run_id_of(run)
    ids = [owner.run_id] if owner else [store.run_id(name) for name in reversed(names)]
    theirs = next(filter(None, ids), "")
    if not theirs or theirs == ours:
        return ""
    which = f"The mirror {store.url} belongs to run {theirs}"
    if names and (ours or resume != "latest"):
        new = "a new one; --resume latest continues that run"
        return f"{which}, and {run} is {f'run {ours}' if ours else new}. {ADVICE}"
    if owner and owner.holder and _lives(store, owner):
        return f"{which}, which is being trained now ({owner.holder}). Stop it first. {ADVICE}"
    return ""


def _lives(store: MirrorStore, owner: Owner) -> bool:
    """Whether the process that owns the mirror still says that it lives."""
    print(f"Waiting {WATCH_SECONDS:.0f} s to see whether {owner.holder} still writes to {store.url}.", file=sys.stderr)
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, BEAT_SECONDS))
        if (now := store.owner()) != owner:
            return now is None or bool(now.holder)  # None: it is being written
    return False


def _ask(url: str, work: Callable[[], str], *, world: World, minutes: float) -> None:
    """Do on rank 0 what returns why the run cannot use a mirror, and raise that on every rank. Collective."""

    def problem() -> str:
        try:
            return work()
        except UserError as error:
            return str(error)
        except Exception as error:  # of any client library
            return (
                f"checkpoint.mirror = {url!r} cannot be used ({type(error).__name__}: {error}): check the address, the "
                "credentials and the right to write, or start with checkpoint.mirror=null."
            )

    world.raise_together(work_on_main(problem, world=world, minutes=minutes) or "")


def fetch_newest(
    run: Path,
    url: str,
    *,
    world: World,
    on_event: Callable[[str], None],
    settings: Tree | None = None,
    minutes: float = 30.0,
) -> None:
    """Download the mirror's newest intact checkpoint of this run, and its best one.

    Not if the run's folder has an intact one that is as new. Collective; rank 0 downloads.

    Args:
        run: The run's folder.
        url: The setting `checkpoint.mirror`.
        world: The ranks.
        on_event: Called with a message for every checkpoint that is downloaded or skipped.
        settings: This run's. If its folder is empty, a checkpoint of a run with another recipe is refused.
        minutes: As for `work_on_main`.

    Raises:
        UserError: The mirror cannot be written and read, or belongs to another run. On every rank.
    """
    store = MirrorStore(url, run, progress=world.progress)
    _ask(url, lambda: _fetch(run, store, on_event, settings or {}), world=world, minutes=minutes)


def _fetch(run: Path, store: MirrorStore, on_event: Callable[[str], None], settings: Tree) -> str:
    folder = run / FOLDER_NAME
    check_in_time(store)
    if problem := _of_another_run(store, run, resume="latest"):
        return problem
    if not (names := store.names()):
        return ""
    owner = store.owner()
    run_id = run_id_of(run) or (owner.run_id if owner else "")

    def is_ours(found: str | None) -> bool:
        return not (run_id and is_foreign(found, run_id))

    intact = (path for path in reversed(finished_checkpoints(run)) if is_ours(id_in(path)) and not damage(path))
    here = next(map(step_of, intact), -1)
    for name in reversed([name for name in names if step_of(Path(name)) > here]):
        if not run_id_of(run):
            check_recipe(store, name, settings)
        if not is_ours(other := store.run_id(name)):
            on_event(f"Checkpoint {name} of the mirror was written by another run ({other}) and was skipped.")
            continue
        if problem := store.download(name, folder, on_event):
            on_event(f"Checkpoint {name} of the mirror is damaged and was skipped: {problem}")
            continue
        write_text(folder / LATEST_NAME, f"{name}\n", durable=True)
        on_event(f"Checkpoint {name} was downloaded from the mirror {store.url}.")
        best = store.read(BEST_NAME)
        ours = is_name(best) and is_ours(store.run_id(best))
        if best == name or (ours and not store.download(best, folder, on_event)):
            write_text(folder / BEST_NAME, f"{best}\n", durable=True)
        break
    return ""
