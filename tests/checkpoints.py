"""Checkpoints of a small untrained model, and results that can be compared byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.model.model_folder import save_open_clip
from pipeline.model.towers import ModelConfig, build_towers


def save_checkpoint(folder: Path, seed: int) -> Path:
    """An open_clip folder."""
    towers, architecture = build_towers(ModelConfig(arch="scenes-vit-tiny"), seed=seed)
    folder.mkdir(parents=True)
    save_open_clip(folder, state=towers.clip.state_dict(), architecture=architecture, logit_scale=2.6, logit_bias=None)
    return folder


def save_step(run: Path, step: int) -> Path:
    """A finished checkpoint of a run, as far as a watcher looks; its weights depend on the step."""
    folder = save_checkpoint(run / "checkpoints" / f"step-{step:08d}", step)
    (folder / "checkpoint.json").write_text(json.dumps({"step": step, "files": {}}))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of an evaluation that must not change from run to run."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "timings.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
