"""A run's configuration: the sections of all components in one tree, and the checks between sections."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from pipeline import config as cfg
from pipeline.checkpoint.writer import CheckpointConfig
from pipeline.config import section
from pipeline.data.data_config import DataConfig, Source, as_sources
from pipeline.data.shards.check_shards import check_captions
from pipeline.engine.engine_config import EngineConfig
from pipeline.engine.engine_protocol import ENGINES
from pipeline.engine.optim import OptimizerConfig, ScheduleConfig, stage_steps
from pipeline.engine.state import EmaConfig
from pipeline.errors import UserError
from pipeline.metrics.logger import TelemetryConfig, sink_names
from pipeline.model.towers import ModelConfig
from pipeline.objectives import ObjectiveConfig, parse_objective
from pipeline.training.recipe_file import (
    DEFAULT_OBJECTIVE,
    RECIPE_KEYS,
    read_recipe,
    resolve_budget,
    resolve_methods,
)


@section
class InTrainingConfig:
    """Evaluation of a small suite while training; the ranks share the work. For larger suites use `neuclip watch`."""

    suite: str | None = None
    """A folder of tasks, or a YAML file that describes tasks; None: no evaluation while training."""
    every: int = Field(default=1000, ge=1)
    """Steps between evaluations; the weights of the last step are always evaluated."""
    workers: int | None = Field(default=None, ge=0)
    """Processes that decode images on each rank. None: one per core; 0: the rank itself, fastest for tiny suites."""
    allow_outside: bool = False
    """Read files outside of a task's folders that links or tables in them name."""


@section
class ValidationConfig:
    """Loss on held-out pairs while training: the symmetric contrastive loss (InfoNCE) of all validation pairs against
    each other at one fixed temperature, whatever the objective, so that it is comparable over steps and methods."""

    sources: Annotated[tuple[Source, ...], BeforeValidator(as_sources)] = ()
    """Held-out shards, given as in `data.sources`, without weights; none: no validation."""
    every: int = Field(default=500, ge=1)
    """Steps between validations; the weights of the last step are always validated."""
    samples: int | None = Field(default=4096, ge=2)
    """Pairs to use, the first ones of every shard in proportion to its size; None: all. Each is compared with all
    others, so losses are comparable only for equal numbers."""
    tau: float | None = Field(default=None, gt=0)
    """Temperature of the validation loss. None: the temperature that the objective starts with (for pretrained weights,
    theirs). It stays fixed during the run."""
    patience: int | None = Field(default=None, ge=1)
    """Stop the run early after so many validations in a row without a lower loss; None: never."""


@section
class RunConfig:
    """One training run."""

    output: str
    """The run's folder: configuration, metrics, checkpoints, evaluation, report."""
    samples: int = Field(ge=1)
    """Samples to train on, counting repetitions, as the papers state their budgets: steps x batch_size."""
    batch_size: int = Field(ge=2)
    """Global batch B, over all ranks."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of initial weights, data order, augmentation and dropout."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Stop when more than this many steps in a row were skipped because loss or gradient was not finite."""
    max_rollbacks: int = Field(default=0, ge=0)
    """Instead of stopping, roll back and continue with the data after the skipped steps, at most this many times in a
    run: to the newest undamaged checkpoint with 3 applied steps between it and the skipped ones, or to an earlier one
    if no good one was written since the last rollback. The step count is rolled back, too; the data is not."""
    data: DataConfig
    objective: ObjectiveConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    ema: EmaConfig = EmaConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    evaluation: InTrainingConfig = InTrainingConfig()
    validation: ValidationConfig = ValidationConfig()

    @functools.cached_property
    def total_steps(self) -> int:
        """Whole batches in the sample budget."""
        return self.samples // self.batch_size


@dataclass(frozen=True)
class Stage:
    """A part of a run with its own `model` section: number `number` (from 0), the steps from `first` to before `end`.

    Every stage has towers, engine and loader of its own, which start from the checkpoint at the end of the one before.
    Passing to the next stage is therefore the same as resuming, and a run that is interrupted at a boundary ends with
    the weights of one that is not.
    """

    number: int
    first: int
    end: int
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
        given = {key: getattr(settings, key, None) for key in ("image_size", "text_tokens", "patch_dropout")}
        model = replace(run.model, **{key: value for key, value in given.items() if value is not None})
        yield Stage(number, first, end, replace(run, model=model))
        first = end


def stage_at(run: RunConfig, step: int) -> Stage:
    """The stage that takes step `step` (from 0); after the run's end, the last one."""
    stages = list(stages_of(run))
    return next((stage for stage in stages if step < stage.end), stages[-1])


MANY = 2**40
"""Samples that are assumed in order to check settings without the data."""


def load_recipe(
    path: str | Path | None,
    overrides: Iterable[str] = (),
    *,
    dataset_size: int | None = None,
    scaled: dict[str, str] | None = None,
) -> RunConfig:
    """Defaults < recipe YAML < the recipe's part for the chosen method < dotted overrides, checked.

    Args:
        path: The recipe.
        overrides: `section.key=value`.
        dataset_size: Samples of an epoch, for plans of data that is not there yet.
        scaled: Gets the rates that `reference_batch` changes, as in `resolve_methods`.

    Raises:
        UserError: It names every wrong key.
    """
    tree = read_recipe(Path(path)) if path is not None else {}
    above = cfg.parse_overrides(overrides)
    tree = resolve_methods(tree, above, scaled=scaled)
    try:
        resolved = resolve_budget(tree, above, dataset_size=dataset_size)
    except UserError:
        if dataset_size is None:  # the data is not there: a wrong key is reported first
            parse_recipe(resolve_budget(tree, above, dataset_size=MANY))
        raise
    return parse_recipe(resolved)


