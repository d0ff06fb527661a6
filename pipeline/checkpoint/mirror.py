"""A copy of a run's checkpoints in an object store, for machines that are taken away with their disks.

A finished checkpoint is uploaded in the background: its files first, each read back and compared with its SHA-256, then
`checkpoint.json`, which makes it a checkpoint, and `latest` last. A killed upload has no `checkpoint.json` and is
ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint.layout import (
    BEST_NAME,
    FOLDER_NAME,
    LATEST_NAME,
    META_NAME,
    PREFIX,
    best_checkpoint,
    finished_checkpoints,
    is_name,
    step_of,
)
from pipeline.checkpoint.reader import damage, taken_by
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import flush, write_text

BLOCK = 1 << 20
ATTEMPTS = 3
PAUSE_SECONDS = 5.0


class MirrorStore:
    """The checkpoints of one run in any storage that fsspec supports.

    Args:
        url: The setting `checkpoint.mirror`. The run's checkpoints are in URL/NAME-OF-RUN/checkpoints/.
        run: The run's folder.

    Raises:
        UserError: There is no such kind of storage, or the package for it is not installed.
    """

    def __init__(self, url: str, run: Path) -> None:
        import fsspec

        self.url = f"{url.rstrip('/')}/{run.name}/{FOLDER_NAME}"
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoint.mirror = {url!r} cannot be used ({error}). For s3://, pip install 'neuclip[s3]'."
            ) from error

    def names(self) -> list[str]:
        """The finished checkpoints, oldest first."""
        self._files.invalidate_cache()
        try:
            found = self._files.glob(f"{self._root}/{PREFIX}*/{META_NAME}")
        except FileNotFoundError:
            return []
        return sorted(filter(is_name, (str(path).rstrip("/").split("/")[-2] for path in found)))

    def read(self, name: str) -> str:
        """A small file's contents; empty if there is none."""
        self._files.invalidate_cache()
        try:
            return bytes(self._files.cat_file(f"{self._root}/{name}")).decode().strip()
        except FileNotFoundError:
            return ""

    def upload(self, path: Path) -> None:
        """Copy a finished checkpoint, verified.

        Raises:
            OSError: It could not be copied, or the copy differs.
        """
        self.remove(path.name)
        meta = (path / META_NAME).read_bytes()
        for name, entry in json.loads(meta)["files"].items():
            target = f"{self._root}/{path.name}/{name}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path / name), target)
            if self._sha256(f"{path.name}/{name}") != entry["sha256"]:
                raise OSError(f"{name} arrived with other contents")
        self._files.pipe_file(f"{self._root}/{path.name}/{META_NAME}", meta)
        self.point(LATEST_NAME, path.name)

    def point(self, file: str, name: str) -> None:
        """Write the name of a checkpoint into `latest` or `best`."""
        self._files.pipe_file(f"{self._root}/{file}", f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint, `checkpoint.json` first, so that no part of it looks complete."""
        self._files.invalidate_cache()
        for path in (f"{self._root}/{name}/{META_NAME}", f"{self._root}/{name}"):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def download(self, name: str, folder: Path) -> str:
        """Copy a checkpoint to `folder`/`name`, and return what is wrong with it, or an empty string."""
        temporary, final = folder / f".{name}", folder / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            meta = json.loads(self.read(f"{name}/{META_NAME}"))
            for file in meta["files"]:
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(temporary / file))
                flush(temporary / file)
            write_text(temporary / META_NAME, json.dumps(meta, indent=1) + "\n", durable=True)
            if problem := damage(temporary):
                return problem
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            flush(folder)
        except (OSError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def _sha256(self, name: str) -> str:
        digest = hashlib.sha256()
        with self._files.open(f"{self._root}/{name}", "rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        return digest.hexdigest()


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
        self._on_event(
            f"Checkpoint {path.name} is NOT in the mirror {self._store.url} ({problem}). Training continues."
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
        UserError: It has, or it cannot be reached. On every rank.
    """
    problem = ""
    if world.is_main:
        try:
            store = MirrorStore(url, run)
            if later := [name for name in store.names() if step_of(Path(name)) > step]:
                problem = taken_by(f"The mirror {store.url}", later, resume)
        except Exception as error:  # of any client library
            problem = _unreachable(url, error)
    world.raise_together(problem)


def _unreachable(url: str, error: Exception) -> str:
    return (
        f"checkpoint.mirror = {url!r} cannot be read ({type(error).__name__}: {error}): check the address and "
        "the credentials, or start with checkpoint.mirror=null."
    )


def fetch_newest(run: Path, url: str, *, world: World, on_event: Callable[[str], None]) -> None:
    """Download the mirror's newest intact checkpoint, and its best one.

    Not if the run's folder has an intact one that is as new. Collective; rank 0 downloads.

    Raises:
        UserError: The mirror cannot be reached. On every rank.
    """
    problem = ""
    if world.is_main:
        try:
            _fetch(run, MirrorStore(url, run), on_event)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # of any client library
            problem = _unreachable(url, error)
    world.raise_together(problem)


def _fetch(run: Path, store: MirrorStore, on_event: Callable[[str], None]) -> None:
    folder = run / FOLDER_NAME
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
