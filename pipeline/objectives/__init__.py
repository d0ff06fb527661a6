"""Every objective of the papers, one frame.

`build_objective(name, dim=..., batch_size=..., dataset_size=...)` gives an objective for anybody's loop; the trainer
goes through `parse_objective` and a whole `ObjectiveContext`.
"""

from pipeline.objectives.base import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput
from pipeline.objectives.registry import build_objective, objective_names, parse_objective, register

__all__ = [
    "Objective",
    "ObjectiveConfig",
    "ObjectiveContext",
    "ObjectiveOutput",
    "build_objective",
    "objective_names",
    "parse_objective",
    "register",
]
