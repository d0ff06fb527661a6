"""A run whose loss is NaN at chosen steps: they are skipped and recorded; too many in a row stop the run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

from pipeline.distributed.start import start_world
from pipeline.distributed.world import leave
from pipeline.errors import UserError
from pipeline.objectives import ObjectiveOutput, register
from pipeline.objectives.openclip import OpenClip, OpenClipConfig
from pipeline.training.loop import Trainer
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup
from pipeline.training.run_start import prepare_folder

POISON: set[int] = set()
ASKED: list[int] = []


@register("poisoned", OpenClipConfig)
class Poisoned(OpenClip):
    """`openclip`, but with NaN at the attempts in POISON, or at odd ones with inf in a single gradient."""

    def compute(self, image: Tensor, text: Tensor, *, sample_ids: Tensor) -> ObjectiveOutput:
        output = super().compute(image, text, sample_ids=sample_ids)
        attempt = len(ASKED)
        ASKED.append(self.steps)
        if attempt not in POISON:
            return output
        bad = torch.full_like(output.grad_text, torch.inf)
        loss = output.loss if attempt % 2 else output.loss * torch.nan
        return ObjectiveOutput(loss, output.grad_image, bad, output.metrics)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    return {
        **dict(trainer.state.engine.state.weights()),
        **{k: v.clone() for k, v in trainer.state.objective.state_dict().items()},
    }


def main() -> None:
    out, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with start_world(device="cpu") as world:
        run = load_recipe(None, [*overrides, f"output={out}", "objective.name=poisoned", "max_skipped_steps=2"])
        prepare_folder(run, world=world)
        with setup(run, world=world, resume=None) as trainer:
            POISON.update({2, 3})
            for step in range(2):
                trainer.train_step(next(trainer.state.loader))
                trainer.state.step = step + 1
            before = state_of(trainer)
            for step in (2, 3):
                batch = next(trainer.state.loader)
                assert not trainer.train_step(batch).applied
                found[f"ids {step}"] = batch.sample_id.tolist()
                trainer.state.step = step + 1
            after = state_of(trainer)
            found["untouched"] = all(torch.equal(value, before[name]) for name, value in after.items())
            assert trainer.train_step(next(trainer.state.loader)).applied
            found["moved"] = not all(torch.equal(value, before[name]) for name, value in state_of(trainer).items())
            found["asked"] = list(ASKED)
            trainer.state.step = 5
            POISON.update(range(5, 20))
            try:
                trainer.fit()
            except UserError as error:
                found["stopped"] = str(error)
    Path(out, "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    leave(0)
