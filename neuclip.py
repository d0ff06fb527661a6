"""The public interface of NeuCLIP for Python programs.

    import neuclip

    objective = neuclip.build_objective("neuclip", dim=512, batch_size=256, dataset_size=1_000_000)
    model = neuclip.load("runs/mine")
    similarities = neuclip.score(model, ["dog.jpg", "cat.jpg"], ["a photo of a dog", "a photo of a cat"])
    evaluations = neuclip.evaluate("runs/mine", suite="data/suite")

Importing this module is cheap: torch and open_clip are imported by the first use of a name.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.data.dataset import dataset
    from pipeline.errors import UserError
    from pipeline.evaluation import evaluate
    from pipeline.model.evaluation_model import load_for_evaluation as load
    from pipeline.model.evaluation_model import score
    from pipeline.objectives import build_objective

__all__ = ["UserError", "__version__", "build_objective", "dataset", "evaluate", "load", "score"]

try:
    __version__ = metadata.version("neuclip")
except metadata.PackageNotFoundError:  # a copy of the repository that is not installed
    __version__ = "unknown"

# Public name -> (module, name there).
_PUBLIC = {
    "UserError": ("pipeline.errors", "UserError"),
    "build_objective": ("pipeline.objectives", "build_objective"),
    "dataset": ("pipeline.data.dataset", "dataset"),
    "evaluate": ("pipeline.evaluation", "evaluate"),
    "load": ("pipeline.model.evaluation_model", "load_for_evaluation"),
    "score": ("pipeline.model.evaluation_model", "score"),
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'neuclip' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _PUBLIC[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
