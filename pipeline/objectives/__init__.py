"""The training objectives, one method per file; any module in this folder that registers a method adds it.

`build_objective(name, dim=..., batch_size=..., dataset_size=...)` builds one for your own training loop; the trainer
uses `parse_objective` and a whole `ObjectiveContext`.
"""

from pipeline.objectives.base import Objective
from pipeline.objectives.facts import ObjectiveConfig, ObjectiveContext, ObjectiveMemory, ObjectiveOutput
from pipeline.objectives.registry import build_objective, objective_names, parse_objective, register

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
