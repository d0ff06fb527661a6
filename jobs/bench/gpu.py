"""Everything that is worth measuring on a machine with a GPU, most valuable first, as one JSON file.

    python -m jobs.bench.gpu --output gpu.json
    python -m jobs.bench.gpu --dry-run                lists the steps
    python -m jobs.bench.gpu --tiny --output x.json   runs every step in a tiny form on the CPU: tests the suite itself

Needs no network and no data: it generates images. Every step is a command of its own with a time limit. What it prints
goes to a file beside the results, which are saved after each step, so that an interrupted suite keeps both. A failed
step is recorded and the next one runs; a step whose expected time exceeds what is left of --minutes (25) is skipped and
listed. Exit code 1: a step failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.cores import usable_cores
from pipeline.distributed.launch import without_launcher
from pipeline.files import write_json
from pipeline.run_files import METRICS_NAME, read_records
from pipeline.versions import versions

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable
KEPT_LINES = 80
FIGURES = ("loss", "samples_per_second", "mfu", "data_wait", "memory_gib", "cpu_ms", "time_")


@dataclass(frozen=True)
class Step:
    """One measurement. `{work}` in a command is the suite's temporary folder."""

    name: str
    answers: str
    """The question that the step answers."""
    seconds: int
    """Expected time, a guess for steps that no H200 has run; the time limit is twice as long plus half a minute."""
    command: Sequence[str]
    tiny: Sequence[str]
    """The same measurement in a tiny form, for a CPU."""
    run: str = ""
    """Folder of a training run whose figures are read."""


@dataclass
class StepOutcome:
    """The outcome of a step."""

    name: str
    answers: str
    command: str
    status: str
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    """Medians over the second half of a training run's records."""
    files: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    """The last lines of its output."""


def bench(name: str, *arguments: str) -> list[str]:
    return [PYTHON, "-m", f"jobs.bench.{name}", *arguments]


def train(output: str, *, arch: str, batch: int, steps: int, settings: Sequence[str] = ()) -> list[str]:
    """A training run of some steps on the suite's own shards."""
    return [PYTHON, "-m", "jobs.cli", "train", f"output={{work}}/{output}", f"model.arch={arch}",
            f"batch_size={batch}", f"samples={batch * steps}", "data.sources={work}/shards",
            f"schedule.warmup_steps={max(1, steps // 4)}", "telemetry.every=5", "telemetry.progress=quiet",
            "telemetry.images_every=null", "checkpoint.every=1000000", *settings]  # fmt: skip


SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = 2 * 2**30
"""Workers pass batches of images through shared memory, of which containers often have 64 MB."""
NEEDED = ("deepspeed", "open_clip", "open_clip_train", "webdataset", "simplejpeg", "pydantic", "pytest")
"""What the steps import that a machine with torch may lack; the rest is imported at once."""


def workers(count: int, *, shared: Path = SHARED_MEMORY) -> str:
    """That many loading workers; none where their batches do not fit into shared memory."""
    stat = os.statvfs(shared) if shared.is_dir() else None
    enough = stat is not None and stat.f_bavail * stat.f_frsize >= LEAST_SHARED
    return f"data.workers={count if enough else 0}"


CPU = ("engine.device=cpu", "engine.deepspeed=zero1_fp32", "data.workers=1", "data.streams=4")
GPU = ("engine.device=cuda", "data.streams=64")
TINY = ("--arch", "scenes-vit-micro", "--device", "cpu", "--rounds", "1", "--steps", "1")
B16 = ("--arch", "ViT-B-16", "--batch", "640", "--device", "cuda")
NEUCLIP = ("objective.name=neuclip", "objective.prototypes=16")


