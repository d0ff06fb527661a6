"""Writing checkpoints in the background.

A checkpoint is written to a hidden folder by a background thread on every rank, hashed, flushed to disk and renamed
into place by rank 0; the file `latest` is replaced last. The ranks must share the run's folder. The module `layout`
lists the files.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from pipeline.checkpoint.layout import (
    ADAPTERS_NAME,
    BEST_NAME,
    LATEST_NAME,
    MOMENTS_NAME,
    OBJECTIVE_NAME,
    best_checkpoint,
    id_in,
    outdated,
    publish,
    remove,
    run_id_of,
    sweep,
    write_meta,
)
from pipeline.checkpoint.mirror import Mirror
from pipeline.checkpoint.reader import damage
from pipeline.config import section
from pipeline.distributed.world import WRITER, World
from pipeline.files import flush, sha256_of, write_json, write_text
from pipeline.model.architectures import Architecture
from pipeline.model.finetuning import Adapters
from pipeline.model.model_folder import save_open_clip, save_tensors
from pipeline.run_files import (
    EMA_NAME,
    FOLDER_NAME,
    RUN_ID_NAME,
    checkpoint_folders,
    finished_checkpoints,
    name_of,
    new_run_id,
    read_run_id,
    step_of,
)

SECONDS_TO_WAIT = 600.0
"""For the files of another rank."""


@section
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = Field(default=1000, ge=1)
    """Steps between checkpoints; the last step always writes one."""
    keep_last: int = Field(default=3, ge=1)
    """How many of the newest intact checkpoints are kept, beside the best one and the one that the run has resumed
    from."""
    keep_every: int | None = Field(default=None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this, for example to evaluate them later."""
    mirror: str | None = None
    """Where finished checkpoints are copied in the background, for machines whose disks are lost with them:
    `s3://bucket/folder` (`pip install 'neuclip[s3]'`), `hf://OWNER/NAME` (a repository of the Hugging Face hub) or any
    other URL that fsspec supports. The run's copy is in a folder with the name of the run's, and as many checkpoints
    are kept there. `--resume latest` on a machine without newer checkpoints downloads the newest one."""


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a run at a step, on the CPU. Tensors other than `rows` are needed on rank 0 only."""

    step: int
    weights: Mapping[str, Tensor]
    moments: Mapping[tuple[str, str], Tensor]
    counter: int
    """Updates that the optimizer has made."""
    objective: Mapping[str, Tensor]
    rows: Mapping[str, tuple[int, Iterable[Tensor]]]
    """Per-sample state of this rank by table: the first sample id, and blocks of rows, read as they are written."""
    logit: tuple[float, float | None]
    """log(1/tau), and SigLIP's bias or 0."""
    facts: Mapping[str, Any]
    """JSON-able: samples seen, data position, resolved recipe, versions."""
    ema: Mapping[str, Tensor] | None = None
    """The average of the weights; None without one."""
    adapters: Adapters | None = None
    """LoRA's; `weights` include them."""
    best: bool = False
    """Its validation loss is the lowest so far."""
    last_good: int | None = None
    """The newest checkpoint up to this step, and all later ones, are kept: the run may have to roll back to it, and the
    later ones are not known to be good yet. None: it never rolls back."""

    @property
    def not_finite(self) -> str:
        """The first of the weights that has NaN or infinity in it; else empty."""
        return next((name for name, value in self.weights.items() if not value.isfinite().all()), "")


