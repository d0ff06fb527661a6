"""One run of a study in its own processes: train with periodic evaluation, measure normalizers, write `result.json`.

    python -m jobs.studies.unit FOLDER          (or under torchrun; FOLDER/unit.json specifies the run)

Run again, it continues from the newest checkpoint. The result is written last, so it exists only for finished runs.
"""

from __future__ import annotations

import functools
import json
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.studies.declare import RESULT_NAME, SPEC_NAME
from pipeline.analysis.normalizer_error import checkpoints_of, measure
from pipeline.config import to_tree
from pipeline.distributed.world import World, leave
from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import open_suite
from pipeline.files import write_json
from pipeline.metrics.mfu import training_flops
from pipeline.objectives import Objective
from pipeline.objectives.softmax import SoftmaxObjective
from pipeline.report.run_data import Run, read_run
from pipeline.run_files import finished_checkpoints, step_of
from pipeline.training.loop import Trainer
from pipeline.training.recipe import RunConfig, load_recipe, stages_of
from pipeline.training.run import ranks_of, train
from pipeline.versions import source_commit, versions


def main(folder: Path) -> int:
    """Run the unit in `folder`. Returns the exit code of training."""
    spec = json.loads((folder / SPEC_NAME).read_text(encoding="utf-8"))
    run = load_recipe(spec["recipe"], spec["overrides"])
    steps, traffic, has_normalizers = 0, Counter[str](), False

    def watch(trainer: Trainer) -> None:
        nonlocal steps, traffic, has_normalizers
        steps, objective = run.total_steps - trainer.state.step, trainer.state.objective
        traffic, has_normalizers = metered(objective, trainer.world), isinstance(objective, SoftmaxObjective)

    with ranks_of(run) as world:
        if code := train(run, resume="latest", world=world, on_trainer=watch):
            return code
        if step_of(finished_checkpoints(folder)[-1]) != run.total_steps:
            return 0
        normalizers = []
        if has_normalizers and spec["measure"] == "normalizers":
            checkpoints = checkpoints_of(Path(run.output), on_damage=refuse)
            normalizers = [measure(run, one, world=world, limit=spec["anchors"]) for one in checkpoints]
        if world.is_main:
            sent = {name.removesuffix(".bytes"): n for name, n in traffic.items() if name.endswith(".bytes")}
            record = read_run(folder)
            last = record.rows[-1]
            result = {
                "label": spec["label"],
                "ranks": world.size,
                "batch_size": run.batch_size,
                "config": to_tree(run),
                "versions": versions(),
                "commit": source_commit(),
                "curve": curve_of(record, suite=run.evaluation.suite),
                "last": {key: value for key, value in last.items() if key not in ("kind", "step", "time")},
                "step_ms": step_times(record.rows, batch_size=run.batch_size),
                "peak_memory_mib": 1024 * last["memory_gib" if "memory_gib" in last else "host_memory_gib"],
                "cost": cost_of(run, record.rows),
                "traffic_bytes_per_step": {name: n / steps for name, n in sent.items()} if steps else None,
                "normalizers": normalizers,
            }
            write_json(folder / RESULT_NAME, result)
            for path in finished_checkpoints(folder)[:-1]:  # those of hundreds of small runs would fill the disk
                shutil.rmtree(path)
        world.barrier()
    return 0


def refuse(message: str) -> None:
    raise UserError(message)


def metered(objective: Objective, world: World) -> Counter[str]:
    """A counter of the traffic of the objective's own collectives, without those of checks, evaluation and saving."""
    spent: Counter[str] = Counter()

    def counted(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = Counter(world.traffic)
        result = call(*args, **kwargs)
        spent.update(world.traffic - before)
        return result

    for name in ("prefetch", "compute", "commit"):
        setattr(objective, name, functools.partial(counted, getattr(objective, name)))
    return spent


def curve_of(run: Run, *, suite: str | None) -> list[dict[str, Any]]:
    """Every evaluation of the run on `suite`: step, samples seen, and scores by task and by complete aggregate.

    Raises:
        UserError: A task has no score, so that means over tasks could not be compared.
    """
    tasks = open_suite(suite).keys if suite else ()
    points = []
    for evaluation in run.evaluations:
        scores = {score.task: score.score for score in evaluation.scores}
        if missing := sorted(set(tasks) - scores.keys()):
            raise UserError(
                f"{run.folder}: no score for {', '.join(missing)} at {evaluation.checkpoint}. The reason is in its "
                "evaluation/*/summary.json; `neuclip evaluate` tries again."
            )
        scores |= {name: mean["score"] for name, mean in evaluation.aggregates.items() if mean["complete"]}
        points.append({"step": evaluation.step, "samples": evaluation.samples, "scores": scores})
    return points


def step_times(rows: Sequence[Mapping[str, Any]], *, batch_size: int) -> dict[str, float]:
    """Milliseconds of a step and its phases: medians over all records but the first, which includes the warm-up."""
    times: dict[str, list[float]] = {}
    phases = sorted({key for row in rows[1:] for key in row if key.startswith("time_")} | {"data_wait"})
    for row in rows[1:]:
        whole = 1e3 * batch_size / row["samples_per_second"]
        times.setdefault("whole", []).append(whole)
        for key in phases:
            times.setdefault(key.removeprefix("time_"), []).append(whole * row.get(key, 0.0))
    return {name: statistics.median(values) for name, values in times.items()}


def cost_of(run: RunConfig, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """CPU seconds of rank 0's training steps, and FLOPs of the towers over all ranks (forward and backward).

    CPU time is the median over a stage's records times its steps: records that contain an evaluation, a checkpoint or
    the warm-up of a stage do not count, and a run that was interrupted costs what an uninterrupted one does. `rows` are
    the run's training records, in order.
    """
    seconds = flops = 0.0
    for stage in stages_of(run):
        own = [row for row in rows if stage.first < row["step"] <= stage.end]
        warm = own[1:] or own
        if not warm:
            return {}
        steps = stage.end - stage.first
        seconds += steps * statistics.median(row["cpu_ms"] for row in warm) / 1e3
        tokens = statistics.fmean(row["text_tokens"] for row in own)
        flops += steps * run.batch_size * training_flops(stage.run.model, text_tokens=tokens)
    return {"cpu_seconds": seconds, "training_flops": flops}


if __name__ == "__main__":
    try:
        code = main(Path(sys.argv[1]))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        code = 2
    leave(code)
