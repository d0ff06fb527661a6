"""A copy of a run's finished checkpoints in any storage that fsspec supports, for machines that lose their disks.

They are uploaded in the background to URL/NAME-OF-RUN/checkpoints/; a run on a fresh machine downloads the newest one.
`checkpoint.json`, which makes a folder a checkpoint and has the run's id, is uploaded after the files that it lists.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.checkpoint.layout import (
    BEST_NAME,
    LATEST_NAME,
    best_checkpoint,
    id_in,
    is_foreign,
    publish,
    run_id_of,
    wrong_meta,
)
from pipeline.checkpoint.reader import damage, taken_by
from pipeline.distributed.peers import work_on_main
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.files import MOST_TEXT, flush, plain_name, write_json, write_text
from pipeline.run_files import (
    FOLDER_NAME,
    META_NAME,
    PREFIX,
    finished_checkpoints,
    is_name,
    parse_meta,
    read_meta,
    step_of,
    valid_run_id,
)

ANSWER_SECONDS = 60.0
"""How long a start waits for the mirror to take and return a small file: clients try again for many minutes."""
WITHOUT_FOLDERS = frozenset({"abfs", "abfss", "adl", "az", "gcs", "gs", "oci", "oss", "s3", "s3a"})
"""Protocols of object stores. Asked for a folder, their clients would create a bucket whose name is misspelt."""


class Mirror:
    """The checkpoints of one run in URL/NAME-OF-RUN/checkpoints/. Methods raise what the client library raises.

    `progress` is called now and then while a checkpoint is downloaded.

    Raises:
        UserError: The storage or its package does not exist, it is the run's own folder, or its name is a pattern or
            no URL.
    """

    def __init__(self, url: str, run: Path, *, progress: Callable[[], None] = lambda: None) -> None:
        import fsspec
        from fsspec.implementations.dirfs import DirFileSystem
        from fsspec.implementations.local import LocalFileSystem

        name, place = plain_name(run.resolve().name, what="The run's folder"), url.rstrip("/") or "/"
        self.run = run
        self.url, problem = f"{place.rstrip('/')}/{name}/{FOLDER_NAME}", ""
        try:
            storage, root = fsspec.core.url_to_fs(place)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoint.mirror = {url!r} cannot be used ({error}). For s3://, pip install 'neuclip[s3]'."
            ) from error
        if any(sign in self.url for sign in "*?["):
            problem = "has one of *, ? and [, with which clients match other folders, too: rename the mirror or the run"
        elif isinstance(storage, LocalFileSystem):
            if ":" in place.partition("/")[0] and not place.startswith(("file:///", "local:///")):
                problem = "is neither a URL, such as s3://BUCKET/FOLDER, nor a folder; a folder with a colon is ./NAME"
            elif Path(root, name).resolve() == run.resolve():
                problem = f"would be the run's own folder, {run}: name a folder on another disk"
        if problem:
            raise UserError(f"checkpoint.mirror = {self.url} {problem}.")
        self._files = DirFileSystem(f"{root.rstrip('/')}/{name}/{FOLDER_NAME}", storage)
        self._has_folders = WITHOUT_FOLDERS.isdisjoint(fsspec.utils.get_protocol(place).split("::"))
        self._downloaded = fsspec.Callback(hooks={"progress": lambda *_, **__: progress()})

    def check(self) -> None:
        """Write a small file, read it and remove it.

        Raises:
            TimeoutError: There is no answer.
        """
        answer: Future[None] = Future()

        def ask() -> None:
            try:
                self._make_folder("")
                name = f"write-test-{uuid.uuid4().hex}"
                self._files.pipe_file(name, name.encode())
                if self._files.cat_file(name) != name.encode():
                    raise OSError("what answers there is no storage: it returned other bytes than were written")
                self._files.rm_file(name)
                answer.set_result(None)
            except Exception as error:  # of any client library
                answer.set_exception(error)

        threading.Thread(target=ask, name="mirror-check", daemon=True).start()
        answer.result(ANSWER_SECONDS)

    def names(self, *, finished: bool = True) -> list[str]:
        """The checkpoints, oldest first; `finished=False`: also those whose upload was interrupted."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            paths = self._files.glob(f"{PREFIX}*/{META_NAME}" if finished else f"{PREFIX}*")
            return sorted(filter(is_name, (str(path).partition("/")[0] for path in paths)))
        return []

    def read(self, file: str) -> str:
        """A small file's contents, of which a bounded part is read; empty if there is none."""
        self._files.invalidate_cache()
        with suppress(FileNotFoundError):
            return bytes(self._files.cat_file(file, end=MOST_TEXT)).decode(errors="replace").strip()
        return ""

    def meta(self, name: str) -> dict[str, Any]:
        """The contents of a checkpoint's `checkpoint.json`; empty if they cannot be read."""
        with suppress(ValueError):
            return parse_meta(self.read(f"{name}/{META_NAME}"))
        return {}

    def belongs_to(self, *, other_than: str = "") -> str:
        """The id of the run that wrote the newest checkpoint which is not `other_than`'s; empty: there is none."""
        ids = (valid_run_id(self.meta(name).get("run_id")) for name in reversed(self.names()))
        return next((run_id for run_id in ids if is_foreign(run_id, other_than)), "")

    def upload(self, path: Path) -> None:
        """Copy a finished checkpoint; files of an interrupted upload are kept.

        Raises:
            OSError: A file arrived with other contents.
        """
        name, files = path.name, read_meta(path)["files"]
        if self.meta(name).get("files", files) != files:
            self._files.rm_file(f"{name}/{META_NAME}")  # while its files are replaced, it is no checkpoint
        for file, entry in files.items():
            if self._sha256(f"{name}/{file}") != entry["sha256"]:
                self._make_folder(f"{name}/{file}".rpartition("/")[0])
                self._files.put_file(str(path / file), f"{name}/{file}")
                if self._sha256(f"{name}/{file}") != entry["sha256"]:
                    raise OSError(f"{file} arrived with other contents")
        self._files.pipe_file(f"{name}/{META_NAME}", (path / META_NAME).read_bytes())
        self.point(LATEST_NAME, name)

    def point(self, file: str, name: str) -> None:
        """Write the name of a checkpoint into `latest` or `best`."""
        self._files.pipe_file(file, f"{name}\n".encode())

    def remove(self, name: str) -> None:
        """Remove a checkpoint, `checkpoint.json` first, so that no part of it looks complete."""
        self._files.invalidate_cache()
        for path in (f"{name}/{META_NAME}", name):
            if self._files.exists(path):
                self._files.rm(path, recursive=True)

    def download(self, name: str, folder: Path, on_event: Callable[[str], None]) -> str:
        """Copy a checkpoint to `folder`/`name`, and return what is wrong with it, or an empty string."""
        temporary, meta = folder / f".{name}", self.meta(name)
        if wrong := wrong_meta(meta, name):
            return wrong
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            for file in meta["files"]:
                (temporary / file).parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{name}/{file}", str(temporary / file), callback=self._downloaded)
                flush(temporary / file)
                self._downloaded.call()
            write_json(temporary / META_NAME, meta, durable=True)
            if not (problem := damage(temporary)):
                publish(temporary, folder / name, valid_run_id(meta.get("run_id")), on_event)
                flush(folder)
            return problem or ""
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _make_folder(self, path: str) -> None:
        if self._has_folders:
            self._files.makedirs(path, exist_ok=True)

    def _sha256(self, path: str) -> str:
        self._files.invalidate_cache()
        with suppress(FileNotFoundError), self._files.open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return ""


