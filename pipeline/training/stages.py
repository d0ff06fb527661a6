"""Cheaper stages at the start of a run: smaller images, shorter texts, fewer patches (CLIPA, FLIP).

Every stage has towers, engine and loader of its own, which start from the checkpoint at the end of the stage before.
Passing to the next stage is therefore the same as resuming: the data order goes on, and a run that is interrupted at a
boundary ends with the weights of one that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from pipeline.engine.optim import stage_steps
from pipeline.model.model_folder import resized_state
from pipeline.model.towers import build_towers, text_batching, without_weights
from pipeline.training.recipe import RunConfig


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own `model` section."""

    number: int
    """Number of the stage, from 0."""
    first: int
    """Its first step."""
    end: int
    """The step after its last."""
    run: RunConfig
    """The run's configuration with this stage's `model` section."""

    def describe(self, *, image_size: int) -> str:
        """A sentence for the log."""
        model = self.run.model
        text = f", texts of up to {model.text_tokens} tokens" if model.text_tokens else ""
        patches = f", {model.patch_dropout:.0%} of the patches dropped" if model.patch_dropout else ""
        steps = f"steps {self.first:,} to {self.end:,} of {self.run.total_steps:,}"
        return f"Stage {self.number + 1}, {steps}: images of {image_size} px{text}{patches}."


def stages_of(run: RunConfig) -> Iterator[Stage]:
    """The stages of a run in order; the last one has the recipe's own `model` section."""
    first = 0
    for number, (settings, end) in enumerate(stage_steps(run.schedule, total_steps=run.total_steps)):
        model = run.model
        if settings is not None:
            model = replace(
                model,
                image_size=settings.image_size or model.image_size,
                text_tokens=settings.text_tokens or model.text_tokens,
                patch_dropout=model.patch_dropout if settings.patch_dropout is None else settings.patch_dropout,
            )
        yield Stage(number, first, end, replace(run, model=model))
        first = end


def stage_at(run: RunConfig, step: int) -> Stage:
    """The stage that takes step `step` (from 0); after the run's end, the last one."""
    stages = list(stages_of(run))
    return next((stage for stage in stages if step < stage.end), stages[-1])


def check_stages(run: RunConfig) -> None:
    """Check on shapes that every stage's towers can be built and can start from the weights of the stage before.

    Raises:
        UserError: The architecture's weights cannot be resized, or its texts cannot be cut.
    """
    if not run.schedule.stages:
        return
    before: dict[str, Tensor] = {}
    for stage in stages_of(run):
        towers, _ = build_towers(without_weights(stage.run.model), seed=0, device="meta")
        model = stage.run.model
        text_batching(towers.clip, model)
        weights = towers.clip.state_dict()
        resized_state(before, shapes={name: value.shape for name, value in weights.items()})
        before = weights
