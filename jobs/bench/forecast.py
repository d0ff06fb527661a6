"""How well `neuclip plan --measure` forecasts the rate of training, on six configurations of this machine.

    python -m jobs.bench.forecast
    OMP_NUM_THREADS=2 python -m jobs.bench.forecast --seconds 20 --rounds 3

Two models, two batch sizes, and cached accumulation (`engine.micro_batch`) for the larger batch. In every round and for
every configuration, the forecast is followed by a real run, so that other load on the machine affects both. The ratio
within a pair is the result; the spread of the real rates shows how constant the machine's load was.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from jobs.bench.gpu import make_shards

MODELS, BATCHES, MICRO = ("scenes-vit-micro", "scenes-vit-tiny"), (32, 128), 32
SAMPLES, SIDE = 2048, 72


def configurations() -> dict[str, list[str]]:
    """Settings by name."""
    found = {}
    for model in MODELS:
        for batch in BATCHES:
            found[f"{model}, batch {batch}"] = [f"model.arch={model}", f"batch_size={batch}"]
        found[f"{model}, batch {BATCHES[-1]} in {MICRO}"] = [
            f"model.arch={model}", f"batch_size={BATCHES[-1]}", f"engine.micro_batch={MICRO}"]  # fmt: skip
    return found


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "jobs.cli", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} failed with exit code "
            f"{done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def forecast(settings: list[str], *, seconds: float) -> float:
    """Samples per second, by `neuclip plan --measure`."""
    printed = run("plan", "--measure", "--seconds", str(seconds), "samples=1_000_000", *settings)
    rate = re.search(r"FORECAST +([\d,.]+) samples/s", printed)
    if rate is None:
        raise SystemExit(f"neuclip plan printed no forecast:\n{printed}")
    return float(rate[1].replace(",", ""))


def real(settings: list[str], *, batch: int, steps: int, output: Path) -> float:
    """Samples per second of a training run, without the first fifth of its steps."""
    run("train", f"samples={batch * steps}", f"telemetry.every={max(1, steps // 5)}", *settings, f"output={output}")
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rates = [record["samples_per_second"] for record in records if record.get("kind") == "train"]
    return len(rates[1:]) / sum(1 / rate for rate in rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a measurement, and about of a real run")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in configurations()}
    with tempfile.TemporaryDirectory(prefix="neuclip-forecast-") as work:
        make_shards(Path(work) / "shards", samples=SAMPLES, side=SIDE)
        common = [f"data.sources={work}/shards", "data.streams=16", "data.workers=1", "engine.deepspeed=zero1_fp32",
                  "schedule.warmup_steps=2", "telemetry.progress=quiet", "telemetry.images_every=null",
                  "telemetry.tensorboard=false", "checkpoint.every=1000000", f"output={work}/none"]  # fmt: skip
        for number in range(args.rounds):
            for name, settings in configurations().items():
                expected = forecast([*settings, *common], seconds=args.seconds)
                batch = next(int(setting.partition("=")[2]) for setting in settings if setting.startswith("batch_size"))
                steps = max(10, round(expected * args.seconds / batch))
                output = Path(work) / f"run-{number}-{len(pairs[name])}-{name.replace(' ', '').replace(',', '-')}"
                pairs[name].append((expected, real([*settings, *common], batch=batch, steps=steps, output=output)))
                print(f"round {number + 1}, {name}: forecast {pairs[name][-1][0]:.1f}, real {pairs[name][-1][1]:.1f}",
                      flush=True)  # fmt: skip
    head = f"{'configuration':<36}{'forecast':>10}{'real':>10}{'ratio':>8}{'lowest':>8}{'highest':>9}"
    print(f"\n{head}{'real varies by':>16}")
    for name, found in pairs.items():
        ratios = [expected / measured for expected, measured in found]
        rates = [measured for _, measured in found]
        print(f"{name:<36}{median(e for e, _ in found):>10.1f}{median(rates):>10.1f}{median(ratios):>8.2f}"
              f"{min(ratios):>8.2f}{max(ratios):>9.2f}{max(rates) / min(rates):>15.2f}x")  # fmt: skip


if __name__ == "__main__":
    main()