def steps() -> list[Step]:
    """All measurements, most valuable first."""
    return [
        Step(
            "doctor", "Is the machine in order?", 40,
            [PYTHON, "-m", "jobs.cli", "doctor", "--output", "{work}"],
            [PYTHON, "-m", "jobs.cli", "doctor", "--output", "{work}", "--needs-gib", "0.01"],
        ),
        Step(
            "tests of CUDA", "Do the GPU's results agree with the CPU's, and does no step wait for the device?", 90,
            [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_cuda.py"],
            [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_cuda.py"],
        ),
        Step(
            "losses", "Is the loss that of open_clip_train for 500 steps on the same batches? Limit: 2%.", 150,
            bench("losses", "--arch", "ViT-B-32", "--batch", "256", "--steps", "500", "--device", "cuda"),
            bench("losses", *TINY[:4], "--batch", "8", "--steps", "4", "--batches", "2", "--precision", "fp32"),
        ),
        Step(
            "shards", "(made for the steps below)", 30,
            bench("gpu", "--make-shards", "{work}/shards", "--samples", "5120", "--side", "256"),
            bench("gpu", "--make-shards", "{work}/shards", "--samples", "64", "--side", "40"),
        ),
        Step(
            "150 steps of ViT-B/32", "Does a real run train from end to end? Rate, MFU, waits for data.", 100,
            train("b32", arch="ViT-B-32", batch=1024, steps=150,
                  settings=(*GPU, workers(12), "objective.name=neuclip", "objective.prototypes=1024")),
            train("b32", arch="scenes-vit-micro", batch=16, steps=4, settings=(*CPU, *NEUCLIP)), run="b32",
        ),
        Step(
            "against open_clip_train", "Goal: at least 1.15 times its samples per second; with and without trimming.",
            90,
            bench("train", *B16, "--rounds", "4", "--contenders", "openclip", "whole_texts", "neuclip"),
            bench("train", *TINY, "--batch", "8"),
        ),
        Step(
            "ZeRO stages", "What do stages 1 and 2 cost on one GPU, where they share nothing?", 120,
            bench("options", *B16, "--micro-batch", "160", "--rounds", "3", "--steps", "3", "--options", "none",
                  "stage_1", "stage_2"),
            bench("options", *TINY, "--batch", "8", "--micro-batch", "4", "--options", "none", "stage_2"),
        ),
        Step(
            "extra time of NeuCLIP", "Goal: 3% of a step for local batch 640 of 5,120, 1% for one GPU with 5,120.", 160,
            bench("neuclip_overhead", "--arch", "ViT-B-16", "--device", "cuda", "--setting", "both", "--rounds", "3"),
            bench("neuclip_overhead", *TINY, "--batch", "16", "--ranks", "2", "--micro-batch", "8"),
        ),
        Step(
            "options of the towers", "Step time, memory and MFU of ViT-B/16 at 640. Goal: 40% MFU.", 100,
            # Each contender is a process with a model of its own in the GPU's memory.
            bench("options", *B16, "--micro-batch", "160", "--rounds", "3", "--steps", "2", "--options", "none",
                  "packed_attention", "trim_text", "accumulation"),
            bench("options", *TINY, "--batch", "8", "--micro-batch", "4", "--options", "none", "accumulation"),
        ),
        Step(
            "profile", "Which kernels take the time? A trace for https://ui.perfetto.dev.", 60,
            train("profile", arch="ViT-B-16", batch=640, steps=16,
                  settings=(*GPU, workers(12), "objective.name=neuclip", "telemetry.profile=[8,12]")),
            train("profile", arch="scenes-vit-micro", batch=16, steps=4,
                  settings=(*CPU, *NEUCLIP, "telemetry.profile=[1,2]")), run="profile",
        ),
        Step(
            "compiled towers", "What does model.compile save? If compiling takes too long, only this is lost.", 160,
            bench("options", *B16, "--micro-batch", "160", "--rounds", "2", "--options", "trim_image", "compile"),
            bench("options", *TINY, "--batch", "8", "--micro-batch", "4", "--options", "trim_image"),
        ),
        Step(
            "extra time of NeuCLIP, compiled", "The same with objective.npn_compile.", 110,
            bench("neuclip_overhead", "--arch", "ViT-B-16", "--device", "cuda", "--setting", "gathered", "--rounds",
                  "3", "--npn-compile"),
            bench("neuclip_overhead", *TINY, "--batch", "16", "--ranks", "2", "--micro-batch", "8", "--setting",
                  "gathered", "--npn-compile"),
        ),
        Step(
            "loader", "Images per second of a core of this machine.", 60,
            bench("loader", "--shorter", "256", "--rounds", "2"),
            bench("loader", "--shorter", "64", "--samples", "128", "--rounds", "1"),
        ),
        Step(
            "network alone", "Time of the inner updates beside their matrix products.", 40,
            bench("npn", "--rounds", "5"),
            bench("npn", "--batch", "32", "--dim", "16", "--prototypes", "32", "--steps", "2", "--rounds", "1"),
        ),
    ]  # fmt: skip


def machine() -> dict[str, Any]:
    """The machine and the package versions."""
    import torch

    found: dict[str, Any] = {"python": platform.python_version(), "cores": usable_cores(), "versions": versions()}
    found["capability"] = torch.backends.cpu.get_cpu_capability()
    found["workers"] = workers(12)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["memory_gib"], found["cuda"] = properties.total_memory / 2**30, torch.version.cuda
    if shutil.which("nvidia-smi"):
        query = "name,driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv"], capture_output=True, text=True)
        found["nvidia-smi"] = done.stdout.splitlines()
    return found


def take(step: Step, *, work: Path, tiny: bool, log: Path | None = None, most: float = math.inf) -> StepOutcome:
    """Run one step until it ends or its time limit, `most` seconds or less, is reached; `log` gets what it prints."""
    command = [part.replace("{work}", str(work)) for part in (step.tiny if tiny else step.command)]
    outcome = StepOutcome(step.name, step.answers, " ".join(command[1:]), status="done")
    environment = without_launcher(os.environ)
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if tiny:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    start, limit = time.monotonic(), min(2 * step.seconds + 30, most)
    with (log or work / "step.log").open("w+", encoding="utf-8", errors="replace") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if code := process.wait(limit):
                outcome.status = f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            outcome.status = f"failed: not done after {limit:.0f} s"
        finally:  # workers and contenders, too: they hold memory of the GPU that the next step needs
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        outcome.output = [line.rstrip() for line in out][-KEPT_LINES:]
    outcome.seconds = round(time.monotonic() - start, 1)
    if step.run:
        folder = work / step.run
        outcome.figures = figures(folder)
        outcome.files = [str(path) for path in sorted((folder / "profile").glob("*"))]
    return outcome


