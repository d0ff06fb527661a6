"""Shell completion of settings: `neuclip train optim<TAB>`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

PACKAGE = Path(__file__).parents[1] / "pipeline"


def complete_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Settings of a run that start with `incomplete`, each followed by `=`."""
    if "=" in incomplete:
        return []
    return [CompletionItem(f"{key}=") for key in run_settings() if key.startswith(incomplete)]


def run_settings() -> list[str]:
    """Every dotted setting of a run. Cached, because importing the configuration takes seconds."""
    newest = max(path.stat().st_mtime_ns for path in PACKAGE.rglob("*.py"))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuclip"
    path = folder / "settings.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["newest"] == newest and stored["package"] == str(PACKAGE):
            return list(stored["settings"])
    except (OSError, ValueError, KeyError):
        pass
    settings = _read_settings()
    try:
        from pipeline.files import write_json

        write_json(path, {"newest": newest, "package": str(PACKAGE), "settings": settings})
    except OSError:
        pass  # without a cache, the next completion is slow again
    return settings


def _read_settings() -> list[str]:
    from pipeline.config import keys
    from pipeline.objectives import objective_names, parse_objective
    from pipeline.training.recipe import RunConfig

    objectives = {key for name in objective_names() for key in keys(type(parse_objective({"name": name})))}
    found = {*keys(RunConfig), *(f"objective.{key}" for key in objectives), "epochs", "schedule.warmup_share"}
    sections = {key.rpartition(".")[0] for key in found}
    return sorted(found - sections)
