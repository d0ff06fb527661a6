"""Checkpoints of a small untrained model, and results that can be compared byte by byte."""

import json
from dataclasses import replace

from pipeline.evaluation import evaluate
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.model.evaluation_model import for_evaluation
from pipeline.model.model_folder import save_open_clip
from pipeline.model.towers import ModelConfig, build_towers

QUICK = EvaluationConfig(workers=0, micro_batch=16)
"""Settings for a suite of a few samples."""


def scored(given, suite, output, **settings):
    """Evaluate one checkpoint or model."""
    (evaluation,) = evaluate(given, suite=suite, output=output, config=replace(QUICK, **settings))
    return evaluation


def make_model(seed, *, image_size=None):
    towers, architecture = build_towers(ModelConfig(arch="scenes-vit-tiny", image_size=image_size), seed=seed)
    return for_evaluation(towers, architecture, source=f"model-{seed}")


def save_checkpoint(folder, seed):
    """Save an untrained model as an open_clip folder."""
    towers, architecture = build_towers(ModelConfig(arch="scenes-vit-tiny"), seed=seed)
    folder.mkdir(parents=True)
    save_open_clip(folder, state=towers.clip.state_dict(), architecture=architecture, logit=(2.6, None))
    return folder


def save_step(run, step):
    """Write the parts of a finished checkpoint that a watcher reads; the weights depend on the step."""
    folder = save_checkpoint(run / "checkpoints" / f"step-{step:08d}", step)
    (folder / "checkpoint.json").write_text(json.dumps({"step": step, "files": {}}))
    return folder


def contents(folder):
    """Return all files of an evaluation that must be identical between runs; the lock may be in another folder."""
    aside = ("timings.json", "suite.lock.json")
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in aside)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
