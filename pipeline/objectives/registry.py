"""Objectives by name: turns `objective.name` into a config section and an object.

A method is a file below `pipeline.objectives`, or in an installed package with an entry point of the group
`neuclip.objectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from numbers import Integral
from typing import Any, TypeVar

from pipeline.config import parse, suggest
from pipeline.distributed.world import joined_world
from pipeline.errors import UserError
from pipeline.objectives.base import Objective
from pipeline.objectives.facts import ObjectiveConfig, ObjectiveContext
from pipeline.registries import Registry

ObjectiveClass = TypeVar("ObjectiveClass", bound=type[Objective])

OBJECTIVES: Registry[type[Objective]] = Registry(
    "objective", setting="objective.name", package="pipeline.objectives", group="neuclip.objectives"
)
objective_names = OBJECTIVES.names
_SECTIONS: dict[str, type[ObjectiveConfig]] = {}
# Of the facts that `build_objective` takes; 0 is unknown.
_LEAST = {"dim": 1, "batch_size": 1, "dataset_size": 0, "steps_per_epoch": 0, "total_steps": 0, "seed": 0}


def register(name: str, config: type[ObjectiveConfig]) -> Callable[[ObjectiveClass], ObjectiveClass]:
    """Class decorator: make an objective selectable as `objective.name=<name>` with `config` as its section.

    One class may be registered under several names with different defaults.

    Raises:
        UserError: The name is taken.
    """

    def add(objective: ObjectiveClass) -> ObjectiveClass:
        OBJECTIVES.register(name)(objective)
        _SECTIONS[name] = config
        return objective

    return add


OTHER_NAMES = dict.fromkeys(("clip", "infonce", "info_nce", "contrastive", "softmax", "open_clip"), "openclip")
OTHER_NAMES |= {"sigmoid": "siglip"}
"""What people call a method -> its name here."""


def parse_objective(tree: Mapping[str, Any]) -> ObjectiveConfig:
    """The checked section of the method `tree["name"]`.

    Raises:
        UserError: Unknown name, unknown key or value out of range; the message names `objective.<key>`.
    """
    name, names = tree.get("name"), objective_names()
    if not isinstance(name, str):
        raise UserError(f"objective.name is required and was not given. Allowed: {', '.join(names)}.")
    if name not in names:
        near = suggest(OTHER_NAMES.get(name.lower(), name), names)
        raise UserError(f"objective.name = {name!r} is not known. {near}")
    return parse(_SECTIONS[name], tree, prefix="objective")


def setting_names(name: Any) -> set[str]:
    """The settings of a method; none if there is no such method."""
    return {field.name for field in fields(_SECTIONS[name])} if name in objective_names() else set()


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
    return OBJECTIVES[config.name](config, context or _context(facts))


def _context(facts: dict[str, Any]) -> ObjectiveContext:
    missing = [name for name in ("dim", "batch_size") if name not in facts]
    if missing:
        raise UserError(f"build_objective needs {' and '.join(missing)} (or a whole context=ObjectiveContext(...)).")
    known = set(ObjectiveContext.__dataclass_fields__)
    unknown = sorted(set(facts) - known)
    if unknown:
        raise UserError(
            f"build_objective does not know {', '.join(unknown)}. {suggest(unknown[0], tuple(sorted(known)))} "
            'Settings of the method go with its name: {"name": "neuclip", "tau_init": 0.05}.'
        )
    for name, least in _LEAST.items():
        value = facts.get(name, least)
        if not isinstance(value, Integral) or value < least:
            raise UserError(f"{name} = {value!r}: has to be an integer, {least} or more.")
    size, world = facts.get("dataset_size", 0), facts.get("world", joined_world())
    defaults = {
        "dataset_size": 0,
        "steps_per_epoch": max(1, size // facts["batch_size"]) if size else 0,
        "total_steps": 0,
        "world": world,
        "device": world.device,
    }
    return ObjectiveContext(**{**defaults, **facts})
