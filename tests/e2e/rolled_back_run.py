"""A run whose loss is NaN for some samples: it rolls back, and ends as if it had been rolled back manually."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from pipeline.distributed.start import start_world
from pipeline.distributed.world import World, leave
from pipeline.errors import UserError
from pipeline.objectives import ObjectiveOutput, register
from pipeline.objectives.openclip import OpenClip, OpenClipConfig
from pipeline.training.recipe import RunConfig, load_recipe
from pipeline.training.run import setup, train

POISON: set[int] = set()
BAD_STEPS = (7, 8, 9)


@register("poisonous", OpenClipConfig)
class Poisonous(OpenClip):
    """`openclip`, but NaN for batches that contain one of the samples in POISON on any rank."""

    def compute(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> ObjectiveOutput:
        output = super().compute(image, text, sample_ids=sample_ids)
        if not POISON & set(sample_ids.tolist()):
            return output
        return ObjectiveOutput(output.loss * torch.nan, output.grad_image, output.grad_text, output.metrics)


def choose_poison(run: RunConfig, world: World) -> None:
    """Choose one sample from each batch that the steps in BAD_STEPS would receive."""
    with setup(run, world=world, resume=None) as trainer:
        for step in range(max(BAD_STEPS) + 1):
            batch = next(trainer.state.loader)
            if step in BAD_STEPS:
                POISON.add(int(batch.sample_id[0]))


def by_hand(out: str, run: RunConfig, world: World) -> None:
    """Start from the checkpoint at step 4 of `out`, draw the batches up to the last bad one, and continue training."""
    folder = Path(run.output, "checkpoints")
    if world.is_main:
        folder.mkdir()
        shutil.copytree(Path(out, "checkpoints", "step-00000004"), folder / "step-00000004")
    world.barrier()
    with setup(run, world=world, resume="latest") as trainer:
        assert trainer.state.step == 4
        for _ in range(4, max(BAD_STEPS) + 1):
            next(trainer.state.loader)
        assert trainer.fit().start is None


def main() -> None:
    out, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with start_world(device="cpu") as world:

        def recipe(name: str, *more: str) -> RunConfig:
            kept = ["objective.name=poisonous", "max_skipped_steps=2", "checkpoint.keep_last=9", *more]
            run = load_recipe(None, [*overrides, f"output={out}/{name}", *kept])
            Path(run.output).mkdir(exist_ok=True)
            return run

        choose_poison(recipe("plan"), world)
        found["poison"] = world.gather_objects(sorted(POISON))[0]
        run = recipe("itself", "max_rollbacks=1", "checkpoint.every=2")
        assert train(run, world=world) == 0
        by_hand(run.output, recipe("hand", "checkpoint.every=2"), world)
        limited = recipe("limited", "max_rollbacks=1", "samples=400")
        POISON.update(range(1000))
        if world.is_main:
            shutil.copytree(run.output, limited.output, dirs_exist_ok=True)
        world.barrier()
        try:
            train(
                limited,
                resume="latest",
                world=world,
                on_trainer=lambda trainer: found.update(restored=asdict(trainer.state.skipped)),
            )
        except UserError as error:
            found["stopped"] = str(error)
        if world.is_main:
            ends = [
                load_file(Path(out, name, "checkpoints", "step-00000012", "open_clip_model.safetensors"))
                for name in ("itself", "hand")
            ]
            found["same"] = all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
            Path(out, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    leave(0)
