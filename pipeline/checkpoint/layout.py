"""The files of a checkpoint: one folder per step, independent of ZeRO stage and number of ranks.

    RUN/checkpoints/step-00000500/
        open_clip_config.json, open_clip_model.safetensors   the model, as open_clip loads it (fp32 master weights)
        moments.safetensors       the encoders' optimizer state by parameter name
        objective.safetensors     temperature, normalizer network, ...
        ema/                      the average of the weights, if there is one, as a model folder of its own
        rows-R-I.safetensors      per-sample state of rank R, one block of rows per file
        checkpoint.json           step, samples, data position, recipe, versions; size and SHA-256 of every file, its
                                  own included
    RUN/run_id                    the run's id, which its checkpoints, mirror and heartbeats carry, too
    RUN/checkpoints/latest        name of the newest checkpoint
    RUN/checkpoints/best          name of the checkpoint with the lowest validation loss, if there is validation

A folder that has a `checkpoint.json` is finished. Folders with other names, such as `step-00000500.bak`, are left
alone. Nothing in a checkpoint is ever unpickled.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.config import first_problem
from pipeline.errors import UserError
from pipeline.files import path_below, read_bounded, write_json
from pipeline.model.finetuning import ADAPTER_FILES
from pipeline.model.model_folder import WEIGHTS_NAME
from pipeline.run_files import (
    EMA_NAME,
    FOLDER_NAME,
    META_NAME,
    MODEL_CONFIG_NAME,
    PREFIX,
    RUN_ID,
    digest_of,
    finished_checkpoints,
    is_name,
    name_of,
    read_meta,
    read_run_id,
    step_of,
    valid_run_id,
)

LATEST_NAME = "latest"
MOMENTS_NAME = "moments.safetensors"
OBJECTIVE_NAME = "objective.safetensors"
ADAPTERS_NAME = "adapters"
BEST_NAME = "best"
REPLACED = ".replaced"
"""Of hidden names: a checkpoint of the same step takes its place."""
FORMAT, VERSION = "neuclip-checkpoint", 1


def run_id_of(run: Path) -> str:
    """A run's id, from its folder or else from its newest checkpoint; empty if neither has one."""
    return read_run_id(run) or next(filter(None, map(id_in, reversed(finished_checkpoints(run)))), "")


def id_in(path: Path) -> str:
    """The id of the run that wrote a checkpoint; empty: it cannot be read."""
    try:
        return valid_run_id(read_meta(path).get("run_id"))
    except (OSError, ValueError):
        return ""


def best_checkpoint(run: Path) -> Path | None:
    """The checkpoint with the lowest validation loss; None if there is none on disk."""
    try:
        name = read_bounded(run / FOLDER_NAME / BEST_NAME).decode().strip()
    except (OSError, ValueError):
        return None
    path = run / FOLDER_NAME / name
    return path if is_name(name) and (path / META_NAME).is_file() else None


def validated_model(path: Path) -> Path:
    """The model folder in a checkpoint whose validation losses the run has: that of the average, if there is one."""
    return path / EMA_NAME if (path / EMA_NAME).is_dir() else path


