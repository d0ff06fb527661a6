"""Import rules of the architecture: what each folder may import, checked against the source of every module."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("pipeline", "data_prep", "jobs")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

BASE = {"config", "cores", "departed", "errors", "files", "pictures", "registries", "run_files", "tars", "versions"}
"""The top-level modules of `pipeline/`, and a folder: any folder may import them."""

# What each folder of `pipeline/` may import in addition to BASE. Ordered: no folder imports one below it.
PIPELINE = {
    "pictures": set(),
    "distributed": set(),
    "model": {"distributed"},
    "data": {"distributed"},
    "objectives": {"distributed"},
    "engine": {"distributed", "model"},
    "metrics": {"distributed", "model"},
    "checkpoint": {"distributed", "model"},
    "evaluation": {"checkpoint", "distributed", "model"},
    "report": {"data", "evaluation"},
    "playground": {"data", "evaluation", "model"},
    "export": {"checkpoint", "model", "report"},
    "training": {"checkpoint", "data", "distributed", "engine", "evaluation", "metrics", "model", "objectives"},
    "planning": {"checkpoint", "data", "distributed", "engine", "metrics", "model", "objectives", "training"},
    "analysis": {"checkpoint", "data", "distributed", "model", "objectives", "report", "training"},
}
# The same for the folders and top-level modules of `data_prep/`; all of them may import `reasons`.
DATA_PREP = {
    "download_config": set(),
    "scenes": {"dataset"},
    "sources": {"download_config"},
    "dataset": {"download_config", "sources"},
    "evaluation_sets": set(),
    "fetching": {"dataset", "download_config", "sources"},
    "ingest": {"dataset", "fetching", "download_config", "sources"},
    "pairs": {"dataset", "fetching", "sources"},
}
# What data_prep may import from the pipeline in addition to BASE: formats and facts that both sides must agree on.
SHARED = {
    "pipeline.data.shards.storage",
    "pipeline.data.shards.manifest_format",
    # Samples are read and checked as training does.
    "pipeline.data.shards.tar_reader",
    "pipeline.evaluation.datasets.datacomp",
    # The pages of runs and of data sets have one design.
    "pipeline.report.page",
    # Evaluation sets are counted by the reader that will evaluate them.
    "pipeline.evaluation.datasets.suite",
    "pipeline.evaluation.datasets.task_data",
}

# Libraries that only these modules or folders import.
ONLY_IMPORTERS = {
    "torch.distributed": {"pipeline.distributed.world", "pipeline.distributed.start", "pipeline.distributed.processes"},
    "deepspeed": {"pipeline.engine"},
}


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = frozenset(name_of(path) for path in MODULES)


def imports_of(path):
    """Return the full name of everything a module imports, anywhere in the file; for our packages, modules only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in NAMES or node.module not in NAMES else node.module)
    return found


def below(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def may_import(name, other):
    """Whether module `name` may import module `other`; both are ours and in different folders."""
    package, _, rest = name.partition(".")
    other_package, _, other_rest = other.partition(".")
    folder, other_folder = rest.partition(".")[0], other_rest.partition(".")[0]
    if package == "jobs":
        return True
    if other_package == "jobs":
        return False
    if package == "data_prep":
        if other_package == "data_prep":
            return other_folder in (folder, "reasons") or other_folder in DATA_PREP.get(folder, ())
        return other_folder in BASE or other in SHARED
    if other_package != "pipeline":
        return False
    return other_folder == folder or other_folder in BASE or other_folder in PIPELINE.get(folder, ())


def broken_rules(name, imports):
    """Yield what is wrong with the imports of a module."""
    ours = {i for i in imports if i.partition(".")[0] in (*PACKAGES, "tests")}
    yield from (f"{name} must not import {other}" for other in sorted(ours) if not may_import(name, other))
    for library, importers in ONLY_IMPORTERS.items():
        if any(below(i, library) for i in imports) and not any(below(name, i) for i in importers):
            yield f"{name} imports {library}; only {sorted(importers)} may"
    if below(name, "pipeline.objectives") and any(below(i, "open_clip") for i in imports):
        yield f"{name} must not import open_clip"


def test_imports_follow_the_rules():
    broken = [problem for path in MODULES for problem in broken_rules(name_of(path), imports_of(path))]
    assert not broken, "\n".join(broken)


def test_there_are_no_circular_imports():
    """Neither the allowed imports between folders nor the actual imports between modules form a cycle."""
    TopologicalSorter(PIPELINE).prepare()
    TopologicalSorter(DATA_PREP).prepare()
    graph = {name_of(path): {i for i in imports_of(path) if i in NAMES} - {name_of(path)} for path in MODULES}
    TopologicalSorter(graph).prepare()


def test_every_folder_is_listed():
    found = {path.parent.name for path in (ROOT / "pipeline").glob("*/__init__.py")}
    assert found == set(PIPELINE)
    loose = {path.stem for path in (ROOT / "pipeline").glob("*.py")} - {"__init__"}
    assert loose <= BASE
    assert len(loose) <= 9
    below_data_prep = {path.stem for path in (ROOT / "data_prep").glob("*.py")} - {"__init__"}
    folders = {path.parent.name for path in (ROOT / "data_prep").glob("*/__init__.py")}
    assert below_data_prep | folders == {*DATA_PREP, "reasons"}


def test_a_forbidden_import_is_detected():
    for name, other in (
        ("pipeline.objectives.openclip", "pipeline.training.run"),
        ("pipeline.data.loading.loader", "data_prep.ingest"),
        ("data_prep.ingest", "pipeline.training.run"),
        ("data_prep.ingest", "jobs.cli"),
        ("data_prep.dataset.shard_plan", "data_prep.fetching.guard"),
        ("data_prep.reasons", "data_prep.dataset.commit"),
    ):
        assert not may_import(name, other)


def test_the_trainer_does_not_name_any_objective():
    from pipeline.objectives import objective_names

    training = ROOT / "pipeline" / "training"
    text = "".join((training / name).read_text() for name in ("run.py", "loop.py", "step.py"))
    assert not [name for name in objective_names() if f'"{name}"' in text]
