"""Kill a run at random moments and resume it, each time on another layout: is anything lost?

    python -m jobs.bench.kills --kills 110 --output kills.json             on changing layouts
    python -m jobs.bench.kills --kills 30 --same-layout
    python -m jobs.bench.kills --kills 25 --objective sogclr               a table entry per sample, which moves

Two runs of the same settings on generated shards: one undisturbed (2 ranks, ZeRO stage 1), and one killed with SIGKILL
and resumed on 1, 2 or 4 ranks at a ZeRO stage from 0 to 3, or on the undisturbed layout. They have two stages of image
sizes, are evaluated every few steps, roll back once or more (the loss of three batches in a row is NaN, and of single
batches in later epochs), and copy their checkpoints to a mirror.

Kills alternate between all ranks and a single one (the others then get two seconds, and are killed as a launcher
would), and fall into the start, into steps, into the writing of checkpoints and into evaluations. After some of them
the checkpoints on disk are removed, and the mirror's are used. The result, one JSON file, says whether every epoch had
the same samples in the same order as in the undisturbed run, how far losses differ, and whether weights, losses, scores
and rollbacks are the same bits. Exit code 1: something was lost. On a slow disk, TMPDIR=/dev/shm saves time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from torch import Tensor

from data_prep.scenes.scene import ScenesConfig
from data_prep.scenes.scene_suite import write_suite
from jobs.bench.loader import make_shards
from pipeline.distributed.world import World, free_port
from pipeline.files import write_json
from pipeline.objectives import Objective, ObjectiveOutput
from pipeline.run_files import (
    FOLDER_NAME,
    META_NAME,
    METRICS_NAME,
    PREFIX,
    finished_checkpoints,
    read_meta,
    read_records,
    step_of,
)
from pipeline.training.recipe import RunConfig, load_recipe
from pipeline.versions import source_commit

CALM = (2, 1)
"""Ranks and ZeRO stage of the undisturbed run, and of the run whose layout does not change."""
LAYOUTS = tuple(itertools.product((1, 2, 4), (0, 1, 2, 3)))
MOMENTS = ("start", "step", "checkpoint", "checkpoint", "evaluation")
LONGEST_WAIT = {"start": 0.0, "step": 0.5, "checkpoint": 0.03, "evaluation": 0.3}
"""Seconds after the moment is reached."""
DISK_LOST = 0.15
"""Share of the kills after which the checkpoints on disk are gone, too."""
BATCH = 16
STEPS_PER_KILL = 3
"""So many steps are there for each kill; most starts advance by one or two."""
SECONDS_TO_FOLLOW, SECONDS_PER_START = 2.0, 1200.0
BAD_STEPS = range(7, 10)
"""The batches of the first epoch whose loss is NaN."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss between layouts: sums are rounded in another order."""
NEAR_ZERO = 0.01
"""Losses below this are compared as if they were this large: SogCLR's crosses zero, its terms of about 1 do not."""


def settings(run: Path, *, steps: int, stage: int, objective: str) -> list[str]:
    neuclip = ("objective.prototypes=48", "objective.restart_every=8", "objective.inner_steps=2", "objective.rho=2.5")
    return [
        f"output={run}",
        f"data.sources={run.parent / 'shards'}",
        f"samples={steps * BATCH}",
        f"batch_size={BATCH}",
        f"engine.deepspeed=zero{stage}_fp32",
        *("data.streams=8", "data.shuffle_buffer=10", "data.workers=0", "model.arch=scenes-vit-micro"),
        *("optimizer.eps=1e-5", "schedule.warmup_steps=3", "ema.decay=0.9", "checkpoint.every=1"),
        *("engine.device=cpu", "engine.probe=false", "engine.timeout_minutes=10", "engine.lost_rank_seconds=300"),
        *("telemetry.every=1", "telemetry.tensorboard=false", "telemetry.progress=quiet"),
        *("schedule.stages=[{until: 0.5, image_size: 16}]", "max_skipped_steps=2", "max_rollbacks=5"),
        *(f"evaluation.suite={run.parent / 'suite'}", "evaluation.every=4", "evaluation.workers=0"),
        *(f"checkpoint.mirror=file://{run.parent / 'mirror'}",),
        *(f"objective.name={objective}", *(neuclip if objective == "neuclip" else ())),
    ]


