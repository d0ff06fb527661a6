"""Kill a run at random moments and resume it, each time on another layout: is anything lost?

    python -m jobs.bench.kills --output kills.json           # 100 kills on changing layouts, 20 on one layout
    python -m jobs.bench.kills --kills 4 --same-layout 2     # a short form

Three runs of the same settings on generated shards: one undisturbed (2 ranks, ZeRO stage 1), one killed with SIGKILL
and resumed on 1, 2 or 4 ranks at a ZeRO stage from 0 to 3, and one killed and resumed on the undisturbed layout.
Kills alternate between all ranks and a single one (the others then get two seconds, and are killed as a launcher
would), and fall into the start, into steps, and into the writing of checkpoints. A run that has reached its end is
not killed again. The result, one JSON file, says whether every epoch had the same samples in the same order as in the
undisturbed run, how far losses and weights differ, and whether they are the same bits where the layout stayed. Exit
code 1: something was lost. On a slow disk, TMPDIR=/dev/shm saves most of the time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from jobs.bench.loader import make_shards
from pipeline.checkpoint.layout import FOLDER_NAME, META_NAME, PREFIX, finished_checkpoints, read_meta
from pipeline.files import write_json
from pipeline.metrics.sinks import METRICS_NAME

RANKS, STAGES = (1, 2, 4), (0, 1, 2, 3)
SAME = (2, 1)
"""Ranks and ZeRO stage of the undisturbed run, and of the run whose layout does not change."""
MOMENTS = ("start", "step", "step", "checkpoint", "checkpoint")
BATCH = 16
TOLERANCE = 1e-4
"""Largest relative difference of a loss between layouts: sums are rounded in another order."""
STEPS_PER_KILL = 3
"""So many steps are there for each kill; most starts advance by one or two."""
SECONDS_TO_FOLLOW = 2.0
SECONDS_PER_START = 300.0


def settings(work: Path, name: str, *, stage: int, steps: int) -> list[str]:
    return [
        f"output={work / name}",
        f"data.sources={work / 'shards'}",
        f"samples={steps * BATCH}",
        f"batch_size={BATCH}",
        f"engine.deepspeed=zero{stage}_fp32",
        *("data.streams=8", "data.shuffle_buffer=10", "data.workers=0", "model.arch=scenes-vit-micro"),
        *("objective.prototypes=32", "objective.restart_every=8", "objective.inner_steps=2", "objective.rho=2.5"),
        *("optimizer.eps=1e-5", "schedule.warmup_steps=3", "ema.decay=0.9", "checkpoint.every=1"),
        *("engine.device=cpu", "engine.probe=false", "engine.timeout_minutes=2"),
        *("telemetry.every=1", "telemetry.tensorboard=false", "telemetry.progress=quiet"),
    ]


def start(arguments: list[str], *, ranks: int, log: Path) -> list[ForkProcess]:
    """Fork the ranks of a run from this process, which has imported the heavy packages."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(arguments, {**shared, "RANK": rank, "LOCAL_RANK": rank}, log))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def run_rank(arguments: list[str], environment: dict[str, Any], log: Path) -> None:
    from jobs.cli import run as run_command
    from jobs.train import command

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.argv = ["jobs.train", *arguments, "--resume", "latest"]
    run_command(command, prog_name="jobs.train")


def last_step(run: Path) -> int:
    return max((int(path.name.removeprefix(PREFIX)) for path in finished_checkpoints(run)), default=0)


def wait_for_moment(run: Path, moment: str, *, ranks: list[ForkProcess], draw: random.Random, seconds: float) -> None:
    """Return at a random time in the start of a run, in its steps, or in the writing of a checkpoint, or at its end."""
    here, deadline = last_step(run), time.monotonic() + SECONDS_PER_START

    def runs() -> bool:
        return time.monotonic() < deadline and all(rank.is_alive() for rank in ranks)

    if moment == "start":
        deadline = min(deadline, time.monotonic() + draw.uniform(0, seconds))
        while runs() and last_step(run) <= here:  # one rank starts faster than four
            time.sleep(0.01)
        return
    while runs() and last_step(run) <= here:
        time.sleep(0.01)
    if moment == "checkpoint":
        while runs() and not any((run / FOLDER_NAME).glob(f".{PREFIX}*")):
            time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.03))
    else:
        time.sleep(draw.uniform(0, 0.5))


