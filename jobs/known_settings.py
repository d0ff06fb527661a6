"""Settings and recipes by name, without importing what declares settings: for completion, typos, `neuclip settings`.

The classes that declare settings are beside the code that they configure, and importing that takes seconds. Their table
is therefore kept in the user's cache folder, for as long as no source file changes.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from jobs import ROOT
from jobs.settings_table import OBJECTIVE_TITLE, TRAINING_TITLE, Setting, listing
from pipeline.config import explain_unknown, flatten, parse_overrides, suggest
from pipeline.departed import COMMANDS
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.training.recipe import RunConfig

TRAINING = Path(__file__).parent / "recipes"
DOWNLOAD = TRAINING / "download"
REQUIRED_KEYS = (("output",), ("data.sources", "data"), ("samples", "epochs"), ("batch_size",))
"""What a run must be given, each with what can be given instead."""
Listing = list[tuple[str, list[Setting]]]


def known_settings() -> Listing:
    """The settings under their titles, as `neuclip settings` prints them; computed and stored if they are not yet."""
    stored = _stored()
    if stored is not None:
        return stored
    found = [(title, list(settings)) for title, settings in listing()]
    if not _added_by_packages():
        from pipeline.files import write_json

        plain = [(title, [astuple(setting) for setting in settings]) for title, settings in found]
        with contextlib.suppress(OSError):  # without a cache, the next call is slow again
            write_json(_cache(), {**_sources(), "settings": plain})
    return found


def _stored() -> Listing | None:
    """The stored table; None if there is none, or it is not that of these sources."""
    try:
        stored = json.loads(_cache().read_text(encoding="utf-8"))
        if any(stored[name] != value for name, value in _sources().items()) or _added_by_packages():
            return None
        return [(title, [Setting(*values) for values in settings]) for title, settings in stored["settings"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuclip" / "settings.json"


def _sources() -> dict[str, Any]:
    paths = [path for folder in ("pipeline", "data_prep", "jobs") for path in (ROOT / folder).rglob("*.py")]
    return {"package": str(ROOT), "newest": max(path.stat().st_mtime_ns for path in paths), "files": len(paths)}


def _added_by_packages() -> bool:
    """Whether packages add objectives or networks: a change of theirs would not be noticed, so nothing is stored."""
    groups = ("neuclip.objectives", "neuclip.npn")
    return any(importlib.metadata.entry_points(group=group) for group in groups)


def run_settings() -> list[str]:
    """Every dotted setting of a run."""
    return sorted({setting.key for setting in _of_a_run(known_settings()) if "[]" not in setting.key})


def _of_a_run(listing: Listing) -> list[Setting]:
    chosen = (settings for title, settings in listing if title == TRAINING_TITLE or title.startswith(OBJECTIVE_TITLE))
    return [setting for settings in chosen for setting in settings]


def complete_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Settings of a run that start with `incomplete`, each followed by `=`."""
    if "=" in incomplete:
        return []
    return [CompletionItem(f"{key}=") for key in run_settings() if key.startswith(incomplete)]


def load_run(recipe: str | None, overrides: Sequence[str], *, dataset_size: int | None = None) -> RunConfig:
    """The configuration of a run, as `load_recipe`; a mistyped setting ends it before the slow imports.

    Raises:
        UserError: Settings are unknown, missing or wrong.
    """
    check_given(recipe, overrides)
    from pipeline.training.recipe import load_recipe

    try:
        return load_recipe(recipe, overrides, dataset_size=dataset_size)
    except UserError:
        known_settings()  # all of it is imported now: the next mistake is found from the stored table
        raise


def check_given(recipe: str | None, overrides: Sequence[str]) -> None:
    """Check the names of overrides against the stored table, and that there is a recipe or what it would say.

    Settings of objectives are left to `load_recipe`, since the recipe may choose the method.

    Raises:
        UserError: A key is unknown, or there is no recipe and required settings are missing.
    """
    given = flatten(parse_overrides(overrides))
    listing = known_settings() if recipe is None and given else _stored()
    keys = [setting.key for setting in _of_a_run(listing or [])]
    valid = dict.fromkeys(name for key in keys for name in (*_sections(key), key))
    unknown = [key for key in given if keys and key not in valid and not key.startswith("objective.")]
    wrong = [key for key in unknown if not set(keys).intersection(_sections(key))]  # the others are within a mapping
    if wrong:
        shown = [name for name in valid if "[]" not in name]
        problems = (explain_unknown(key, given[key], valid=shown) for key in wrong)
        raise UserError("The configuration is not valid. " + " ".join(problems))
    missing = [name for name, *others in REQUIRED_KEYS if not {name, *others} & set(given)]
    if recipe is None and missing:
        raise UserError(
            f"There is no --recipe, and without one {', '.join(missing)} must be given as well. "
            f"--recipe FILE or NAME; the names are {', '.join(recipe_names(TRAINING))}. `own` trains on your own pairs."
        )


def _sections(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def recipe_names(folder: Path) -> tuple[str, ...]:
    """The names of the recipes in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


class FiniteRange(click.FloatRange):
    """A number within bounds; click's range has NaN and infinity, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            bounds = f"of {self.min:g} or more" if self.max is None else f"from {self.min:g} to {self.max:g}"
            self.fail(f"{value!r} is not a number {bounds}.", param, ctx)
        return number


class RecipePath(click.ParamType):
    """A recipe's path (`jobs/recipes/cc12m.yaml` or any other) or name (`cc12m`).

    Raises:
        UserError: There is no such recipe; the message suggests the nearest name.
    """

    name = "FILE|NAME"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        given, named = Path(value), self.folder / f"{value}.yaml"
        if given.exists() and not given.is_dir():  # also accepts a shell pipe
            return str(given)
        if named.is_file():
            return str(named)
        if ctx is not None and (left := COMMANDS.get(f"{ctx.info_name} --recipe {value}")):
            raise UserError(left)
        known = recipe_names(self.folder)
        if given.is_dir():
            raise UserError(f"{value} is a folder. Give a YAML file, or a name: {', '.join(known)}.")
        raise UserError(f"There is no recipe {value}. {suggest(given.stem, known)} A path works, too.")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Recipe names, or files if `incomplete` looks like a path."""
        if "/" in incomplete or incomplete.startswith("."):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(path.stem) for path in sorted(self.folder.glob(f"{incomplete}*.yaml"))]