def poison(run: RunConfig) -> None:
    """From now on, the loss of a batch with one of a few samples is NaN: of one sample of each batch of BAD_STEPS.

    The order of samples is the same for any number of ranks; the other ranks learn the loss from this one's.
    """
    from pipeline.model.towers import build_towers
    from pipeline.training.build import loader_of

    architecture, bad = build_towers(run.model, seed=0, device="meta")[1], set[int]()
    with loader_of(run, architecture=architecture, world=World()) as loader:
        for step in range(max(BAD_STEPS) + 1):
            batch = next(loader)
            if step in BAD_STEPS:
                bad.add(int(batch.sample_id[0]))
    plain = Objective.compute

    @functools.wraps(plain)
    def compute(self: Objective, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> ObjectiveOutput:
        output = plain(self, image, text, sample_ids=sample_ids)
        return replace(output, loss=output.loss * math.nan) if bad.intersection(sample_ids.tolist()) else output

    setattr(Objective, "compute", compute)  # noqa: B010 (mypy refuses the assignment)


def start(arguments: list[str], *, ranks: int, log: Path) -> list[ForkProcess]:
    """Fork the ranks of a run from this process, which has imported the heavy packages."""
    port = free_port()

    def run_rank(rank: int) -> None:
        from jobs.cli import run as run_command
        from jobs.train import command

        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()}
        run_command(command, arguments, prog_name="jobs.train")

    processes = [multiprocessing.get_context("fork").Process(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def last_step(run: Path) -> int:
    return max(map(step_of, finished_checkpoints(run)), default=0)


def wait_for_moment(run: Path, moment: str, *, ranks: list[ForkProcess], draw: random.Random, seconds: float) -> None:
    """Return at a random time in one of MOMENTS, or at the run's end; a start takes about `seconds`."""
    here, tested = last_step(run), set((run / "evaluation").glob("step-*"))
    deadline = time.monotonic() + (draw.uniform(0, seconds) if moment == "start" else SECONDS_PER_START)

    def wait_until(is_reached: Callable[[], bool]) -> None:
        while time.monotonic() < deadline and all(rank.is_alive() for rank in ranks) and not is_reached():
            time.sleep(0.0005 if moment == "checkpoint" else 0.01)

    wait_until(lambda: last_step(run) > here)  # also at a "start": one rank starts faster than four
    if moment == "evaluation":
        wait_until(lambda: set((run / "evaluation").glob("step-*")) > tested)
    elif moment == "checkpoint":
        wait_until(lambda: any((run / FOLDER_NAME).glob(f".{PREFIX}*")))
    time.sleep(draw.uniform(0, LONGEST_WAIT[moment]))


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
    run: Path, *, kills: int, layouts: Sequence[tuple[int, int]], steps: int, objective: str, seed: int
) -> dict[str, int]:
    """Kill a run, each start on a random layout, and let the last start finish. Returns the counts."""
    log, done, startup = run.with_suffix(".log"), Counter[str](), 5.0
    while True:
        draw = random.Random(f"{seed}, {run.name}, {done['kills']}")
        ranks, stage = draw.choice(layouts)
        begin = time.monotonic()
        arguments = settings(run, steps=steps, stage=stage, objective=objective)
        processes = start([*arguments, "--resume", "latest"], ranks=ranks, log=log)
        if done["kills"] < kills:
            moment, victims = draw.choice(MOMENTS), draw.choice([processes, [draw.choice(processes)]])
            wait_for_moment(run, moment, ranks=processes, draw=draw, seconds=startup)
            if all(process.is_alive() for process in processes):
                startup = startup if moment == "start" else time.monotonic() - begin
                what = "all ranks" if len(victims) == len(processes) else "one rank"
                end(processes, victims)
                done.update(["kills", f"while {moment}", f"of {what}", f"{ranks} ranks, stage {stage}"])
                said = f"{run.name}: kill {done['kills']} ({moment}, {what} of {ranks}) at step {last_step(run)}"
                if (run.parent / "mirror" / run.name / FOLDER_NAME).is_dir() and draw.random() < DISK_LOST:
                    shutil.rmtree(run / FOLDER_NAME)  # the mirror has others
                    said += ", and its checkpoints are lost"
                    done.update(["with the loss of the checkpoints on disk"])
                print(said, flush=True)
                continue
        for process in processes:
            process.join(SECONDS_PER_START)
        if any(codes := end(processes, [])):
            printed = log.read_text(errors="replace")
            raise SystemExit(f"{printed[-5000:]}\n{run.name} ended with {codes} after {done['kills']} kills")
        return dict(sorted(done.items()))


def outcome(run: Path) -> dict[str, Any]:
    """What a finished run has trained: its epochs, losses, and the hashes of its last checkpoint's files."""
    records, meta = read_records(run / METRICS_NAME), read_meta(finished_checkpoints(run)[-1])
    kinds = {kind: [one for one in records if one["kind"] == kind] for kind in ("event", "train", "evaluation")}
    return {
        "epochs": {one["data"]["epoch"]: one["data"] for one in kinds["event"] if "data" in one},  # it may end twice
        "losses": {one["step"]: repr(one["loss"]) for one in kinds["train"]},
        "scores": {one["step"]: {**one, "time": None} for one in kinds["evaluation"]},
        "rollbacks": kinds["train"][-1]["rollbacks"],
        "data": meta["data"],
        "files": {name: entry["sha256"] for name, entry in meta["files"].items() if name != META_NAME},
    }


def relative_difference(loss: float, expected: float) -> float:
    """|loss - expected| / |expected|, near zero / NEAR_ZERO; infinite if only one of them is a number."""
    if math.isnan(loss) or math.isnan(expected):
        return 0.0 if math.isnan(loss) and math.isnan(expected) else math.inf
    return abs(loss - expected) / max(abs(expected), NEAR_ZERO)


def compare(run: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """How a killed run differs from the undisturbed one."""
    ended = outcome(run)
    losses = [(float(ended["losses"].get(step, "inf")), float(loss)) for step, loss in reference["losses"].items()]
    return {
        "epochs": len(reference["epochs"]),
        "same_samples_in_the_same_order": ended["epochs"] == reference["epochs"] and ended["data"] == reference["data"],
        "same_steps": ended["losses"].keys() == reference["losses"].keys(),
        "evaluations": len(reference["scores"]),
        "same_evaluations": ended["scores"].keys() == reference["scores"].keys(),
        "rollbacks": reference["rollbacks"],
        "same_rollbacks": ended["rollbacks"] == reference["rollbacks"],
        "largest_relative_difference_of_a_loss": max(relative_difference(*pair) for pair in losses),
        "same_bits": all(ended[key] == reference[key] for key in ("files", "losses", "scores", "rollbacks")),
    }


def is_intact(result: dict[str, Any]) -> bool:
    """Whether nothing was lost, and the run was evaluated and rolled back."""
    same = ("same_samples_in_the_same_order", "same_steps", "same_evaluations", "same_rollbacks")
    return (
        all(result[key] for key in (*same, "evaluations", "rollbacks"))
        and (result["same_bits"] or not result["same_layout"])
        and result["largest_relative_difference_of_a_loss"] <= TOLERANCE
    )


def measure(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run both in an empty folder with the options of `main`: counts of kills, and how the killed run differs."""
    import pipeline.training.run  # noqa: F401 (the ranks are forked with it)

    steps = max(2, -(-(STEPS_PER_KILL * options.kills + 5) // options.epoch)) * options.epoch
    calm = work / "undisturbed"
    killed = work / ("same-layout" if options.same_layout else "changing-layouts")
    (work / "shards").mkdir()
    make_shards(work / "shards", shards=8, samples=BATCH * options.epoch // 8, shorter=40)
    write_suite(ScenesConfig(pairs=50, held_out=12, retrieval_pairs=8, image_size=32), work / "suite")
    poison(load_recipe(None, settings(calm, steps=steps, stage=CALM[1], objective=options.objective)))
    run = functools.partial(killed_run, steps=steps, objective=options.objective, seed=options.seed)
    run(calm, kills=0, layouts=[CALM])
    done = run(killed, kills=options.kills, layouts=[CALM] if options.same_layout else LAYOUTS)
    facts = {"commit": source_commit(), "steps": steps, "batch": BATCH, "pairs": BATCH * options.epoch}
    facts |= {name: getattr(options, name) for name in ("objective", "same_layout", "seed")}
    return {**facts, **done, **compare(killed, outcome(calm))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=110)
    parser.add_argument("--same-layout", action="store_true", help="resume on the layout of the undisturbed run")
    parser.add_argument("--objective", default="neuclip", help="the method [neuclip]")
    parser.add_argument("--epoch", type=int, default=30, metavar="STEPS", help="steps of an epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the result there, too")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed at the end of every forked rank
    try:
        result = measure(work, options)
    finally:
        shutil.rmtree(work)
    print(json.dumps(result, indent=1))
    if options.output:
        write_json(options.output, result)
    if not is_intact(result):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
