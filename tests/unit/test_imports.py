"""The arrows of the architecture: who may import whom, read from the source of every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "data_prep", "jobs")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# What each part must never import: prefixes of module names.
FORBIDDEN = {
    "pipeline": ("jobs", "tests", "data_prep"),
    "data_prep": ("jobs", "tests"),
    "jobs": ("tests",),
    "pipeline.objectives": (
        "pipeline.data",
        "pipeline.engine",
        "pipeline.model",
        "pipeline.train",
        "pipeline.trainer",
        "open_clip",
        "deepspeed",
    ),
    "pipeline.data": ("pipeline.objectives", "pipeline.engine", "pipeline.train", "pipeline.trainer", "deepspeed"),
    "pipeline.evaluation": (
        "pipeline.train",
        "pipeline.trainer",
        "pipeline.objectives",
        "pipeline.engine",
        "deepspeed",
    ),
    "pipeline.report": ("pipeline.train", "pipeline.trainer", "pipeline.engine", "deepspeed"),
    "pipeline.world": ("pipeline.train", "pipeline.trainer", "pipeline.engine", "pipeline.data", "pipeline.objectives"),
    "pipeline.config": (
        "pipeline.train",
        "pipeline.trainer",
        "pipeline.engine",
        "pipeline.data",
        "pipeline.objectives",
        "pipeline.world",
    ),
}
# Libraries with one door.
ONLY_IMPORTERS = {
    "torch.distributed": {"pipeline.world"},
    "deepspeed": {"pipeline.engine", "pipeline.engine_state"},
}
# What data_prep may know of the pipeline: the manifest's format and the machinery of configs and errors.
SHARED = ("pipeline.data.manifest", "pipeline.errors", "pipeline.config", "pipeline.versions")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Full names of everything that a module imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    name, imports = name_of(path), imports_of(path)
    for part, forbidden in FORBIDDEN.items():
        if below(name, part):
            wrong = sorted(i for i in imports for prefix in forbidden if below(i, prefix))
            assert not wrong, f"{name} must not import {wrong}"
    for library, importers in ONLY_IMPORTERS.items():
        if any(below(i, library) for i in imports):
            assert name in importers, f"{name} imports {library}; only {sorted(importers)} may"
    if below(name, "data_prep"):
        wrong = sorted(i for i in imports if below(i, "pipeline") and not any(below(i, ok) for ok in SHARED))
        assert not wrong, f"{name} may share only {SHARED} with the pipeline, not {wrong}"


def test_the_rule_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from pipeline.train import train\n    import jobs.cli\n")
    assert {"pipeline.train", "pipeline.train.train", "jobs.cli"} <= imports_of(path)


def test_the_trainer_names_no_objective() -> None:
    from pipeline.objectives import objective_names

    text = "".join((ROOT / "pipeline" / name).read_text() for name in ("train.py", "trainer.py", "step.py"))
    assert not [name for name in objective_names() if f'"{name}"' in text]