def figures(run: Path) -> dict[str, float]:
    """Medians of a training run's records, of their second half: the first steps compile and warm up."""
    records = [record for record in read_records(run / METRICS_NAME) if record.get("kind") == "train"]
    later = records[len(records) // 2 :]
    found = {}
    for name in sorted({name for record in later for name in record if name.startswith(FIGURES)}):
        values = [record[name] for record in later if isinstance(record.get(name), float | int)]
        if values:
            found[name] = float(median(values))
    return found


def make_shards(folder: Path, *, samples: int, side: int) -> None:
    """Webdataset shards of synthetic photos, made by all cores, and their manifest."""
    from jobs.bench.loader import make_shards as make
    from pipeline.data.shards.make_manifest import index_shards

    folder.mkdir(parents=True)
    parts = min(16, max(1, samples // 16))
    with ProcessPoolExecutor(min(parts, usable_cores())) as pool:
        jobs = []
        for part in range(parts):
            (folder / f"{part:02d}").mkdir()
            jobs.append(pool.submit(make, folder / f"{part:02d}", shards=1, samples=samples // parts, shorter=side))
        for job in jobs:
            job.result()
    index_shards(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="the results [gpu.json]")
    parser.add_argument("--minutes", type=float, default=25.0, help="time of all steps [25]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="steps whose names contain one of these words")
    parser.add_argument("--dry-run", action="store_true", help="list the steps and their commands")
    parser.add_argument("--tiny", action="store_true", help="run every step in a tiny form on the CPU")
    parser.add_argument("--make-shards", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--samples", type=int, default=64, help=argparse.SUPPRESS)
    parser.add_argument("--side", type=int, default=64, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # which ends the step's processes, too
    if args.make_shards:
        make_shards(args.make_shards, samples=args.samples, side=args.side)
        return 0
    if not args.minutes > 0:
        parser.error(f"--minutes must be above 0, not {args.minutes:g}")
    for word in args.only or ():
        if not word or not any(word in step.name for step in steps()):
            parser.error(f"--only {word!r} names no step; there are: {', '.join(step.name for step in steps())}")
    chosen = [
        step for step in steps() if not args.only or step.name == "shards" or any(w in step.name for w in args.only)
    ]
    if args.dry_run:
        for step in chosen:
            print(f"{step.name} (about {step.seconds} s): {step.answers}\n    {' '.join(step.command[1:])}")
        print(f"All together about {sum(step.seconds for step in chosen) / 60:.1f} of {args.minutes:g} minutes.")
        return 0
    return suite(chosen, output=args.output, seconds=60 * args.minutes, tiny=args.tiny)


def suite(chosen: Sequence[Step], *, output: Path, seconds: float, tiny: bool) -> int:
    """Run the steps while there is time, and write the results after each."""
    import torch

    if not tiny and not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} sees no GPU on this machine, so nothing was measured. --dry-run lists the "
            "steps; --tiny runs each of them in a tiny form on the CPU, which tests the suite and measures nothing."
        )
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"The steps need packages that are missing here: {', '.join(missing)}. docs/benchmarks.md says how to "
            "bring them to a machine without network."
        )
    start, outcomes = time.monotonic(), list[StepOutcome]()
    facts = {"tiny": tiny, "machine": machine()}
    if output.exists():
        raise SystemExit(f"{output} exists already: give --output another name.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, {**facts, "steps": []})
    except OSError as error:
        raise SystemExit(f"{output} cannot be written ({error.strerror}): give --output another name.") from None
    with tempfile.TemporaryDirectory(prefix="neuclip-gpu-") as work:
        for step in chosen:
            left = seconds - (time.monotonic() - start)
            if left < step.seconds:
                outcome = StepOutcome(step.name, step.answers, "", status=f"left out: {left:.0f} s were left")
            else:
                print(f"{step.name} ...", flush=True)
                name = re.sub(r"\W+", "-", f"{output.stem}-{step.name}")
                outcome = take(step, work=Path(work), tiny=tiny, log=output.with_name(f"{name}.log"), most=left)
            outcomes.append(outcome)
            try:
                for path in outcome.files:  # the temporary folder will be gone
                    shutil.copy(path, output.with_name(f"{output.stem}-{Path(path).name}"))
            except OSError as error:
                outcome.status = f"failed: its files could not be copied ({error.strerror})"
            write_json(output, {**facts, "steps": [asdict(each) for each in outcomes]})
            print(f"{step.name}: {outcome.status}, {outcome.seconds:.0f} s {outcome.figures or ''}", flush=True)
    failed = [outcome.name for outcome in outcomes if outcome.status.startswith("failed")]
    print(f"{output} is written." + (f" Failed: {', '.join(failed)}." if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("Interrupted. The files of the steps that ran are kept.")
