"""A run's configuration: the sections of all components in one tree, and the checks between sections."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline import config as cfg
from pipeline.checkpoint.writer import CheckpointConfig
from pipeline.config import section
from pipeline.data.data_config import DataConfig
from pipeline.engine.ema import EmaConfig
from pipeline.engine.engine_config import EngineConfig, deepspeed_settings, zero_stage
from pipeline.engine.lr_schedule import ScheduleConfig, stage_steps
from pipeline.engine.optim import OptimizerConfig, check_stage
from pipeline.errors import UserError
from pipeline.metrics.logger import TelemetryConfig, sink_names
from pipeline.model.towers import ModelConfig
from pipeline.objectives import ObjectiveConfig, parse_objective
from pipeline.training.budget import resolve_budget
from pipeline.training.periodic_eval import InTrainingConfig
from pipeline.training.plan_config import PlanConfig
from pipeline.training.step import check_micro_batch
from pipeline.training.validation_config import ValidationConfig

CONFIG_NAME = "config.yaml"
DEFAULT_OBJECTIVE = "neuclip"
SCALED_RATES = (("optimizer", "lr"), ("objective", "tau_lr"))


@section
class RunConfig:
    """One training run."""

    output: str
    """The run's folder: configuration, metrics, checkpoints, evaluation, report."""
    samples: int = Field(ge=1)
    """Samples to train on, counting repetitions, as the papers state their budgets: steps x batch_size."""
    batch_size: int = Field(ge=2)
    """Global batch B, over all ranks."""
    seed: int = Field(default=0, ge=0)
    """Seed of initial weights, data order, augmentation and dropout."""
    max_skipped_steps: int = Field(default=10, ge=0)
    """Stop when more than this many steps in a row were skipped because loss or gradient was not finite."""
    max_rollbacks: int = Field(default=0, ge=0)
    """Instead of stopping, roll back to the newest undamaged checkpoint from before the skipped steps and continue with
    the data after them, at most this many times in a run. The step count is rolled back, too; the data is not."""
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
    plan: PlanConfig = PlanConfig()

    @property
    def total_steps(self) -> int:
        """Whole batches in the sample budget."""
        return self.samples // self.batch_size