class Uploads:
    """Uploads the newest finished checkpoint in the background, one at a time. Rank 0 only.

    If checkpoints are finished faster than they are uploaded, those in between are skipped. Checkpoints that `outdated`
    returns (`layout.outdated` with the run's settings) are removed, except the best one and `resumed_from`, which the
    run continues. `on_event` is called with a message for every upload.
    """

    def __init__(
        self,
        mirror: Mirror,
        *,
        outdated: Callable[..., list[str]],
        run_id: str,
        resumed_from: str,
        on_event: Callable[[str], None],
    ) -> None:
        self._mirror, self._outdated, self._on_event = mirror, outdated, on_event
        self._run_id, self._resumed_from = run_id, resumed_from
        self._changed = threading.Condition()
        self._waiting: list[Path] = []
        """The checkpoint that is uploaded, and the next one."""
        self._count = self._failures = 0

    @property
    def busy(self) -> set[Path]:
        """Checkpoints that must not be deleted now."""
        with self._changed:
            return set(self._waiting)

    def offer(self, path: Path) -> None:
        """Upload a finished checkpoint as soon as the current upload ends."""
        with self._changed:
            self._waiting[1:] = [path]
            if self._waiting == [path]:
                threading.Thread(target=self._work, name="mirror", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until everything is uploaded or given up, and return whether that was in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout=seconds)

    def abandon_after(self, step: int, *, seconds: float) -> None:
        """Remove checkpoints of steps after `step`, to which the run has rolled back.

        An upload that is under way is waited for, `seconds` at most.
        """
        try:
            if not self.wait(seconds):
                raise TimeoutError(f"an upload has taken more than {seconds:.0f} s")
            if other := self._mirror.belongs_to(other_than=self._run_id):
                raise OSError(f"it belongs to run {other}")
            names = self._mirror.names()
            for name in names:
                if step_of(Path(name)) > step:
                    self._mirror.remove(name)
            if older := [name for name in names if step_of(Path(name)) <= step]:
                self._mirror.point(LATEST_NAME, older[-1])
        except Exception as error:  # of any client library
            self._on_event(
                f"The mirror {self._mirror.url} could not be rolled back ({error}): remove later steps there."
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                path = self._waiting[0]
            self._on_event(self._upload(path))
            with self._changed:
                del self._waiting[0]
                self._changed.notify_all()
                if not self._waiting:
                    return

    def _upload(self, path: Path) -> str:
        """Upload a checkpoint and remove older ones. Returns what to report: a failure must not end the training."""
        self._count += 1
        try:
            if other := self._mirror.belongs_to(other_than=self._run_id):
                raise OSError(f"it belongs to run {other}, and this is run {self._run_id}: choose another mirror")
            self._mirror.upload(path)
            if best_checkpoint(path.parents[1]) == path:
                self._mirror.point(BEST_NAME, path.name)
            held, names = {self._resumed_from, self._mirror.read(BEST_NAME)}, self._mirror.names()
            left = {name for name in self._mirror.names(finished=False) if name < path.name} - set(names)
            for name in {*left, *self._outdated(names, written=path.name, is_good=self._is_good, held=held)}:
                self._mirror.remove(name)
        except Exception as error:  # of any client library, which has tried again
            self._failures += 1
            return (
                f"Checkpoint {path.name} is NOT in the mirror {self._mirror.url} ({type(error).__name__}: {error}). "
                f"{self._failures} of {self._count} uploads have failed since the start. Training continues."
            )
        return f"Checkpoint {path.name} is in the mirror."

    def _is_good(self, name: str) -> bool:
        return not wrong_meta(self._mirror.meta(name), name)


def refuse_taken(mirror: Mirror, *, resume: str | None, step: int, world: World, minutes: float) -> None:
    """Refuse to start at a step if the mirror is another run's, or has later steps, which would stay the newest there.

    Args:
        mirror: The run's.
        resume: What the run continues from; None: it is new.
        step: The step at which it starts; -1: it is new.
        world: The ranks; collective.
        minutes: As for `work_on_main`.

    Raises:
        UserError: It is, it has, or it cannot be written and read. On every rank.
    """

    def work() -> str:
        later = [name for name in mirror.names() if step_of(Path(name)) > step]
        foreign = _foreign(mirror, run_id_of(mirror.run)) if resume else ""
        return foreign or (taken_by(f"The mirror {mirror.url}", later, resume) if later else "")

    _on_main(work, mirror, world=world, minutes=minutes)


def fetch_newest(mirror: Mirror, *, world: World, on_event: Callable[[str], None], minutes: float) -> None:
    """Download the mirror's newest intact checkpoint and its best one, unless the run's folder has one that is as new.

    A folder without a run continues the mirror's. `on_event` is called with a message for every checkpoint that is
    downloaded or skipped. Collective; rank 0 downloads. `minutes`: as for `work_on_main`.

    Raises:
        UserError: The mirror cannot be written and read, or belongs to another run. On every rank.
    """

    def work() -> str:
        run_id = run_id_of(mirror.run) or mirror.belongs_to()
        own = (path for path in reversed(finished_checkpoints(mirror.run)) if not is_foreign(id_in(path), run_id))
        folder, here = mirror.run / FOLDER_NAME, next((step_of(path) for path in own if not damage(path)), -1)
        if foreign := _foreign(mirror, run_id):
            return foreign
        for name in reversed([name for name in mirror.names() if step_of(Path(name)) > here]):
            if problem := mirror.download(name, folder, on_event):
                on_event(f"Checkpoint {name} of the mirror is damaged and was skipped: {problem}")
                continue
            write_text(folder / LATEST_NAME, f"{name}\n", durable=True)
            on_event(f"Checkpoint {name} was downloaded from the mirror {mirror.url}.")
            best = mirror.read(BEST_NAME)
            if best == name or (is_name(best) and not mirror.download(best, folder, on_event)):
                write_text(folder / BEST_NAME, f"{best}\n", durable=True)
            break
        return ""

    _on_main(work, mirror, world=world, minutes=minutes)


def _foreign(mirror: Mirror, run_id: str) -> str:
    """Why the run `run_id` cannot use a mirror that belongs to another one; empty if there is no other."""
    which = f"is run {run_id}" if run_id else "is a new one; --resume latest continues that run"
    advice = "Choose another name for the folder `output`, or another checkpoint.mirror."
    other = mirror.belongs_to(other_than=run_id)
    return f"The mirror {mirror.url} belongs to run {other}, and {mirror.run} {which}. {advice}" if other else ""


def _on_main(work: Callable[[], str], mirror: Mirror, *, world: World, minutes: float) -> None:
    """Do on rank 0 what returns why the run cannot use its mirror, and raise that on every rank. Collective."""

    def problem() -> str:
        try:
            mirror.check()
            return work()
        except Exception as error:  # of any client library
            said = str(error) or f"it has not answered for {ANSWER_SECONDS:.0f} s"
            return (
                f"checkpoint.mirror {mirror.url} cannot be used ({type(error).__name__}: {said}): check the address, "
                "the credentials and the right to write, or start with checkpoint.mirror=null."
            )

    world.raise_together(work_on_main(problem, world=world, minutes=minutes) or "")