def end(processes: list[ForkProcess], victims: list[ForkProcess]) -> list[int | None]:
    """Kill some ranks, give the others time to notice, and kill them, too. Returns the exit codes."""
    for process in victims:
        process.kill()
    deadline = time.monotonic() + SECONDS_TO_FOLLOW
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def killed_run(
    work: Path, name: str, *, kills: int, layouts: list[tuple[int, int]], steps: int, seed: int
) -> Counter[str]:
    """Kill a run `kills` times, each start on a random layout, and let the last start finish. Returns the counts."""
    draw, run, done, startup = random.Random(seed), work / name, Counter[str](), 5.0
    while True:
        ranks, stage = draw.choice(layouts)
        arguments = settings(work, name, stage=stage, steps=steps)
        begin = time.monotonic()
        processes = start(arguments, ranks=ranks, log=work / f"{name}.log")
        if done["kills"] < kills:
            moment, victims = draw.choice(MOMENTS), draw.choice([processes, [draw.choice(processes)]])
            wait_for_moment(run, moment, ranks=processes, draw=draw, seconds=startup)
            if all(process.is_alive() for process in processes):
                startup = startup if moment == "start" else time.monotonic() - begin
                what = "all ranks" if len(victims) == len(processes) else "one rank"
                end(processes, victims)
                done.update(["kills", f"while {moment}", f"of {what}", f"{ranks} ranks, stage {stage}"])
                print(
                    f"{name}: kill {done['kills']} ({moment}, {what} of {ranks}) at step {last_step(run)}", flush=True
                )
                continue
        for process in processes:
            process.join(SECONDS_PER_START)
        codes = end(processes, [])
        if any(codes):
            printed = (work / f"{name}.log").read_text(errors="replace")
            raise SystemExit(f"{printed[-5000:]}\n{name} ended with {codes} after {done['kills']} kills")
        return done


def outcome(run: Path) -> dict[str, Any]:
    """What a finished run has trained: its epochs, losses, and the hashes of its last checkpoint's files."""
    records = [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]
    events = [record["data"] for record in records if record["kind"] == "event" and "data" in record]
    meta = read_meta(finished_checkpoints(run)[-1])
    return {
        "epochs": {report["epoch"]: report for report in events},  # an epoch's end may have been trained twice
        "losses": {record["step"]: record["loss"] for record in records if record["kind"] == "train"},
        "data": meta["data"],
        "files": {name: entry["sha256"] for name, entry in meta["files"].items() if name != META_NAME},
        "path": finished_checkpoints(run)[-1],
    }


def largest_difference(one: Path, other: Path) -> float:
    """The largest absolute difference of two checkpoints' weights."""
    from safetensors.torch import load_file

    left, right = (load_file(path / "open_clip_model.safetensors") for path in (one, other))
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def compare(run: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """How a killed run differs from the undisturbed one."""
    found = outcome(run)
    same_steps = found["losses"].keys() == reference["losses"].keys()
    pairs = [(found["losses"].get(step, float("inf")), loss) for step, loss in reference["losses"].items()]
    return {
        "epochs": len(reference["epochs"]),
        "same_samples_in_the_same_order": found["epochs"] == reference["epochs"] and found["data"] == reference["data"],
        "same_steps": same_steps,
        "largest_relative_difference_of_a_loss": max(abs(a - b) / abs(b) for a, b in pairs),
        "largest_difference_of_a_weight": largest_difference(found["path"], reference["path"]),
        "same_bits": found["files"] == reference["files"] and found["losses"] == reference["losses"],
    }


def measure(work: Path, *, kills: int, same_layout: int, epoch: int, seed: int) -> dict[str, Any]:
    import pipeline.training.run  # noqa: F401 (the ranks are forked with it)

    most = max(kills, same_layout)
    steps = max(2, -(-(STEPS_PER_KILL * most + 5) // epoch)) * epoch  # whole epochs
    (work / "shards").mkdir()
    make_shards(work / "shards", shards=8, samples=BATCH * epoch // 8, shorter=40)
    every = [(ranks, stage) for ranks in RANKS for stage in STAGES]
    run = {"steps": steps, "batch": BATCH, "pairs": BATCH * epoch, "seed": seed}
    plain = killed_run(work, "undisturbed", kills=0, layouts=[SAME], steps=steps, seed=seed)
    assert not plain["kills"]
    reference = outcome(work / "undisturbed")
    cases = {}
    for name, count, layouts in (("changing-layouts", kills, every), ("same-layout", same_layout, [SAME])):
        begin = time.monotonic()
        done = killed_run(work, name, kills=count, layouts=layouts, steps=steps, seed=seed)
        seconds = round(time.monotonic() - begin)
        cases[name] = {"seconds": seconds, **dict(sorted(done.items())), **compare(work / name, reference)}
    return {"run": run, **cases}


def is_intact(result: dict[str, Any]) -> bool:
    """Whether nothing was lost in any case."""
    changing, same = result["changing-layouts"], result["same-layout"]
    return (
        all(case["same_samples_in_the_same_order"] and case["same_steps"] for case in (changing, same))
        and bool(same["same_bits"])
        and changing["largest_relative_difference_of_a_loss"] <= TOLERANCE
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="kills on changing layouts")
    parser.add_argument("--same-layout", type=int, default=20, metavar="KILLS", help="kills on one layout")
    parser.add_argument("--epoch", type=int, default=30, metavar="STEPS", help="steps of an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the result there, too")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed at the end of every forked rank
    try:
        result = measure(
            work, kills=options.kills, same_layout=options.same_layout, epoch=options.epoch, seed=options.seed
        )
    finally:
        shutil.rmtree(work)
    print(json.dumps(result, indent=1))
    if options.output:
        write_json(options.output, result)
    if not is_intact(result):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