def load_recipe(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Defaults < recipe YAML < the recipe's part for the chosen method < dotted overrides, checked.

    Raises:
        UserError: It names every wrong key.
    """
    tree = read_recipe(Path(path)) if path is not None else {}
    above = cfg.parse_overrides(overrides)
    return parse_recipe(resolve_budget(scale_rates(choose_method(tree, above), above), above))


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's tree, laid over that of the recipe beside it that it `extends`, if any.

    Raises:
        UserError: A file cannot be read, or recipes extend each other in a circle.
    """
    tree, seen = cfg.read_yaml(path), {path.resolve()}
    while "extends" in tree:
        base = path.parent / f"{tree.pop('extends')}.yaml"
        if base.resolve() in seen:
            raise UserError(f"{path} extends itself by way of {base}.")
        seen.add(base.resolve())
        tree = cfg.merge(cfg.read_yaml(base), tree)
    return tree


def choose_method(recipe: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One recipe for many methods: `methods: {NAME: {section: {key: value}}}` holds the settings of each.

    Those of the chosen method (`objective.name` of the overrides, else of the recipe) override the rest of the recipe.

    Raises:
        UserError: The recipe has such parts, but none for this method.
    """
    tree = dict(recipe)
    methods = tree.pop("methods", None)
    if methods is None:
        return tree
    if not isinstance(methods, Mapping) or not all(isinstance(part, Mapping) for part in methods.values()):
        raise UserError("methods must map names of objectives to sections, as in the recipes of jobs/recipes/.")
    name = cfg.merge(_section(tree, "objective"), _section(above, "objective")).get("name", DEFAULT_OBJECTIVE)
    if str(name) not in methods:
        raise UserError(
            f"This recipe has no settings for objective.name = {name!r}. {cfg.suggest(str(name), tuple(methods))} "
            "Add a part under `methods`, or write a recipe without that section."
        )
    return cfg.merge(tree, methods[str(name)])


def scale_rates(recipe: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Scale the learning rates linearly with the batch size, as FastCLIP (appendix B) does over numbers of nodes.

    If a recipe has `reference_batch`, the batch size for which its `optimizer.lr` and `objective.tau_lr` were chosen,
    both are multiplied by batch_size / reference_batch. A rate that is given as an override is not scaled.
    """
    tree = dict(recipe)
    reference = tree.pop("reference_batch", None)
    size = above.get("batch_size", tree.get("batch_size"))
    if reference is None or size == reference:
        return tree
    if not all(isinstance(number, int) and number > 0 for number in (reference, size)):
        raise UserError(f"reference_batch = {reference!r} and batch_size = {size!r} must be positive whole numbers.")
    for section_name, key in SCALED_RATES:
        values = _section(tree, section_name)
        if key in values:
            tree[section_name] = {**values, key: float(values[key]) * size / reference}
    return tree


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name, {})
    return value if isinstance(value, Mapping) else {}


def parse_recipe(tree: Mapping[str, Any]) -> RunConfig:
    """A tree of plain values as a `RunConfig`, after all checks that need neither data nor a launcher."""
    tree = dict(tree)
    given = tree.pop("objective", {})
    if not isinstance(given, Mapping):
        raise UserError(f"objective = {given!r} must be a section with a name, for example objective.name=neuclip.")
    objective = parse_objective({"name": DEFAULT_OBJECTIVE, **given})
    offered = [f"objective.{key}" for key in cfg.keys(type(objective))]
    run = cfg.parse(RunConfig, {**tree, "objective": objective}, extra_keys=offered)
    check_run(run, world_size=1)
    return run


def check_run(run: RunConfig, *, world_size: int) -> None:
    """Check the combinations of settings that can be checked without data.

    Raises:
        UserError: Settings contradict each other or the number of ranks.
    """
    sink_names(run.telemetry)
    if run.validation.patience is not None and not run.validation.sources:
        raise UserError("validation.patience needs held-out pairs: set validation.sources to a folder of shards.")
    if any(source.weight != 1 for source in run.validation.sources):
        raise UserError("validation.sources take no weight: every pair counts once. Limit them by validation.samples.")
    if run.model.image_features_cache is not None and not run.data.crop.fixed:
        raise UserError(
            f"model.image_features_cache keeps one feature per image, but crops are random: data.crop.scale = "
            f"{list(run.data.crop.scale)}, data.crop.ratio = {list(run.data.crop.ratio)}. Set data.crop.scale=[1,1] "
            "data.crop.ratio=[1,1] (always the central square), or leave model.image_features_cache out."
        )
    uploads, limit = run.checkpoint.mirror_minutes, run.engine.timeout_minutes
    if run.checkpoint.mirror and uploads >= limit:
        raise UserError(
            f"checkpoint.mirror_minutes = {uploads:g} must be less than engine.timeout_minutes = {limit:g}: rank 0 "
            "would be reported as stalled while it waits for an upload."
        )
    if run.total_steps < 1:
        raise UserError(f"samples = {run.samples} is less than one batch of batch_size = {run.batch_size}.")
    check_ranks(run, world_size=world_size)
    check_micro_batch(global_batch=run.batch_size, world_size=world_size, micro_batch=run.engine.micro_batch)
    settings = deepspeed_settings(run.engine, global_batch=run.batch_size, world_size=world_size)
    check_stage(run.optimizer, stage=zero_stage(settings))
    ends = [0, *(end for _, end in stage_steps(run.schedule, total_steps=run.total_steps))]
    if any(end <= first for first, end in itertools.pairwise(ends)):
        raise UserError(
            f"schedule.stages would end at steps {ends[1:]} of {run.total_steps}: `until` must grow from stage to "
            "stage, and every stage needs a step."
        )
    if run.schedule.warmup_steps > run.total_steps:
        raise UserError(
            f"schedule.warmup_steps = {run.schedule.warmup_steps} exceeds the run's {run.total_steps} steps "
            f"(samples {run.samples} / batch_size {run.batch_size})."
        )


def check_ranks(run: RunConfig, *, world_size: int) -> None:
    """Check that the ranks divide streams and batch.

    Raises:
        UserError: They do not, with a batch size and a number of streams that would fit.
    """
    batch, streams = run.batch_size, run.data.streams
    if not batch % world_size and not streams % world_size:
        return
    fitting = max(1, round(streams / world_size)) * world_size
    unit = math.lcm(fitting, world_size * (run.engine.micro_batch or 1))
    nearest = max(1, round(batch / unit)) * unit
    raise UserError(
        f"batch_size = {batch} and data.streams = {streams} do not fit {world_size} ranks, which must divide both; "
        f"the streams must divide the batch. Use batch_size={nearest} data.streams={fitting}, for example, or another "
        "number of ranks."
    )
