"""Run the units of a study in parallel on the available devices, one process per GPU or core."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jobs.studies.declare import SizeFacts, Study, Unit
from jobs.studies.unit import RESULT_NAME, SPEC_NAME
from pipeline.cores import usable_cores
from pipeline.errors import EXIT_INTERRUPTED, UserError

TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node {ranks} -m"


def folder_of(unit: Unit, output: Path) -> Path:
    """OUTPUT/runs/KEY, shared by identical runs of different studies."""
    return output / "runs" / unit.key


def is_done(unit: Unit, output: Path) -> bool:
    return (folder_of(unit, output) / RESULT_NAME).is_file()


def write_spec(unit: Unit, output: Path, *, facts: SizeFacts, study: Study, places: Sequence[str] = ()) -> Path:
    """Write the specification that `unit.py` reads to the unit's folder below `output`. Returns the folder.

    `places` are overrides that set the locations of data and suite.
    """
    folder = folder_of(unit, output)
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "label": unit.label,
        "recipe": str(unit.recipe),
        "overrides": [*unit.overrides, *places, f"output={folder}"],
        "anchors": facts.anchors,
        "measure": study.measure,
    }
    (folder / SPEC_NAME).write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
    return folder


def command_of(unit: Unit, folder: Path, *, launcher: str | None) -> list[str]:
    """The command that runs a unit, whose specification is in `folder`.

    `launcher` is the launch command before the module name, in which {ranks} and {python} are substituted. None: plain
    Python for one rank, torchrun for several.
    """
    template = launcher or (TORCHRUN if unit.ranks > 1 else "{python} -m")
    words = shlex.split(template.format(ranks=unit.ranks, python=shlex.quote(sys.executable)))
    return [*words, "jobs.studies.unit", str(folder)]


def gpus_at_hand() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in visible.split(",")][:count] if visible else [str(n) for n in range(count)]


class _Places:
    """What parallel runs take and give back: GPUs, one for each rank; without GPUs, a core for each run."""

    def __init__(self, gpus: Sequence[str], *, parallel: int) -> None:
        self._alone = parallel == 1
        self._free = [gpus[number % len(gpus)] for number in range(max(parallel, len(gpus)))] if gpus else []
        self._gpus, self._changed = gpus, threading.Condition()

    @contextmanager
    def taken(self, ranks: int) -> Iterator[dict[str, str]]:
        """The environment variables of a run; a single one may use the whole machine."""
        if self._alone:
            yield {}
            return
        if not self._gpus:
            yield {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
            return
        ranks = min(ranks, len(self._gpus))  # a launcher of the user's own may have more elsewhere
        with self._changed:
            self._changed.wait_for(lambda: len(set(self._free)) >= ranks)
            mine = sorted(set(self._free), key=self._gpus.index)[:ranks]
            for gpu in mine:
                self._free.remove(gpu)
        try:
            yield {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        finally:
            with self._changed:
                self._free += mine
                self._changed.notify_all()


def run_all(
    units: Sequence[tuple[Unit, Path]], *, parallel: int | None, launcher: str | None, tell: Callable[[str], None]
) -> dict[str, int]:
    """Run units, given with their folders.

    A failed unit does not stop the others. SIGINT, SIGTERM or SIGUSR1 terminates the running ones, which can be
    continued later.

    Returns:
        The exit codes of failed units by label.

    Raises:
        KeyboardInterrupt: One of these signals was received.
        UserError: A unit needs more GPUs than there are.
    """
    gpus = gpus_at_hand()
    if gpus and launcher is None and (large := [unit for unit, _ in units if unit.ranks > len(gpus)]):
        needs = f"{large[0].label} needs {large[0].ranks} GPUs"
        raise UserError(f"{needs}, but {len(gpus)} are visible here: see --slurm.")
    count = max(1, min(parallel or len(gpus) or usable_cores(), len(units)))
    places = _Places(gpus, parallel=count)
    processes: list[subprocess.Popen] = []
    stopped = threading.Event()

    def one(number: int, unit: Unit, folder: Path) -> int:
        with places.taken(unit.ranks) as place, (folder / "log.txt").open("ab") as log:
            if stopped.is_set():
                return EXIT_INTERRUPTED
            began = time.monotonic()
            process = subprocess.Popen(
                command_of(unit, folder, launcher=launcher),
                env={**os.environ, **place},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            processes.append(process)
            code = process.wait()
        what = "done" if code == 0 else f"FAILED with exit code {code}, see {folder / 'log.txt'}"
        tell(f"{number + 1}/{len(units)} {unit.label}: {what} ({time.monotonic() - began:.0f} s)")
        return code

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    with ThreadPoolExecutor(count) as pool:
        try:
            futures = [(unit, pool.submit(one, i, unit, folder)) for i, (unit, folder) in enumerate(units)]
            codes = {unit.label: future.result() for unit, future in futures}
        except KeyboardInterrupt:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()  # the run writes a checkpoint; leaving the pool waits for it
            raise
    return {label: code for label, code in codes.items() if code}


def sbatch(name: str, *, size: str, output: str, count: int, overrides: Sequence[str]) -> str:
    """A Slurm script with a job array of one task per unit."""
    rest = " ".join(shlex.quote(text) for text in overrides)
    return f"""#!/bin/bash
#SBATCH --job-name=study-{name}
#SBATCH --array=0-{count - 1}
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --output=study-{name}-%a.log
# One task runs one unit; a task that is started again continues it. Then: neuclip study {name} --size {size} --render
trap 'kill -USR1 "$child"; wait "$child"; [ $? -eq 130 ] && scontrol requeue "$SLURM_JOB_ID"' USR1
neuclip study {name} --size {size} --output {shlex.quote(output)} --unit "$SLURM_ARRAY_TASK_ID" {rest} &
child=$!
wait "$child"
"""