_Count = Annotated[int, Field(ge=0, lt=2**53)]
"""Larger numbers fit into no tensor, or not into every JSON reader."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Rows(_Strict):
    table: str
    first: _Count
    count: _Count


class _File(_Strict):
    bytes: _Count
    sha256: str
    rows: _Rows | None = None


class _Position(_Strict):
    epoch: _Count
    batch: _Count
    order_hash: str = Field(pattern="^[0-9a-f]+$")
    corrupt: list[Annotated[tuple[str, str, _Count], Field(strict=False)]]
    proof: str
    order: dict[str, Any]
    pixels: dict[str, Any]


class _Config(_Strict):
    batch_size: Annotated[_Count, Field(ge=1)]


class _Faults(_Strict, extra="forbid"):
    skipped: _Count
    rollbacks: _Count
    in_a_row: _Count
    rolled_back_to: _Count | None


class _History(_Strict, extra="forbid"):
    best_loss: float | None
    best_step: int | None
    since_best: int
    step: int


class _Meta(_Strict):
    """What a run needs of `checkpoint.json` to continue."""

    step: _Count
    counter: _Count
    samples: _Count
    files: dict[str, _File]
    data: _Position
    config: _Config
    faults: _Faults
    validation: _History
    ema_updates: _Count = 0
    adapters_of: str = ""
    features: dict[str, dict[str, Any]] = {}
    """Not in checkpoints of version 0.2.0."""
    run_id: str = Field(pattern=f"^{RUN_ID}$")


def wrong_meta(meta: Mapping[str, Any], name: str) -> str:
    """What is wrong with the contents of the `checkpoint.json` in a folder of this name; empty if nothing is."""
    if meta.get("format") != FORMAT or meta.get("version") != VERSION:
        return f"its format is {meta.get('format')!r} version {meta.get('version')!r}, not {FORMAT!r} {VERSION}."
    if meta.get("digest") != digest_of(meta):
        return f"the contents of {META_NAME} do not match their SHA-256."
    try:
        parsed = _Meta.model_validate(dict(meta))
        for file in parsed.files:
            path_below(Path(), file, what=f"A file in {META_NAME}")
    except ValidationError as error:
        return f"{first_problem(error, file=META_NAME)}."
    except UserError as error:
        return str(error)
    needed = [MODEL_CONFIG_NAME, WEIGHTS_NAME, MOMENTS_NAME, OBJECTIVE_NAME]
    needed += [f"{EMA_NAME}/{WEIGHTS_NAME}"] if "ema_updates" in meta else []
    needed += [f"{ADAPTERS_NAME}/{name}" for name in ADAPTER_FILES] if "adapters_of" in meta else []
    if missing := [file for file in needed if file not in parsed.files]:
        return f"{META_NAME} does not list {', '.join(missing)}."
    if parsed.samples != parsed.step * parsed.config.batch_size or (is_name(name) and name != name_of(parsed.step)):
        return f"{META_NAME} is of step {parsed.step} and {parsed.samples} samples, which {name} cannot be."
    return ""


def outdated(
    names: Iterable[str],
    *,
    written: str,
    is_good: Callable[[str], bool],
    keep_last: int,
    keep_every: int | None,
    held: set[str],
) -> list[str]:
    """Which of the run's finished checkpoints, `names`, to remove after `written` was written: all up to it except the
    newest `keep_last` ones that are intact, multiples of `keep_every`, and those that are `held`.

    Later ones, which a run leaves behind when it goes on from an older one, are left alone.
    """
    steps = {name: step_of(Path(name)) for name in names}
    past = sorted((name for name, step in steps.items() if step <= step_of(Path(written))), key=steps.__getitem__)
    good, removed = 0, []
    for name in reversed(past):
        if good < keep_last:
            good += name == written or is_good(name)
        elif name not in held and (keep_every is None or steps[name] % keep_every):
            removed.append(name)
    return removed


def remove(path: Path) -> None:
    """Remove a checkpoint, so that a kill meanwhile leaves no part of it that looks like a damaged one."""
    hidden = path.with_name(f".{path.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    if path.exists():
        os.replace(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def publish(temporary: Path, path: Path, run_id: str, on_event: Callable[[str], None]) -> None:
    """Rename a checkpoint of the run `run_id` into place. One of its own is removed then, another run's is renamed."""
    old = path.with_name(f".{path.name}{REPLACED}")
    if os.path.lexists(path):
        if (other_id := id_in(path)) not in ("", run_id):
            names = (f"{path.name}.run-{other_id}{f'.{number}' * (number > 1)}" for number in itertools.count(1))
            old = next(other for other in map(path.with_name, names) if not other.exists())
            on_event(f"Checkpoint {path.name} was written by another run ({other_id}) and is {old.name} now.")
        else:
            shutil.rmtree(old, ignore_errors=True)
        os.replace(path, old)
    os.replace(temporary, path)
    if old.name.endswith(REPLACED):
        shutil.rmtree(old, ignore_errors=True)


def restore_replaced(run: Path) -> None:
    """Take back a checkpoint whose replacement was killed between its two renames."""
    for old in (run / FOLDER_NAME).glob(f".{PREFIX}*{REPLACED}"):
        path = old.with_name(old.name[1:].removesuffix(REPLACED))
        if is_name(path.name) and not os.path.lexists(path):
            os.replace(old, path)


def sweep(folder: Path) -> None:
    """Remove what failed or killed writes have left behind in a run's folder of checkpoints."""
    for leftover in folder.glob(".*"):
        if re.fullmatch(rf"\.{PREFIX}\d+(\.removed|{re.escape(REPLACED)})?", leftover.name):
            shutil.rmtree(leftover, ignore_errors=True)  # refuses links
        elif re.fullmatch(rf"\.({LATEST_NAME}|{BEST_NAME})\.[0-9a-f]{{32}}\.tmp", leftover.name):
            leftover.unlink(missing_ok=True)


def write_meta(path: Path, meta: Mapping[str, Any]) -> None:
    """Write a checkpoint's `checkpoint.json`, with the format and its own digest."""
    meta = {"format": FORMAT, "version": VERSION, **meta}
    write_json(path / META_NAME, {**meta, "digest": digest_of(meta)}, durable=True)
