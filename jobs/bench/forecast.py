"""How well `neuclip plan --measure` forecasts the rate of training, on six configurations of this machine.

    python -m jobs.bench.forecast
    OMP_NUM_THREADS=1 python -m jobs.bench.forecast --seconds 20 --rounds 3

Two models, two batch sizes, and cached accumulation (`engine.micro_batch`) for the larger batch. The speed of a shared
machine may change by a third within a minute. The forecast and the real run are therefore started together and take
turns of half a second (SIGSTOP and SIGCONT): other load affects both alike, and each has half of the time, so that both
rates are halved and their ratio stays what it is. The real rate is that of the steps in the same period in which the
forecast trains. Both programs ask for huge pages (THP_MEM_ALLOC_ENABLE=1): without them, the same optimizer
step may take twice as long in one process as in the next, depending on where the machine happened to put its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from jobs.bench.gpu import make_shards
from pipeline.planning.measure import TRAINING_SHARE

MODELS, BATCHES, MICRO = ("scenes-vit-micro", "scenes-vit-tiny"), (32, 128), 32
SAMPLES, SIDE = 2048, 72
TURN = 0.5
"""Seconds for which one of the two runs while the other waits."""


def configurations() -> dict[str, list[str]]:
    """Settings by name."""
    found = {}
    for model in MODELS:
        for batch in BATCHES:
            found[f"{model}, batch {batch}"] = [f"model.arch={model}", f"batch_size={batch}"]
        found[f"{model}, batch {BATCHES[-1]} in {MICRO}"] = [
            f"model.arch={model}", f"batch_size={BATCHES[-1]}", f"engine.micro_batch={MICRO}"]  # fmt: skip
    return found


def take_turns(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> None:
    """Let two process groups run in turns of `TURN` seconds until `first` ends.

    Raises:
        SystemExit: `second` has ended before.
    """
    for running, waiting in itertools.cycle(((first, second), (second, first))):
        _signal(waiting, signal.SIGSTOP)
        _signal(running, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.wait(TURN)
        if first.poll() is not None:
            return
        if second.poll() is not None:
            raise SystemExit(f"The real run ended before the forecast:\n{second.communicate()[0][-2000:]}")


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """Send a signal to a process and to all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"},
    )


def compare(settings: list[str], *, seconds: float, output: Path) -> tuple[float, float]:
    """Forecast and real rate in samples per second, both taking turns.

    Args:
        settings: of the recipe.
        seconds: of the measurement while it runs; it takes twice as long.
        output: Folder of the real run.
    """
    # Each turn belongs to one of the two, so `seconds` of work take twice as long on the clock.
    planned = start("plan", "--measure", "--seconds", str(2 * seconds), "samples=1_000_000", *settings)
    trained = start("train", "samples=100_000_000", "telemetry.every=1", *settings, f"output={output}")
    try:
        take_turns(planned, trained)
        ended = time.time()
    finally:
        for process in (planned, trained):
            _signal(process, signal.SIGKILL)
    printed = planned.communicate()[0]
    rate = re.search(r"FORECAST +([\d,.]+) samples/s", printed)
    if rate is None:
        raise SystemExit(f"neuclip plan printed no forecast:\n{printed[-2000:]}")
    return float(rate[1].replace(",", "")), real(output, since=ended - 2 * seconds * TRAINING_SHARE, until=ended)


def real(output: Path, *, since: float, until: float) -> float:
    """Samples per second of a run between two times (seconds since 1970)."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]  # the run was killed: a last line may be cut
    found = [record for record in records if record.get("kind") == "train" and since <= record["time"] <= until]
    if len(found) < 3:
        raise SystemExit(f"The real run took only {len(found)} steps in the forecast's time: use more --seconds.")
    first, last = found[0], found[-1]
    return float((last["samples"] - first["samples"]) / (last["time"] - first["time"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a measurement, and of a real run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(configurations()), nargs="+", default=list(configurations()))
    args = parser.parse_args()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in args.only}
    with tempfile.TemporaryDirectory(prefix="neuclip-forecast-") as work:
        make_shards(Path(work) / "shards", samples=SAMPLES, side=SIDE)
        common = [f"data.sources={work}/shards", "data.streams=16", "data.workers=1", "engine.deepspeed=zero1_fp32",
                  "schedule.warmup_steps=2", "telemetry.progress=quiet", "telemetry.images_every=null",
                  "telemetry.tensorboard=false", "checkpoint.every=1000000", f"output={work}/none"]  # fmt: skip
        for number in range(args.rounds):
            for name, settings in ((name, configurations()[name]) for name in args.only):
                output = Path(work) / f"run-{number}-{name.replace(' ', '').replace(',', '-')}"
                pairs[name].append(compare([*settings, *common], seconds=args.seconds, output=output))
                expected, measured = pairs[name][-1]
                print(f"round {number + 1}, {name}: forecast {expected:.1f}, real {measured:.1f}", flush=True)
    head = f"{'configuration':<36}{'forecast':>10}{'real':>10}{'ratio':>8}{'lowest':>8}{'highest':>9}"
    print(f"\n{head}{'real varies by':>16}")
    for name, found in pairs.items():
        ratios = [expected / measured for expected, measured in found]
        rates = [measured for _, measured in found]
        print(f"{name:<36}{median(e for e, _ in found):>10.1f}{median(rates):>10.1f}{median(ratios):>8.2f}"
              f"{min(ratios):>8.2f}{max(ratios):>9.2f}{max(rates) / min(rates):>15.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()
