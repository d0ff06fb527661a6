"""The training objectives, one method per file; any module in this folder that registers a method adds it.

`build_objective(name, dim=..., batch_size=..., dataset_size=...)` builds one for your own training loop; the trainer
uses `parse_objective` and a whole `ObjectiveContext`.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from pipeline.config import suggest
from pipeline.distributed.world import joined_world
from pipeline.errors import UserError
from pipeline.objectives.base import Objective
from pipeline.objectives.registry import (
    OBJECTIVES,
    ObjectiveConfig,
    ObjectiveContext,
    ObjectiveMemory,
    ObjectiveOutput,
    objective_names,
    parse_objective,
    register,
)

__all__ = [
    "Objective",
    "ObjectiveConfig",
    "ObjectiveContext",
    "ObjectiveMemory",
    "ObjectiveOutput",
    "build_objective",
    "objective_names",
    "parse_objective",
    "register",
]


def build_objective(
    objective: ObjectiveConfig | Mapping[str, Any] | str, *, context: ObjectiveContext | None = None, **facts: Any
) -> Objective:
    """An objective from its config, a mapping of settings, or its name.

    Args:
        objective: The method and its settings.
        context: The facts of the run.
        facts: In place of `context`: `dim` of the features and `batch_size` over all ranks (both required),
            `dataset_size` (required by methods with per-sample state), `total_steps` (required by schedules that follow
            epochs), and any other field of `ObjectiveContext`. `world` defaults to the process group that this process
            has joined, `device` to the world's.

    Raises:
        UserError: Wrong settings or missing facts.
    """
    if context is not None and facts:
        raise UserError(f"build_objective was given a context and also {', '.join(sorted(facts))}: give one of them.")
    if isinstance(objective, str):
        objective = {"name": objective}
    config = parse_objective(objective) if isinstance(objective, Mapping) else objective
    built: Objective = OBJECTIVES[config.name](config, context or _context(facts))
    return built


def _context(facts: dict[str, Any]) -> ObjectiveContext:
    if missing := [name for name in ("dim", "batch_size") if name not in facts]:
        raise UserError(f"build_objective needs {' and '.join(missing)} (or a whole context=ObjectiveContext(...)).")
    known = tuple(sorted(ObjectiveContext.__dataclass_fields__))
    if unknown := sorted(facts.keys() - set(known)):
        raise UserError(
            f"build_objective does not know {', '.join(unknown)}. {suggest(unknown[0], known)} "
            'Settings of the method go with its name: {"name": "neuclip", "tau_init": 0.05}.'
        )
    for name in ("dim", "batch_size", "dataset_size", "steps_per_epoch", "total_steps", "seed"):
        least = int(name in ("dim", "batch_size"))
        value = facts.get(name, least)
        if not isinstance(value, Integral) or value < least:
            raise UserError(f"{name} = {value!r}: has to be an integer, {least} or more.")
    size, world = facts.get("dataset_size", 0), facts.get("world", joined_world())
    steps = max(1, size // facts["batch_size"]) if size else 0
    defaults = {"dataset_size": 0, "steps_per_epoch": steps, "total_steps": 0, "world": world, "device": world.device}
    return ObjectiveContext(**{**defaults, **facts})
