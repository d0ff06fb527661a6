"""Checkpoints: one folder per step, verified by hash, independent of ZeRO stage and number of ranks.

    RUN/checkpoints/step-00000500/
        open_clip_config.json, open_clip_model.safetensors   the model, as open_clip loads it (fp32 master weights)
        moments.safetensors       the encoders' optimizer state by parameter name
        objective.safetensors     temperature, normalizer network, ...
        rows-R-I.safetensors      per-sample state, files of one block each from every rank
        checkpoint.json           step, samples, data position, recipe, versions; size and SHA-256 of every file

A checkpoint is written to a hidden folder by a background thread, hashed, flushed to disk and renamed into place; the
file `latest` moves last. Nothing is ever unpickled. Ranks share the run's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.architectures import Architecture
from pipeline.model.model_folder import save_open_clip

META_NAME = "checkpoint.json"
FORMAT, VERSION = "neuclip-checkpoint", 1
PREFIX = "step-"


@section
class CheckpointConfig:
    """When to save and what to keep. `every` and `keep_every` count steps."""

    every: int = Field(default=1000, ge=1)
    keep_last: int = Field(default=3, ge=1)
    keep_every: int | None = Field(default=None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this, for ever (evaluation over training)."""
    blocking: bool = False
    """Wait for the disk before going on."""


@dataclass(frozen=True)
class Snapshot:
    """The complete state of a run at a step, on the CPU. Tensors other than `rows` are needed on rank 0 only."""

    step: int
    weights: Mapping[str, Tensor]
    moments: Mapping[tuple[str, str], Tensor]
    counter: int
    objective: Mapping[str, Tensor]
    rows: Mapping[str, tuple[int, Iterable[Tensor]]]
    """Per-sample state of this rank: first sample id, and rows in blocks that are asked for as they are written."""
    logit: tuple[float, float]
    facts: Mapping[str, Any]
    """JSON-able: samples seen, data position, resolved recipe, versions."""