def parse_recipe(tree: Mapping[str, Any]) -> RunConfig:
    """A tree of plain values as a `RunConfig`, after all checks that need neither data nor a launcher."""
    tree = dict(tree)
    given = tree.pop("objective", {})
    if not isinstance(given, Mapping):
        raise UserError(f"objective = {given!r} must be a section with a name, for example objective.name=neuclip.")
    objective = parse_objective({"name": DEFAULT_OBJECTIVE, **given})
    offered = [*(f"objective.{key}" for key in cfg.keys(type(objective))), *RECIPE_KEYS]
    run = cfg.parse(RunConfig, {**tree, "objective": objective}, extra_keys=offered)
    check_run(run, world_size=1)
    return run


def check_run(run: RunConfig, *, world_size: int) -> None:
    """Raise a `UserError` if settings contradict each other or the number of ranks, as far as that needs no data."""
    sink_names(run.telemetry)
    if run.validation.patience is not None and not run.validation.sources:
        raise UserError("validation.patience needs held-out pairs: set validation.sources to a folder of shards.")
    if any(source.weight != 1 for source in run.validation.sources):
        raise UserError("validation.sources take no weight: every pair counts once. Limit them by validation.samples.")
    if run.data.image_features is not None and (not run.model.lock_image or run.model.unlocked_image_blocks):
        raise UserError(
            "data.image_features takes the place of an image tower that is wholly locked: set model.lock_image=true "
            "model.unlocked_image_blocks=0, or leave it out."
        )
    if bool(run.objective.distill) != bool(run.data.teacher_features):
        raise UserError(
            f"objective.distill={run.objective.distill:g} data.teacher_features={run.data.teacher_features}: "
            "distillation needs a weight above 0 and the folder of `neuclip features`, or neither."
        )
    if run.total_steps < 1:
        raise UserError(f"samples = {run.samples} is less than one batch of batch_size = {run.batch_size}.")
    _check_ranks(run, world_size=world_size)
    facts = ENGINES[run.engine.name].facts(
        run.engine, optimizer=run.optimizer, global_batch=run.batch_size, world_size=world_size
    )
    together = facts.stage == 3 or (world_size > 1 and facts.stage == 2)
    if run.engine.micro_batch == "auto" and together:
        raise UserError(
            "engine.micro_batch=auto tries on each rank alone what fits into memory, which is not possible at ZeRO "
            "stage 3, nor on several ranks at stage 2: give a number, or take engine.deepspeed=zero1_bf16."
        )
    if run.model.lora.rank is not None:
        refused = {
            "model.pretrained, which is not given: adapters are trained beside pretrained weights":
                run.model.pretrained is None,
            "a ZeRO stage below 3 (engine.deepspeed)": facts.stage == 3,
            "no ema.decay": run.ema.decay is not None,
            "no schedule.stages": bool(run.schedule.stages),
            "no model.compile": run.model.compile is True,
            "whole towers locked or none (no model.unlocked_*_blocks)":
                run.model.unlocked_image_blocks + run.model.unlocked_text_blocks > 0,
        }  # fmt: skip
        if wrong_settings := [what for what, wrong in refused.items() if wrong]:
            raise UserError(f"model.lora needs {'; '.join(wrong_settings)}.")
    ends = [0, *(end for _, end in stage_steps(run.schedule, total_steps=run.total_steps))]
    if any(end <= first for first, end in itertools.pairwise(ends)):
        raise UserError(
            f"schedule.stages would end at steps {ends[1:]} of {run.total_steps}: `until` must grow from stage to "
            "stage, and every stage needs a step."
        )
    cooldown = run.schedule.cooldown_steps(total_steps=run.total_steps)
    if run.schedule.warmup_steps + cooldown > run.total_steps:
        both = f" with the {cooldown} steps of schedule.cooldown_share" if cooldown else ""
        raise UserError(
            f"schedule.warmup_steps = {run.schedule.warmup_steps}{both} exceeds the run's {run.total_steps} steps "
            f"(samples {run.samples} / batch_size {run.batch_size})."
        )


def check_captions_of(run: RunConfig) -> None:
    """`check_captions` of a run's data and of its validation, as far as they are on this machine."""
    for sources in filter(None, (run.data.sources, run.validation.sources)):
        check_captions(replace(run.data, sources=sources))


def _check_ranks(run: RunConfig, *, world_size: int) -> None:
    """Check that the ranks divide streams and batch, and micro-batches the local batch."""
    batch, streams, micro_batch = run.batch_size, run.data.streams, run.engine.micro_batch
    if batch % world_size or streams % world_size:
        unit = world_size * (micro_batch if isinstance(micro_batch, int) and batch % world_size else 1)
        nearest = max(1, round(batch / unit)) * unit
        each = range(1, 1 + max(1, round(streams / world_size)))
        fitting = world_size * max(count for count in each if nearest // world_size % count == 0)
        raise UserError(
            f"batch_size = {batch} and data.streams = {streams} do not fit {world_size} ranks, which must divide both; "
            f"the streams must divide the batch. Use batch_size={nearest} data.streams={fitting}, for example, or "
            "another number of ranks."
        )
    local = batch // world_size
    if local % run.engine.rows(local):
        raise UserError(
            f"engine.micro_batch = {micro_batch} does not divide the local batch {local} "
            f"(batch_size {batch} on {world_size} ranks)."
        )
