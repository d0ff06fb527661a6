"""One run of a study in processes of its own: train, evaluate on the way, measure normalizers, write `result.json`.

    python -m jobs.studies.unit FOLDER          (or under torchrun / deepspeed; FOLDER/unit.json says what to do)

Started again it continues from the newest checkpoint; the result is written last, so that it exists for finished runs
only.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import finished_checkpoints
from pipeline.config import to_tree
from pipeline.errors import UserError
from pipeline.normalizers import checkpoints_of, measure
from pipeline.objectives import Objective
from pipeline.objectives.frame import SoftmaxObjective
from pipeline.recipe import load_recipe
from pipeline.telemetry import METRICS_NAME
from pipeline.train import open_run
from pipeline.trainer import Trainer
from pipeline.versions import versions
from pipeline.world import World

SPEC_NAME, RESULT_NAME = "unit.json", "result.json"
NOT_SCORES = ("kind", "step", "time")


def main(folder: Path) -> int:
    """Run the unit in `folder`. Returns the exit code of training."""
    spec = json.loads((folder / SPEC_NAME).read_text(encoding="utf-8"))
    run = load_recipe(spec["recipe"], spec["overrides"])
    with open_run(run, resume="latest") as trainer:
        world, first, traffic = trainer.world, trainer.step, metered(trainer.objective, trainer.world)
        code = trainer.fit()
        if code:
            return code
        memory = max(world.gather_objects(_peak_mib(world)))
        normalizers = _normalizers(trainer, anchors=spec["anchors"]) if spec["measure"] == "normalizers" else []
        if world.is_main:
            rows = read_rows(folder / METRICS_NAME)
            result = {
                "label": spec["label"],
                "batch_size": run.batch_size,
                "config": to_tree(run),
                "ranks": world.size,
                "versions": versions(),
                "curve": curve_of(rows, batch_size=run.batch_size),
                "last": {k: v for k, v in last_of(rows, "train").items() if k not in NOT_SCORES},
                "step_ms": step_times(rows, batch_size=run.batch_size),
                "peak_memory_mib": memory,
                "traffic_bytes_per_step": _traffic(traffic, steps=trainer.step - first),
                "normalizers": normalizers,
            }
            temporary = folder / f".{RESULT_NAME}"
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, folder / RESULT_NAME)
            _drop_checkpoints(folder)
        world.barrier()
    return 0


def metered(objective: Objective, world: World) -> Counter[str]:
    """A counter that the objective's own collectives add to from now on: not those of checks, evaluation or saving."""
    spent: Counter[str] = Counter()
    for name in ("prefetch", "compute", "commit"):
        setattr(objective, name, _counting(getattr(objective, name), world, spent))
    return spent


def _counting(call: Callable[..., Any], world: World, spent: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        before = Counter(world.traffic)
        result = call(*args, **kwargs)
        spent.update(world.traffic - before)
        return result

    return counted


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def last_of(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The last record of a kind; {} when there is none."""
    return next((row for row in reversed(rows) if row["kind"] == kind), {})


def curve_of(rows: list[dict[str, Any]], *, batch_size: int) -> list[dict[str, Any]]:
    """Every evaluation on the way: step, samples seen, and scores by task and aggregate."""
    found = [row for row in rows if row["kind"] == "evaluation"]
    return [
        {
            "step": row["step"],
            "samples": row["step"] * batch_size,
            "scores": {key: value for key, value in row.items() if key not in NOT_SCORES},
        }
        for row in found
    ]


def step_times(rows: list[dict[str, Any]], *, batch_size: int) -> dict[str, float]:
    """Milliseconds of a step and of its phases: medians over the records but the first, which holds the warm-up."""
    trained = [row for row in rows if row["kind"] == "train"][1:]
    if not trained:
        return {}
    whole = [1e3 * batch_size / row["samples_per_second"] for row in trained]
    phases = sorted({key for row in trained for key in row if key.startswith("time_")} | {"data_wait"})
    parts = {key.removeprefix("time_"): [ms * row.get(key, 0.0) for ms, row in zip(whole, trained, strict=True)]
             for key in phases}  # fmt: skip
    return {"whole": statistics.median(whole), **{key: statistics.median(values) for key, values in parts.items()}}


def _normalizers(trainer: Trainer, *, anchors: int | None) -> list[dict[str, Any]]:
    """A measurement for every checkpoint that was kept; none for an objective without normalizers."""
    if not isinstance(trainer.objective, SoftmaxObjective):
        return []

    def refuse(message: str) -> None:
        raise UserError(message)

    run, world = trainer.run, trainer.world
    checkpoints = checkpoints_of(Path(run.output), on_damage=refuse)
    return [measure(run, checkpoint, world=world, limit=anchors)[0].record() for checkpoint in checkpoints]


def _traffic(traffic: Mapping[str, int], *, steps: int) -> dict[str, float] | None:
    """Payload bytes that a rank gives to each collective of the objective a step; None where no step was taken now."""
    if not steps:
        return None
    return {key.removesuffix(".bytes"): value / steps for key, value in traffic.items() if key.endswith(".bytes")}


def _peak_mib(world: World) -> float:
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _drop_checkpoints(folder: Path) -> None:
    """Keep the last one: hundreds of small runs would fill a disk."""
    for path in finished_checkpoints(folder)[:-1]:
        shutil.rmtree(path)


if __name__ == "__main__":
    # Launchers put their own arguments (--local_rank=0) before ours.
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--local")]
    try:
        sys.exit(main(Path(given[-1])))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
