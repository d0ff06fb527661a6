"""A run's whole configuration: every component's section in one tree, and the checks between sections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline import config as cfg
from pipeline.checkpoint import CheckpointConfig
from pipeline.config import section
from pipeline.data.config import DataConfig
from pipeline.engine import EngineConfig, deepspeed_settings
from pipeline.errors import UserError
from pipeline.model import ModelConfig
from pipeline.objectives import ObjectiveConfig, parse_objective
from pipeline.optim import OptimizerConfig, ScheduleConfig
from pipeline.step import check_micro_batch
from pipeline.telemetry import TelemetryConfig

CONFIG_NAME = "config.yaml"


@section
class RunConfig:
    """One training run. `samples` is the budget of the papers: samples seen = steps x batch_size."""

    output: str
    """The run's folder: configuration, metrics, checkpoints, evaluation, report."""
    samples: int = Field(ge=1)
    batch_size: int = Field(ge=2)
    """Global batch B, over all ranks."""
    seed: int = Field(default=0, ge=0)
    max_skipped_steps: int = Field(default=10, ge=0)
    """Stop after this many steps in a row whose loss or gradient was not finite."""
    data: DataConfig
    objective: ObjectiveConfig
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    engine: EngineConfig = EngineConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    @property
    def total_steps(self) -> int:
        """Whole batches in the sample budget."""
        return self.samples // self.batch_size


def load_recipe(path: str | Path | None, overrides: Iterable[str] = ()) -> RunConfig:
    """Defaults < recipe YAML < dotted overrides, checked. Raises: UserError naming every key at fault."""
    tree = cfg.read_yaml(path) if path is not None else {}
    return parse_recipe(cfg.merge(tree, cfg.parse_overrides(overrides)))


def parse_recipe(tree: Mapping[str, Any]) -> RunConfig:
    """A tree of plain values as a `RunConfig`, with all checks that need no data and no launcher."""
    tree = dict(tree)
    given = tree.pop("objective", {})
    if not isinstance(given, Mapping):
        raise UserError(f"objective = {given!r} must be a section with a name, for example objective.name=neuclip.")
    objective = parse_objective({"name": "neuclip", **given})
    offered = [f"objective.{key}" for key in cfg.keys(type(objective))]
    run = cfg.parse(RunConfig, {**tree, "objective": objective}, extra_keys=offered)
    check_run(run, world_size=1)
    return run


def check_run(run: RunConfig, *, world_size: int) -> None:
    """The combinations that can be judged without data. Raises: UserError with the numbers."""
    if run.total_steps < 1:
        raise UserError(f"samples = {run.samples} is less than one batch of batch_size = {run.batch_size}.")
    check_micro_batch(global_batch=run.batch_size, world_size=world_size, micro_batch=run.engine.micro_batch)
    deepspeed_settings(run.engine, global_batch=run.batch_size, world_size=world_size)
    if run.schedule.warmup_steps > run.total_steps:
        raise UserError(
            f"schedule.warmup_steps = {run.schedule.warmup_steps} exceeds the run's {run.total_steps} steps "
            f"(samples {run.samples} / batch_size {run.batch_size})."
        )