class CheckpointWriter:
    """Writes snapshots in threads, one at a time, to the run's folder, which the ranks share, then to the mirror.

    `on_event` gets a message on rank 0 for every checkpoint that was written or failed. `resumed_from`, from which the
    run continues, is never removed. `finish` waits for an upload that is under way up to `mirror_minutes`.
    """

    def __init__(
        self,
        run: Path,
        *,
        config: CheckpointConfig,
        world: World,
        architecture: Architecture,
        on_event: Callable[[str], None],
        resumed_from: Path | None = None,
        mirror_minutes: float = 20.0,
    ) -> None:
        self.problem = ""
        """Why the last checkpoint could not be written; empty if it could. Known on rank 0, after `wait`."""
        self.saved_step = 0
        """The step of the last checkpoint that is on disk. Known on rank 0."""
        self.run, self.folder = run, run / FOLDER_NAME
        self._config, self._world, self._architecture, self._on_event = config, world, architecture, on_event
        self._thread: threading.Thread | None = None
        self._written = threading.Event()
        """Set unless a thread is writing a checkpoint: threads may still upload earlier ones."""
        self._written.set()
        self._mirror_seconds = 60 * mirror_minutes
        self._resumed_from = resumed_from.name if resumed_from and resumed_from.parent == self.folder else ""
        self._verified = {self._resumed_from}
        """Names of the checkpoints of this folder that were verified."""
        self._outdated = partial(outdated, keep_last=config.keep_last, keep_every=config.keep_every)
        self.run_id = (run_id_of(run) or new_run_id()) if world.is_main else ""
        """The run's id. Known on rank 0."""
        self._mirror: Mirror | None = None
        self._mirror_lock, self._uploading = threading.Lock(), ""
        """Held by the thread that uploads; the name of the checkpoint that it uploads."""
        self._newest = self._uploaded = Path()
        """The last checkpoint to upload, and the last one that was."""
        self._begun = False

    def begin(self) -> None:
        """Make the folder and record the run's id; before, nothing is written. Call it on rank 0; `save` does, too."""
        if self._begun:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if read_run_id(self.run) != self.run_id:
            write_text(self.run / RUN_ID_NAME, self.run_id + "\n", durable=True)
        self._begun = True
        if self._config.mirror:
            self._mirror = Mirror(self._config.mirror, self.run)

    def save(self, snapshot: Snapshot) -> None:
        """Start writing, after the previous checkpoint is finished. Collective."""
        self.wait()
        temporary = self.folder / f".{name_of(snapshot.step)}"
        refused: OSError | None = None
        if self._world.is_main:
            try:
                self.begin()
                sweep(self.folder)
                temporary.mkdir(parents=True)
            except OSError as error:
                refused = error
        self._world.barrier()
        self._written.clear()
        try:
            self._start(self._write, [snapshot], temporary, refused)
        except RuntimeError:  # there are no more threads or addresses: the next step waits for it
            self._write([snapshot], temporary, refused)

    def wait(self) -> None:
        """Return when this rank is not writing."""
        if self._thread is not None:
            self._written.wait()

    def finish(self) -> None:
        """Return when this rank is not writing, and the mirror has the last checkpoint, or has taken too long."""
        self.wait()
        if self._thread is not None:
            self._thread.join(self._mirror_seconds)
            if self._thread.is_alive() and self._mirror_seconds:
                minutes, self._mirror_seconds = self._mirror_seconds / 60, 0.0  # `finish` does not wait again
                self._on_event(f"The upload of the last checkpoint was not finished in {minutes:g} minutes.")

    def give_up(self) -> None:
        """Wait for nothing any more, not in `finish` either: the process ends."""
        self._thread = None

    def abandon_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, to which the run has rolled back. Call it on rank 0."""
        self.begin()
        write_text(self.folder / LATEST_NAME, name_of(step) + "\n", durable=True)
        for path in checkpoint_folders(self.run):  # otherwise `--resume latest` would continue from them
            if step_of(path) > step and id_in(path) in ("", self.run_id):
                remove(path)
        if best_checkpoint(self.run) is None:
            (self.folder / BEST_NAME).unlink(missing_ok=True)
        flush(self.folder)
        if self._mirror is not None:
            self._newest = self.folder / name_of(step)
            self._start(self._upload, self._newest)  # which removes later ones from the mirror

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name=WRITER)
        thread.start()
        self._thread = thread

    def _write(self, snapshots: list[Snapshot], temporary: Path, refused: OSError | None) -> None:
        """Write the only one of `snapshots`, which nothing else holds: it is freed before the upload."""
        snapshot, final = snapshots.pop(), None
        try:
            self.problem = ""
            if refused is not None:
                raise refused
            self._write_part(snapshot, temporary)
            if self._world.is_main:
                final = self._publish(snapshot, temporary)
        except Exception as error:  # the run continues: a full disk must not end a week of training
            if not self._world.is_main:
                with contextlib.suppress(OSError):  # rank 0 reports it
                    (temporary / f"failed-{self._world.rank:05d}").write_text(f"{type(error).__name__}: {error}")
            else:
                shutil.rmtree(temporary, ignore_errors=True)
                self.problem = f"{type(error).__name__}: {error}"
                self._on_event(
                    f"Checkpoint {name_of(snapshot.step)} could NOT be written ({self.problem}). "
                    "Older checkpoints are intact. Free some space or check the file system."
                )
        finally:
            self._written.set()
            del snapshot
        if self._mirror is not None:
            self._upload(final or self._newest)

    def _upload(self, path: Path) -> None:
        """Copy a checkpoint to the mirror after the upload before, unless a newer one waits for that, too."""
        with self._mirror_lock:
            self._uploading = path.name
            if path == self._newest != self._uploaded and self._mirror is not None:
                update = partial(self._mirror.update, run_id=self.run_id, resumed_from=self._resumed_from)
                self._on_event(update(path, outdated=self._outdated))
                self._uploaded = path
            self._uploading = ""

    def _write_part(self, snapshot: Snapshot, temporary: Path) -> None:
        """Write this rank's files, and a list of them with their sizes and hashes."""
        rank = self._world.rank
        written: list[Path] = []
        held: dict[str, Any] = {}
        for name, (start, blocks) in snapshot.rows.items():
            for rows in blocks:
                written.append(temporary / f"rows-{rank:05d}-{len(written):05d}.safetensors")
                save_tensors({f"{name}/{start}": rows}, written[-1])
                held[written[-1].name] = {"rows": {"table": name, "first": start, "count": len(rows)}}
                start += len(rows)
        if self._world.is_main:
            written += self._write_replicated(snapshot, temporary)
        entries = {}
        mode = temporary.stat().st_mode & 0o666  # as the umask says; safetensors creates files that only we can read
        for path in written:
            path.chmod(mode)
            flush(path)
            entry = {"bytes": path.stat().st_size, "sha256": sha256_of(path), **held.get(path.name, {})}
            entries[path.relative_to(temporary).as_posix()] = entry
        write_json(temporary / f"done-{rank:05d}.json", entries)

    def _write_replicated(self, snapshot: Snapshot, temporary: Path) -> list[Path]:
        """Write the state that all ranks share, and return the files."""
        written = []
        for folder, state in ((temporary, snapshot.weights), (temporary / EMA_NAME, snapshot.ema)):
            if state is not None:
                folder.mkdir(exist_ok=True)
                written += save_open_clip(folder, state=state, architecture=self._architecture, logit=snapshot.logit)
        moments, objective = temporary / MOMENTS_NAME, temporary / OBJECTIVE_NAME
        save_tensors({f"{key}/{name}": value for (name, key), value in snapshot.moments.items()}, moments)
        save_tensors({name: value.contiguous() for name, value in snapshot.objective.items()}, objective)
        if snapshot.adapters is not None:
            (temporary / ADAPTERS_NAME).mkdir()
            written += snapshot.adapters.save(temporary / ADAPTERS_NAME)
        return [*written, moments, objective]

    def _publish(self, snapshot: Snapshot, temporary: Path) -> Path:
        """Wait for the other ranks' files, write the list of them all, and rename the folder into place."""
        files: dict[str, Any] = {}
        for rank in range(self._world.size):
            deadline = time.monotonic() + SECONDS_TO_WAIT
            done, failed = temporary / f"done-{rank:05d}.json", temporary / f"failed-{rank:05d}"
            while not done.exists():
                if failed.exists():
                    raise OSError(f"rank {rank}: {failed.read_text()}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no {done.name}: another rank failed, or the run's folder is not shared")
                time.sleep(0.02)
            files.update(json.loads(done.read_text()))
            done.unlink()
        own = {"step": snapshot.step, "counter": snapshot.counter, "run_id": self.run_id}
        adapters = {"adapters_of": snapshot.adapters.base} if snapshot.adapters else {}
        write_meta(temporary, {**own, **snapshot.facts, **adapters, "files": files})
        flush(temporary)
        final = self.folder / name_of(snapshot.step)
        publish(temporary, final, self.run_id, self._on_event)
        self.saved_step = snapshot.step
        size = sum(entry["bytes"] for entry in files.values())
        self._on_event(f"Checkpoint {final.name} written ({size / 1e6:.1f} MB).")
        self._verified.add(final.name)
        with self._reported(f"`{LATEST_NAME}` does not name {final.name}; --resume latest finds it all the same"):
            write_text(self.folder / LATEST_NAME, final.name + "\n", durable=True)
        if snapshot.best:
            with self._reported(f"`{BEST_NAME}` does not name {final.name}"):
                write_text(self.folder / BEST_NAME, final.name + "\n", durable=True)
        self._newest = final
        with self._reported("older checkpoints could not be removed"):
            flush(self.folder)
            self._prune(final, last_good=snapshot.last_good)
        return final

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Report an error of the file system after which the checkpoint is still good."""
        try:
            yield
        except OSError as error:
            self._on_event(f"{what[0].upper()}{what[1:]} ({type(error).__name__}: {error}).")

    def _prune(self, written: Path, *, last_good: int | None) -> None:
        """Remove older checkpoints that the configuration does not keep, except those that a rollback may need."""

        def is_good(name: str) -> bool:
            """Whether it has been verified since the start of this process; otherwise it is verified now."""
            if name not in self._verified and not damage(self.folder / name):
                self._verified.add(name)
            return name in self._verified

        best = best_checkpoint(self.run)
        paths = {path.name: path for path in finished_checkpoints(self.run) if id_in(path) == self.run_id}
        held = {self._resumed_from, best.name if best else "", self._uploading}
        if last_good is not None:
            good = [name for name, path in paths.items() if step_of(path) <= last_good]
            held |= paths.keys() - good[:-1]
        for name in self._outdated(paths, written=written.name, is_good=is_good, held=held):
            remove(paths[name])
