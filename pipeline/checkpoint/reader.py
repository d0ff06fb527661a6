"""Finding, verifying and opening checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.checkpoint.layout import (
    ADAPTERS_NAME,
    MOMENTS_NAME,
    OBJECTIVE_NAME,
    id_in,
    run_id_of,
    wrong_meta,
)
from pipeline.distributed.world import World, lost_contact
from pipeline.errors import UserError, in_a_line, is_out_of_memory, too_many_files
from pipeline.files import sha256_of
from pipeline.model.finetuning import read_adapters
from pipeline.model.model_folder import LOGIT_KEYS, WEIGHTS_NAME, load_tensors
from pipeline.run_files import (
    EMA_NAME,
    FOLDER_NAME,
    META_NAME,
    checkpoint_folders,
    is_name,
    name_of,
    read_meta,
    step_of,
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, made by `open_checkpoint`."""

    path: Path
    meta: Mapping[str, Any]
    """The contents of `checkpoint.json`."""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, contents that no run has written are a `UserError`: a stranger's files have right hashes, too."""
        try:
            yield
        except UserError:
            raise
        except (LookupError, ValueError, RuntimeError, SafetensorError) as error:
            if lost_contact(error) or is_out_of_memory(error) or too_many_files(error):
                raise
            raise UserError(
                f"{self.path} cannot be restored: a file in it is damaged, or not of a run with these settings "
                f"({type(error).__name__}: {in_a_line(error)}). Resume from an earlier checkpoint, or start a new run; "
                "--debug shows where it failed."
            ) from error

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def run_id(self) -> str:
        """The run that wrote it."""
        return str(self.meta["run_id"])

    @property
    def batch_size(self) -> int:
        """Samples of each of the run's steps."""
        return int(self.meta["config"]["batch_size"])

    def weights(self) -> dict[str, Tensor]:
        """fp32 weights by open_clip's names, without the logit scale and bias."""
        return _weights_in(self.path)

    def ema(self) -> dict[str, Tensor] | None:
        """The average of the weights, like `weights`; None if the run kept none."""
        return _weights_in(self.path / EMA_NAME) if (self.path / EMA_NAME).is_dir() else None

    def adapters(self) -> dict[str, Tensor] | None:
        """LoRA's matrices by the names of the parameters; None if the run trains the weights themselves."""
        return None if self.meta.get("adapters_of") is None else read_adapters(self.path / ADAPTERS_NAME)

    def moments(self) -> dict[tuple[str, str], Tensor]:
        """The optimizer's state by (parameter name, key), for example `("visual.proj", "exp_avg")`."""
        state = load_tensors(self.path / MOMENTS_NAME)
        return {(name, key): value for (key, _, name), value in ((k.partition("/"), v) for k, v in state.items())}

    def objective(self) -> dict[str, Tensor]:
        """The objective's state dict, without per-sample tables."""
        return load_tensors(self.path / OBJECTIVE_NAME)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a per-sample table, whichever ranks wrote them.

        Raises:
            UserError: The checkpoint lacks some of these rows.
        """
        pieces: list[tuple[int, Tensor]] = []
        for file, entry in self.meta["files"].items():  # at 1,024 ranks, each would otherwise open those of all
            rows = entry.get("rows")
            if rows is None or rows["table"] != name:
                continue
            first = rows["first"]
            low, high = max(start, first), min(stop, first + rows["count"])
            if low < high:
                with safe_open(self.path / file, framework="pt") as opened:
                    pieces.append((low, opened.get_slice(f"{name}/{first}")[low - first : high - first]))
        pieces.sort(key=lambda piece: piece[0])
        table = torch.cat([piece for _, piece in pieces]) if pieces else torch.empty(0)
        if len(table) != stop - start:
            raise UserError(
                f"{self.path} has {len(table)} of the rows [{start}, {stop}) of the table {name!r}: "
                "was it written by a run on another dataset?"
            )
        return table


def _weights_in(folder: Path) -> dict[str, Tensor]:
    state = load_tensors(folder / WEIGHTS_NAME)
    return {name: value for name, value in state.items() if name not in LOGIT_KEYS}


def open_checkpoint(path: Path, *, world: World | None = None) -> Checkpoint:
    """Open a checkpoint's folder, and compare every file with `checkpoint.json`. The ranks of `world`, by default this
    process alone, share the files and get the same answer: a `UserError` with what `damage` says on any rank.
    """
    world = world or World()
    problems = world.gather_objects(damage(path, rank=world.rank, ranks=world.size))
    if problem := next(filter(None, problems), ""):
        raise UserError(problem)
    return Checkpoint(path, read_meta(path))


def damage(path: Path, *, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with a checkpoint's folder, naming the file; empty when every file of this rank's share has the
    size and SHA-256 that `checkpoint.json` lists."""
    try:
        meta = read_meta(path)
    except (OSError, ValueError) as error:
        return f"{META_NAME} cannot be read ({error})."
    if problem := wrong_meta(meta, path.name):
        return problem
    by_size = sorted(meta["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    for name, entry in by_size[rank::ranks]:
        file = path / name
        if not file.is_file():
            return f"{name} is missing."
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['bytes']}."
        if sha256_of(file) != entry["sha256"]:
            return f"the contents of {name} do not match their SHA-256."
    return ""


def agreed_checkpoint(
    run: Path,
    resume: str | None,
    *,
    world: World,
    on_event: Callable[[str], None],
    not_after: int | None = None,
) -> Checkpoint | None:
    """The checkpoint that all ranks resume from, which they verify together. Collective.

    `resume` is "latest" for the newest undamaged checkpoint, up to step `not_after` (None if there is none at all); or
    the folder of one; None starts a new run. `on_event` gets a message on rank 0 for every checkpoint that is skipped.

    Raises:
        UserError: The named folder is damaged or not a checkpoint, "latest" finds only damaged ones, or the run would
            not start from the newest checkpoint of its folder. On every rank.
    """
    if resume == "latest":
        return _newest(run, world=world, on_event=on_event, not_after=not_after)
    checkpoint = None
    if resume is not None:
        try:
            checkpoint = open_checkpoint(Path(resume), world=world)
        except UserError as error:
            hint = "" if is_name(Path(resume).name) else f" Give `latest`, or a folder RUN/{FOLDER_NAME}/{name_of(0)}."
            raise UserError(f"Cannot resume from {resume}: {error}{hint}") from error
    step = checkpoint.step if checkpoint else -1

    def check() -> None:
        run_id = run_id_of(run)
        paths = [path for path in checkpoint_folders(run) if step_of(path) > step]
        if later := [path.name for path in paths if resume is None or id_in(path) in ("", run_id)]:
            raise UserError(taken_by(str(run), later, resume))

    world.work_on_main(check)  # others may see another state of the folder
    return checkpoint


def _newest(run: Path, *, world: World, on_event: Callable[[str], None], not_after: int | None) -> Checkpoint | None:
    paths = [path for path in reversed(checkpoint_folders(run)) if not_after is None or step_of(path) <= not_after]
    # A rank may see another state of a shared folder for a moment.
    paths, run_id = world.gather_objects((paths, run_id_of(run)))[0]
    for path in paths:
        try:
            checkpoint = open_checkpoint(path, world=world)
        except UserError as error:
            if world.is_main:
                on_event(f"Checkpoint {path.name} is damaged and was skipped: {error}")
            continue
        if checkpoint.run_id == run_id:
            return checkpoint
        if world.is_main:
            on_event(
                f"Checkpoint {path.name} in {path.parent} was written by another run ({checkpoint.run_id}; this one is "
                f"{run_id}) and was skipped. --resume {path} with another output continues it."
            )
    if paths:
        raise UserError(
            f"All {len(paths)} checkpoints in {run} are damaged, or of another run. Start again with a new output "
            "folder."
        )
    return None


def taken_by(place: str, later: list[str], resume: str | None) -> str:
    """Why a run cannot start in, or copy its checkpoints to, a place that has later checkpoints."""
    if resume is None:
        return f"{place} has checkpoints: add --resume latest to continue, or choose another output."
    return (
        f"{place} has later checkpoints than {resume} ({', '.join(later)}), which --resume latest would prefer to "
        f"those of this run: choose another output, with --resume {resume}, or remove them."
    )
