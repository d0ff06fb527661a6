"""Run the units of a study in parallel on the available devices, one process per GPU or core."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click
import torch

from jobs.studies.declare import Unit
from pipeline.cores import usable_cores
from pipeline.errors import EXIT_INTERRUPTED, UserError

TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node {ranks} -m"


def command_of(unit: Unit, folder: Path, *, launcher: str | None) -> list[str]:
    """The command that runs a unit, whose specification is in `folder`.

    `launcher` is the launch command before the module name, in which {ranks} and {python} are substituted. None: plain
    Python for one rank, torchrun for several.
    """
    template = launcher or (TORCHRUN if unit.ranks > 1 else "{python} -m")
    words = shlex.split(template.format(ranks=unit.ranks, python=shlex.quote(sys.executable)))
    return [*words, "jobs.studies.unit", str(folder)]


def usable_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in visible.split(",")][:count] if visible else [str(n) for n in range(count)]


class Devices:
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


def run_all(units: Sequence[Unit], output: Path, *, parallel: int | None, launcher: str | None) -> dict[str, int]:
    """Run units, each with its specification in its folder below `output`.

    A failed unit does not stop the others. SIGINT, SIGTERM or SIGUSR1 terminates the running ones, which can be
    continued later.

    Returns:
        The exit codes of failed units by label.

    Raises:
        KeyboardInterrupt: One of these signals was received.
        UserError: A unit needs more GPUs than there are.
    """
    gpus = usable_gpus()
    if gpus and launcher is None and (large := [unit for unit in units if unit.ranks > len(gpus)]):
        needs = f"{large[0].label} needs {large[0].ranks} GPUs"
        raise UserError(f"{needs}, but {len(gpus)} are visible here: see --slurm.")
    count = max(1, min(parallel or len(gpus) or usable_cores(), len(units)))
    devices, processes, stopped = Devices(gpus, parallel=count), list[subprocess.Popen](), threading.Event()

    def one(number: int, unit: Unit) -> int:
        folder = unit.folder(output)
        with devices.taken(unit.ranks) as place, (folder / "log.txt").open("ab") as log:
            if stopped.is_set():
                return EXIT_INTERRUPTED
            began, environment = time.monotonic(), {**os.environ, **place}
            words = command_of(unit, folder, launcher=launcher)
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=subprocess.STDOUT)
            processes.append(process)
            code = process.wait()
        what = "done" if code == 0 else f"FAILED with exit code {code}, see {folder / 'log.txt'}"
        click.echo(f"{number}/{len(units)} {unit.label}: {what} ({time.monotonic() - began:.0f} s)")
        return code

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler)
    with ThreadPoolExecutor(count) as pool:
        try:
            codes = {unit.label: pool.submit(one, number, unit) for number, unit in enumerate(units, 1)}
            return {label: code for label, future in codes.items() if (code := future.result())}
        except KeyboardInterrupt:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()  # the run writes a checkpoint; leaving the pool waits for it
            raise
