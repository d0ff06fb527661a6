"""Train every registered objective for a few steps, resume from the middle, and record whether the runs agree."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.objectives import objective_names
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup


def main() -> None:
    out, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    agree: dict[str, bool] = {}
    with start_world(device="cpu") as world:
        for name in objective_names():
            # With default settings: some settings, such as prototypes and inner updates, exist only for some methods.
            run = load_recipe(None, [*overrides, f"output={out}/{name}", f"objective.name={name}"])
            Path(run.output).mkdir(exist_ok=True)
            folders = [Path(run.output) / "checkpoints" / f"step-{step:08d}" for step in (3, 6)]
            with setup(run, world=world, resume=None) as trainer:
                assert trainer.fit().start is None
            once = {file: load_file(folders[1] / f"{file}.safetensors") for file in ("objective", "open_clip_model")}
            shutil.rmtree(folders[1])
            with setup(run, world=world, resume="latest") as trainer:
                assert trainer.state.step == 3
                assert trainer.fit().start is None
            agree[name] = all(
                torch.equal(value, load_file(folders[1] / f"{file}.safetensors")[key])
                for file, state in once.items()
                for key, value in state.items()
            )
    (Path(out) / "agree.json").write_text(json.dumps(agree))


if __name__ == "__main__":
    main()
    leave(0)