class CheckpointWriter:
    """Writes snapshots in the background, one at a time. `on_event` hears what became of each."""

    def __init__(
        self,
        run: Path,
        *,
        config: CheckpointConfig,
        world: World,
        architecture: Architecture,
        on_event: Callable[[str], None],
    ) -> None:
        self.folder = run / "checkpoints"
        self._config, self._world, self._architecture, self._on_event = config, world, architecture, on_event
        self._thread: threading.Thread | None = None
        self._seconds_to_wait = 600.0
        if world.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".*"):
                shutil.rmtree(leftover, ignore_errors=True)
        world.barrier()

    def save(self, snapshot: Snapshot) -> None:
        """Start writing; every rank calls it. Waits for the previous checkpoint first."""
        self.wait()
        temporary = self.folder / f".{name_of(snapshot.step)}"
        if self._world.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._world.barrier()
        self._thread = threading.Thread(target=self._write, args=(snapshot, temporary), name="checkpoint")
        self._thread.start()
        if self._config.blocking:
            self.wait()

    def wait(self) -> None:
        """Return when no write is under way on this rank."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, temporary: Path) -> None:
        try:
            self._write_part(snapshot, temporary)
            if self._world.is_main:
                self._publish(snapshot, temporary)
        except Exception as error:  # the run goes on: a full disk must not end a week of training
            if not self._world.is_main:
                with contextlib.suppress(OSError):  # rank 0 tells
                    (temporary / f"failed-{self._world.rank:05d}").write_text(f"{type(error).__name__}: {error}")
            else:
                shutil.rmtree(temporary, ignore_errors=True)
                self._on_event(
                    f"Checkpoint {name_of(snapshot.step)} could NOT be written ({type(error).__name__}: {error}). "
                    "Training goes on; older checkpoints are intact. Free some space or check the file system."
                )

    def _write_part(self, snapshot: Snapshot, temporary: Path) -> None:
        rank = self._world.rank
        written: list[Path] = []
        for name, (start, blocks) in snapshot.rows.items():
            for rows in blocks:
                written.append(temporary / f"rows-{rank:05d}-{len(written):05d}.safetensors")
                save_file({f"{name}/{start}": rows}, written[-1])
                start += len(rows)
        if self._world.is_main:
            scale, bias = snapshot.logit
            written += save_open_clip(
                temporary,
                state=snapshot.weights,
                architecture=self._architecture,
                logit_scale=scale,
                logit_bias=bias or None,
            )
            written.append(temporary / "moments.safetensors")
            save_file({f"{key}/{name}": value for (name, key), value in snapshot.moments.items()}, written[-1])
            written.append(temporary / "objective.safetensors")
            save_file({name: value.contiguous() for name, value in snapshot.objective.items()}, written[-1])
        entries = {path.name: {"bytes": path.stat().st_size, "sha256": _flush_and_hash(path)} for path in written}
        done = temporary / f"done-{rank:05d}.json"
        done.with_suffix(".tmp").write_text(json.dumps(entries))
        os.replace(done.with_suffix(".tmp"), done)

    def _publish(self, snapshot: Snapshot, temporary: Path) -> None:
        """Wait for the other ranks' files, write the list of them all, and move everything into place."""
        files: dict[str, Any] = {}
        for rank in range(self._world.size):
            done = temporary / f"done-{rank:05d}.json"
            self._await(done, failed=temporary / f"failed-{rank:05d}")
            files.update(json.loads(done.read_text()))
            done.unlink()
        meta = {
            "format": FORMAT,
            "version": VERSION,
            "step": snapshot.step,
            "counter": snapshot.counter,
            **snapshot.facts,
            "files": files,
        }
        path = temporary / META_NAME
        path.write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
        _flush_and_hash(path)
        _flush_folder(temporary)
        final = self.folder / name_of(snapshot.step)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _write_atomically(self.folder / "latest", final.name + "\n")
        _flush_folder(self.folder)
        self._prune()
        size = sum(entry["bytes"] for entry in files.values())
        self._on_event(f"Checkpoint {final.name} written ({size / 1e6:.1f} MB).")

    def _await(self, path: Path, *, failed: Path) -> None:
        deadline = time.monotonic() + self._seconds_to_wait
        while not path.exists():
            if failed.exists():
                raise OSError(f"rank {failed.name.removeprefix('failed-').lstrip('0')}: {failed.read_text()}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path.name} did not appear: another rank failed, or the run's folder is not shared"
                )
            time.sleep(0.02)

    def _prune(self) -> None:
        names = [path for path in self.folder.glob(f"{PREFIX}*") if path.is_dir()]
        for path in sorted(names)[: -self._config.keep_last]:
            keep = self._config.keep_every
            if keep is None or step_of(path) % keep:
                shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    meta: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    def weights(self) -> dict[str, Tensor]:
        """fp32 weights by open_clip's names, without the logit scale and bias."""
        state = load_file(self.path / "open_clip_model.safetensors")
        return {name: value for name, value in state.items() if name not in ("logit_scale", "logit_bias")}

    def moments(self) -> dict[tuple[str, str], Tensor]:
        state = load_file(self.path / "moments.safetensors")
        return {(name, key): value for (key, _, name), value in ((k.partition("/"), v) for k, v in state.items())}

    def objective(self) -> dict[str, Tensor]:
        return load_file(self.path / "objective.safetensors")

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a per-sample table, whichever ranks wrote them. Raises: UserError when some lack."""
        pieces: list[tuple[int, Tensor]] = []
        for path in sorted(self.path.glob("rows-*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    table, _, first = key.rpartition("/")
                    if table == name:
                        view = file.get_slice(key)
                        low, high = max(start, int(first)), min(stop, int(first) + view.get_shape()[0])
                        if low < high:
                            pieces.append((low, view[low - int(first) : high - int(first)]))
        pieces.sort(key=lambda piece: piece[0])
        rows = torch.cat([piece for _, piece in pieces]) if pieces else torch.empty(0)
        if len(rows) != stop - start:
            raise UserError(f"{self.path} holds {len(rows)} of the rows [{start}, {stop}) of {name!r}: other dataset?")
        return rows


def find_checkpoint(
    run: Path, which: str, *, on_event: Callable[[str], None], not_after: int | None = None
) -> Checkpoint | None:
    """The checkpoint to resume from: `latest` takes the newest good one; anything else names a folder.

    Every file's size and hash are checked. Damaged checkpoints are reported to `on_event` and passed over.
    Args: not_after: `latest` passes over later steps than this one.
    Raises: UserError when a folder was named and is damaged or no checkpoint, or `latest` finds only damaged ones.
    """
    if which != "latest":
        path = Path(which)
        problem = damage(path)
        if problem:
            raise UserError(f"Cannot resume from {path}: {problem}")
        return Checkpoint(path, _read_meta(path))
    found = sorted((run / "checkpoints").glob(f"{PREFIX}*"), reverse=True)
    found = [path for path in found if not_after is None or step_of(path) <= not_after]
    for path in found:
        problem = damage(path)
        if problem is None:
            return Checkpoint(path, _read_meta(path))
        on_event(f"Checkpoint {path.name} is damaged and passed over: {problem}")
    if found:
        raise UserError(f"All {len(found)} checkpoints below {run} are damaged. Start again with a new output folder.")
    return None


def abandon_after(run: Path, step: int) -> None:
    """Remove checkpoints of later steps than `step`: the run went back to it, and would resume from them. One rank."""
    folder = run / "checkpoints"
    _write_atomically(folder / "latest", name_of(step) + "\n")
    for path in folder.glob(f"{PREFIX}*"):
        if step_of(path) > step:
            shutil.rmtree(path, ignore_errors=True)
    _flush_folder(folder)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, naming the file; None when every file is as it was written."""
    try:
        meta = _read_meta(path)
    except (OSError, ValueError) as error:
        return f"{META_NAME} cannot be read ({error})."
    if meta.get("format") != FORMAT or meta.get("version") != VERSION:
        return f"it says format {meta.get('format')!r} version {meta.get('version')!r}, not {FORMAT!r} {VERSION}."
    for name, entry in meta["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing."
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}."
        if sha256(file) != entry["sha256"]:
            return f"the contents of {name} do not match their SHA-256."
    return None


def name_of(step: int) -> str:
    return f"{PREFIX}{step:08d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_meta(path: Path) -> dict[str, Any]:
    meta = json.loads((path / META_NAME).read_text(encoding="utf-8"))
    if not isinstance(meta, dict):
        raise ValueError("not a mapping")
    return meta


def _flush_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return sha256(path)


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    _flush_and_hash(temporary)
    os.replace(temporary, path)


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def finished_checkpoints(run: Path) -> list[Path]:
    """Folders of finished checkpoints of a run, oldest first; not verified."""
    return sorted(path for path in (run / "checkpoints").glob(f"{PREFIX}*") if (path / META_NAME).is_file())
