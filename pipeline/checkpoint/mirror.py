"""A copy of a run's checkpoints in an object store, for machines that are taken away with their disks.

Finished checkpoints are uploaded in the background; a run on a fresh machine downloads the newest one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint.layout import (
    BEST_NAME,
    FOLDER_NAME,
    LATEST_NAME,
    best_checkpoint,
    finished_checkpoints,
    step_of,
)
from pipeline.checkpoint.mirror_store import MirrorStore
from pipeline.checkpoint.reader import damage, taken_by
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import write_text

ATTEMPTS = 3
PAUSE_SECONDS = 5.0


class Mirror:
    """Uploads the newest finished checkpoint in the background, one at a time. Rank 0 only.

    If checkpoints are finished faster than they are uploaded, those in between are skipped.

    Args:
        store: Where to.
        keep: Returns the names that stay, of those that the mirror has; its best checkpoint stays in any case.
        on_event: Called with a message for every upload.
    """

    def __init__(
        self, store: MirrorStore, *, keep: Callable[[list[str]], set[str]], on_event: Callable[[str], None]
    ) -> None:
        self._store, self._keep, self._on_event = store, keep, on_event
        self._changed = threading.Condition()
        self._next: Path | None = None
        self._current: Path | None = None
        self._thread: threading.Thread | None = None
        self._uploads = self._failures = 0

    @property
    def busy(self) -> set[Path]:
        """Checkpoints that must not be deleted now."""
        with self._changed:
            return {path for path in (self._next, self._current) if path is not None}

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
        """Remove checkpoints of later steps than `step`, to which the run has rolled back.

        Args:
            step: The step.
            seconds: How long to wait for an upload that is under way.
        """
        try:
            if not self.wait(seconds):
                raise TimeoutError(f"an upload has taken more than {seconds:.0f} s")
            names = self._store.names()
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
                self._store.upload(path)
                best = best_checkpoint(path.parents[1])
                if best == path:
                    self._store.point(BEST_NAME, path.name)
                names = self._store.names()
                for name in set(names) - self._keep(names) - {path.name, self._store.read(BEST_NAME)}:
                    self._store.remove(name)
                self._on_event(f"Checkpoint {path.name} is in the mirror ({time.monotonic() - start:.0f} s).")
                return
            except Exception as error:  # the run continues: a network that fails must not end a week of training
                problem = f"{type(error).__name__}: {error}"
                if attempt + 1 < ATTEMPTS:
                    time.sleep(PAUSE_SECONDS)
        self._failures += 1
        self._on_event(
            f"Checkpoint {path.name} is NOT in the mirror {self._store.url} ({problem}). {self._failures} of "
            f"{self._uploads} uploads have failed since the start. Training continues."
        )


def refuse_taken(run: Path, url: str, *, resume: str | None, step: int, world: World) -> None:
    """Refuse to start at a step if the mirror has later ones: of this run, or of another one whose folder has its name.

    Otherwise they would stay the newest ones there, and a fresh machine would continue from them. Collective.

    Args:
        run: The run's folder.
        url: The setting `checkpoint.mirror`.
        resume: What the run continues from; None: it is new.
        step: The step at which it starts; -1: it is new.
        world: The ranks.

    Raises:
        UserError: It has, or it cannot be written and read. On every rank.
    """
    problem = ""
    if world.is_main:
        try:
            store = MirrorStore(url, run)
            store.check()
            if later := [name for name in store.names() if step_of(Path(name)) > step]:
                problem = taken_by(f"The mirror {store.url}", later, resume)
        except Exception as error:  # of any client library
            problem = _unusable(url, error)
    world.raise_together(problem)


def _unusable(url: str, error: Exception) -> str:
    return (
        f"checkpoint.mirror = {url!r} cannot be used ({type(error).__name__}: {error}): check the address, the "
        "credentials and the right to write, or start with checkpoint.mirror=null."
    )


def fetch_newest(run: Path, url: str, *, world: World, on_event: Callable[[str], None]) -> None:
    """Download the mirror's newest intact checkpoint, and its best one.

    Not if the run's folder has an intact one that is as new. Collective; rank 0 downloads.

    Raises:
        UserError: The mirror cannot be written and read. On every rank.
    """
    problem = ""
    if world.is_main:
        try:
            _fetch(run, MirrorStore(url, run), on_event)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # of any client library
            problem = _unusable(url, error)
    world.raise_together(problem)


def _fetch(run: Path, store: MirrorStore, on_event: Callable[[str], None]) -> None:
    folder = run / FOLDER_NAME
    store.check()
    if not (names := store.names()):
        return
    here = next((step_of(path) for path in reversed(finished_checkpoints(run)) if not damage(path)), -1)
    for name in reversed([name for name in names if step_of(Path(name)) > here]):
        if problem := store.download(name, folder):
            on_event(f"Checkpoint {name} of the mirror is damaged and was skipped: {problem}")
            continue
        write_text(folder / LATEST_NAME, f"{name}\n", durable=True)
        on_event(f"Checkpoint {name} was downloaded from the mirror {store.url}.")
        best = store.read(BEST_NAME)
        if best and (best == name or not store.download(best, folder)):
            write_text(folder / BEST_NAME, f"{best}\n", durable=True)
        return


def kept_names(names: list[str], *, keep_last: int, keep_every: int | None, best: str | None = None) -> set[str]:
    """The checkpoints that the configuration keeps, of those with these names."""
    newest = sorted(names)[-keep_last:]
    regular = [name for name in names if keep_every is not None and step_of(Path(name)) % keep_every == 0]
    return {*newest, *regular, *([best] if best else [])}
