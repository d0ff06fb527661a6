"""What one GPU shows in 9 minutes and the program's start, most valuable first, as one JSON file.

    python -m jobs.bench.gpu --output gpu.json
    python -m jobs.bench.gpu --output again.json --only run       one part
    python -m jobs.bench.gpu --tiny --output x.json               every part in seconds on a CPU: tests the program

Needs no network and no data. The parts:

    b16, b32   ViT-B/16 at 640 pairs and ViT-B/32 at 1,024 with default settings against open_clip's trainer, eager and
               compiled; device time by kind of kernel and gaps between kernels
    run        a whole run of ViT-B/32, compiled as a long one, with loader, checkpoint and one evaluation, and its
               continuation
    network    the extra time of NeuCLIP for 640 of 5,120 gathered pairs, and the MFU of ViT-B/16 with whole texts
    tests      tests/unit/test_cuda.py

The results are written after each measurement, so that an interrupted program keeps them. A measurement that fails or
exceeds its limit is recorded, and the next one begins; after a limit the rest runs in a new process. Exit code 1: one
failed.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from pathlib import Path
from statistics import median
from typing import Any

import torch

from data_prep.scenes.scene import ScenesConfig
from data_prep.scenes.scene_suite import write_suite
from jobs.bench import train
from jobs.bench.harness import trace_steps
from jobs.bench.loader import make_shards
from jobs.cli import use_expandable_segments
from pipeline.cores import usable_cores
from pipeline.distributed.processes import without_launcher
from pipeline.distributed.start import start_world
from pipeline.distributed.world import World
from pipeline.files import write_json
from pipeline.run_files import METRICS_NAME, read_records
from pipeline.versions import source_commit, versions

ROOT = Path(__file__).parents[2]
PARTS = ("b16", "b32", "run", "network", "tests")
FIGURES = ("loss", "samples_per_second", "mfu", "data_wait", "memory_gib", "cpu_ms", "time_")
BUILD_SECONDS, MEASURE_SECONDS, RUN_SECONDS = 120.0, 90.0, 180.0
"""Limits: to build a contender and compile it, for rounds of steps or a trace, and for a command."""
AGAIN_SECONDS = 5.0
"""A measurement that ignores its limit, as in a bare `except`, is stopped again after as long."""


@dataclass
class Results:
    """The JSON file, written again after each measurement."""

    path: Path
    tiny: bool
    seconds: float
    """For all measurements."""
    measured: dict[str, Any] = field(default_factory=dict)
    """By part and measurement."""
    interrupted: bool = False
    """A measurement was stopped at its limit. In torch.compile that can break torch for the rest of the process."""

    def __post_init__(self) -> None:
        machine: dict[str, Any] = {"cores": usable_cores(), "commit": source_commit(), "versions": versions()}
        machine |= {"cpu": torch.backends.cpu.get_cpu_capability(), "cuda": torch.version.cuda}
        if shutil.which("nvidia-smi"):
            query = "--query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm,clocks.max.memory"
            done = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True)
            machine["nvidia-smi"] = done.stdout.splitlines()
        self._start, self._facts = time.monotonic(), {"tiny": self.tiny, "machine": machine}
        self.write()

    @property
    def failed(self) -> list[str]:
        """Part and name of each measurement that failed."""
        named = ((f"{part}, {name}", one) for part, ones in self.measured.items() for name, one in ones.items())
        return [name for name, one in named if one["status"].startswith("failed")]

    @property
    def seconds_left(self) -> float:
        return self.seconds - (time.monotonic() - self._start)

    def measure(self, part: str, name: str, call: Callable[[], Any], *, seconds: float) -> Any:
        """Record what `call` returns, or why there is nothing, and return it; it has as many seconds, or what is left.

        What cannot be written as JSON (a contender) is not recorded.
        """
        begin, value, warned = time.monotonic(), None, BufferingHandler(10**6)
        limit = min(seconds, self.seconds_left)
        outcome: dict[str, Any] = {"status": "done"}
        if limit < 1:
            outcome["status"] = "left out: no time was left"
        else:
            print(f"{part}, {name} ...", flush=True)

            def stop(*_: object) -> None:
                raise OutOfTime(f"not done after {limit:.0f} s")

            before = signal.signal(signal.SIGALRM, stop)
            signal.setitimer(signal.ITIMER_REAL, limit, AGAIN_SECONDS)
            logging.getLogger().addHandler(warned)
            try:
                value = call()
            except (Exception, OutOfTime) as error:
                outcome["status"] = f"failed: {type(error).__name__}: {error}"[:2000]
                self.interrupted |= isinstance(error, OutOfTime)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                logging.getLogger().removeHandler(warned)
        outcome["seconds"] = round(time.monotonic() - begin, 1)
        if warned.buffer:  # such as that the towers cannot be compiled
            outcome["warnings"] = [record.getMessage()[:500] for record in warned.buffer]
        if isinstance(value, dict):
            outcome["result"] = value
        self.measured.setdefault(part, {})[name] = outcome
        self.write()
        print(f"{part}, {name}: {outcome['status']}, {outcome['seconds']} s", flush=True)
        return value

    def write(self) -> None:
        write_json(self.path, {**self._facts, "parts": self.measured})


class OutOfTime(BaseException):
    """A measurement takes too long. No handler of errors on the way takes it for one."""


def steps(results: Results, part: str, words: Sequence[str], *, world: World, traced: bool = True) -> None:
    """Steps of all contenders of `jobs.bench.train` in turns, and a trace of ours."""
    args = train.options().parse_args(words)
    data = results.measure(part, "data", lambda: train.make_data(args), seconds=MEASURE_SECONDS)
    with ExitStack() as stack:
        builders = train.contenders(args, data, world=world, stack=stack) if data else {}
        built = {}
        for name in reversed(builders):  # building one of ours drops programs that were compiled before
            if contender := results.measure(part, name, builders[name], seconds=BUILD_SECONDS):
                built[name] = contender
        if not (built := {name: built[name] for name in builders if name in built}):
            return
        results.measure(part, "steps", lambda: train.compare(args, built, world.device), seconds=MEASURE_SECONDS)
        if traced and (ours := built.get("ours, openclip")):
            path = results.path.with_name(f"{results.path.stem}-{part}.json.gz")
            trace = functools.partial(trace_steps, ours[0], 3, path=path)
            results.measure(part, "trace", trace, seconds=MEASURE_SECONDS)


def whole_run(results: Results, part: str, settings: Sequence[str], *, batch: int) -> None:
    """A run as a user starts it, and its continuation after two thirds of the steps: figures of each."""
    samples, side, distinct, steps = (64, 40, 8, 6) if results.tiny else (4096, 256, 128, 150)
    with tempfile.TemporaryDirectory(prefix="neuclip-gpu-") as folder:
        work, shards, run = Path(folder), Path(folder) / "shards", Path(folder) / "run"

        def make() -> None:
            shards.mkdir()
            make_shards(shards, shards=8, samples=samples // 8, shorter=side, distinct=distinct)
            write_suite(ScenesConfig(pairs=50, held_out=12, retrieval_pairs=8, image_size=32), work / "suite")

        command = [
            "-m", "jobs.cli", "train", f"output={run}", f"data.sources={shards}", "objective.name=neuclip",
            f"batch_size={batch}", "schedule.warmup_steps=2", f"checkpoint.every={steps // 3}",
            f"evaluation.suite={work / 'suite'}", f"evaluation.every={steps * 2 // 3}",
            f"telemetry.every={max(1, steps // 15)}", "telemetry.progress=quiet", *settings,
        ]  # fmt: skip

        def train(name: str, last: int, *more: str) -> None:
            def take() -> dict[str, Any]:
                done = len(read_records(run / METRICS_NAME))
                printed = program(*command, f"samples={batch * last}", *more, tiny=results.tiny)
                return {**figures(read_records(run / METRICS_NAME)[done:]), "output": printed}

            results.measure(part, name, take, seconds=RUN_SECONDS)

        results.measure(part, "data", make, seconds=MEASURE_SECONDS)
        train("start", steps * 2 // 3)
        train("resume", steps, "--resume", "latest")


def program(*words: str, tiny: bool) -> list[str]:
    """The last lines that a Python program prints. It and what it has started end with this call.

    Raises:
        RuntimeError: It fails.
    """
    environment = without_launcher(os.environ)
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if tiny:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait()
        finally:  # workers, too: they hold memory of the GPU
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        printed = out.read().splitlines()[-40:]
    if code:
        raise RuntimeError("\n".join([f"exit code {code}", *printed[-15:]]))
    return printed


def figures(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of a run: steps, evaluations, and medians of the second half of the steps, after what compiles and warms up."""
    kinds = [record.get("kind") for record in records]
    steps = [record for record in records if record.get("kind") == "train"]
    later = steps[len(steps) // 2 :]
    names = sorted({name for record in later for name in record if name.startswith(FIGURES)})
    values = {name: [r[name] for r in later if isinstance(r.get(name), float | int)] for name in names}
    counts = {"steps_logged": float(len(steps)), "evaluations": float(kinds.count("evaluation"))}
    return counts | {name: float(median(measured)) for name, measured in values.items() if measured}


def parts(results: Results, *, world: World) -> dict[str, Callable[[], None]]:
    """All measurements, most valuable first."""
    rounds = ["--device", "cuda", "--rounds", "5", "--steps", "4"]
    b16, b32 = ["--arch", "ViT-B-16", "--batch", "640"], ["--arch", "ViT-B-32", "--batch", "1024"]
    gathered = ["--arch", "ViT-B-16", "--batch", "5120", "--ranks", "8", "--captions", "full"]
    run = ["model.arch=ViT-B-32", "engine.device=cuda", "data.workers=12", "objective.prototypes=1024"]
    run += ["model.compile=true", "objective.npn_compile=true"]  # `auto` compiles in longer runs
    if results.tiny:
        rounds = ["--device", "cpu", "--rounds", "1", "--steps", "1", "--threads", "1"]
        b16 = b32 = ["--arch", "scenes-vit-micro", "--batch", "8"]
        gathered = ["--arch", "scenes-vit-micro", "--batch", "16", "--ranks", "2"]
        run = ["model.arch=scenes-vit-micro", "engine.device=cpu", "data.streams=4", "data.workers=0"]
        run += ["objective.prototypes=16", "evaluation.workers=0"]
    openclip = ["--objectives", "openclip", *rounds]
    for update in ("replicated", "prototypes"):  # every rank updates the whole network, or its own prototypes
        gathered += ["--variant", f"objective.name=neuclip objective.npn_update={update}"]
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_cuda.py")
    tests = functools.partial(program, *words, tiny=results.tiny)
    return {
        "b16": lambda: steps(results, "b16", [*b16, *openclip], world=world),
        "b32": lambda: steps(results, "b32", [*b32, *openclip], world=world),
        "run": lambda: whole_run(results, "run", run, batch=16 if results.tiny else 1024),
        "network": lambda: steps(results, "network", [*gathered, *openclip], world=world, traced=False),
        "tests": lambda: results.measure("tests", "test_cuda.py", lambda: {"output": tests()}, seconds=RUN_SECONDS),
    }


def take(results: Results, chosen: dict[str, Callable[[], None]]) -> None:
    """Measure these parts. After an interrupted one, a new process takes the place of this one."""
    for number, part in enumerate(chosen.values(), 1):
        part()
        if results.interrupted and (rest := [*chosen][number:]):
            words = ["--output", str(results.path), "--add", "--seconds", str(results.seconds_left), "--only", *rest]
            command = [sys.executable, "-m", "jobs.bench.gpu", *words, *["--tiny"] * results.tiny]
            os.execve(sys.executable, command, without_launcher(os.environ))
        torch.compiler.reset()  # engines and compiled programs refer to each other
        gc.collect()
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the results [gpu.json]")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all measurements, without the start [540]")
    parser.add_argument("--add", action="store_true", help="add to the file of an earlier call on this machine")
    parser.add_argument("--tiny", action="store_true", help="every part in a tiny form on the CPU")
    args = parser.parse_args(argv)
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU on this machine, so nothing was measured. --tiny runs every part "
            "in a tiny form on the CPU, which tests the program and measures nothing."
        )
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        measured = json.loads(args.output.read_bytes())["parts"] if args.add else {}
        args.output.touch(exist_ok=args.add)
    except OSError as error:
        raise SystemExit(f"{args.output} cannot be written ({error.strerror}): give --output another name.") from None
    use_expandable_segments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # which ends a command that runs, too
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", category=UserWarning)
    results = Results(args.output, args.tiny, args.seconds, measured)
    with start_world(device="cpu" if args.tiny else "cuda") as world:
        take(results, {name: part for name, part in parts(results, world=world).items() if name in args.only})
    print(f"{args.output} is written." + (f" Failed: {'; '.join(results.failed)}." if results.failed else ""))
    return 1 if results.failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. What was measured is in the file.")
