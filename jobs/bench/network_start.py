"""Does NeuCLIP's network start better from stored features of the whole dataset than from the first batches?

    python -m jobs.bench.network_start WEIGHTS SHARDS --features own=FOLDER other=FOLDER --work FOLDER

A run continues from the weights with `objective.name=neuclip`. Its network starts empty (`none`: the first batches fill
it), or with the features of randomly drawn pairs in its queue, from which the first restart fills it: those that
`neuclip features` has stored of the same weights, or of another model of the same dimension. Printed are the mean
squared errors of the log-normalizers against the exact ones, before (`cold`) and after (`in use`) a step's inner
updates, with the 95% interval of the differences from `none`, paired by seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import fmean

import torch

from jobs.studies.outcomes import Spread
from jobs.studies.unit import _normalizers as normalizers
from pipeline.files import write_json
from pipeline.objectives.npn.neuclip import NeuClip
from pipeline.objectives.npn.prototype_network import PrototypeNpn
from pipeline.training.recipe import load_recipe
from pipeline.training.run import stage_trainers
from pipeline.training.teacher import StoredTeacher

RESULT = "errors.json"
STEPS, EVERY, PROTOTYPES, ANCHORS = 32, 8, 1024, 2048


def train(overrides: list[str], *, features: Path | None, seed: int) -> None:
    """Train a run whose network starts from stored features, if any."""
    run = load_recipe(None, overrides)
    with closing(stage_trainers(run)) as trainers:
        for trainer in trainers:
            objective = trainer.state.objective
            if features is not None:
                assert isinstance(objective, NeuClip)
                assert isinstance(objective.npn, PrototypeNpn)
                stored = StoredTeacher(features, setting="--features")
                drawn = torch.randperm(stored.facts.samples, generator=torch.Generator().manual_seed(seed))[:PROTOTYPES]
                teacher, queue = stored.of(drawn, epoch=0, device=trainer.world.device), objective.npn.queue
                queue.features[0].copy_(teacher.text)
                queue.features[1].copy_(teacher.image)
                queue.written.fill_(PROTOTYPES)
            if trainer.fit():
                raise SystemExit("a run was stopped")
            write_json(Path(run.output) / RESULT, {"rows": normalizers(trainer, anchors=ANCHORS, last=True)})


def values_of(run: Path) -> dict[str, float]:
    """The printed values of a run."""
    rows = json.loads((run / RESULT).read_text())["rows"]
    return {f"{kind}, step {row['step']}": row[kind]["mse"] for kind in ("cold", "in_use") for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("shards")
    parser.add_argument("--features", nargs="*", default=[], help="NAME=FOLDER")
    parser.add_argument("--work", type=Path, required=True, help="Folder of the runs; finished ones are not repeated.")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # arm and seed
    given = parser.parse_args()
    arms = {"none": "", **dict(each.split("=", 1) for each in given.features)}
    runs = {(arm, seed): given.work / f"{arm}-{seed}" for arm in arms for seed in range(given.seeds)}
    if given.one:
        arm, seed = given.one[0], int(given.one[1])
        fixed = [
            f"output={runs[arm, seed]}", f"data.sources={given.shards}",
            "model.arch=pretrained", f"model.pretrained={given.weights}", "objective.name=neuclip", f"seed={seed}",
            f"objective.prototypes={PROTOTYPES}", "optimizer.lr=1e-4", "schedule.warmup_steps=10", "batch_size=64",
            "data.streams=32", "data.workers=0", f"samples={64 * STEPS}",
            f"checkpoint.every={EVERY}", f"checkpoint.keep_every={EVERY}", "telemetry.every=1",
            "telemetry.tensorboard=false", "engine.deepspeed=zero0_fp32",
        ]  # fmt: skip
        train(fixed, features=Path(arms[arm]) if arms[arm] else None, seed=seed)
        return
    for (arm, seed), folder in runs.items():
        if not (folder / RESULT).is_file():
            subprocess.run([sys.executable, "-m", "jobs.bench.network_start", *sys.argv[1:], "--one", arm, str(seed)],
                           check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    found = {key: values_of(folder) for key, folder in runs.items()}
    for name in found["none", 0]:
        print(name)
        for arm in arms:
            gain = Spread(tuple(found[arm, seed][name] - found["none", seed][name] for seed in range(given.seeds)))
            mean = fmean(found[arm, seed][name] for seed in range(given.seeds))
            print(f"  {arm:<8} {mean:8.4f}" + (f"   {gain.mean:+.4f} ± {gain.half_width:.4f}" if arm != "none" else ""))


if __name__ == "__main__":
    main()
