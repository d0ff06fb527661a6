"""Kinds of options, above all --recipe, and the run that it and the overrides configure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.config import flatten, parse_overrides, suggest
from pipeline.departed import COMMANDS
from pipeline.errors import UserError

if TYPE_CHECKING:
    from pipeline.training.recipe import RunConfig

TRAINING = Path(__file__).parent / "recipes"
DOWNLOAD = TRAINING / "download"
REQUIRED_KEYS = (("output",), ("data.sources", "data"), ("samples", "epochs"), ("batch_size",))
"""What a run must be given, each with what can be given instead."""


def load_run(
    recipe: str | None,
    overrides: Sequence[str],
    *,
    dataset_size: int | None = None,
    scaled: dict[str, str] | None = None,
) -> RunConfig:
    """The configuration of a run, as `load_recipe`.

    Raises:
        UserError: Settings are unknown, missing or wrong; without a recipe, it lists the recipes.
    """
    if recipe is None and (named := [word for word in overrides if word in recipe_names(TRAINING)]):
        raise UserError(f"{named[0]} is a recipe: give --recipe {named[0]}.")
    given = flatten(parse_overrides(overrides))
    missing = [name for name, *others in REQUIRED_KEYS if not {name, *others} & given.keys()]
    if recipe is None and missing:
        raise UserError(
            f"There is no --recipe, and without one {', '.join(missing)} must be given as well. "
            f"--recipe FILE or NAME; the names are {', '.join(recipe_names(TRAINING))}. `own` trains on your own pairs."
        )
    from pipeline.training.recipe import load_recipe  # here, because importing it takes seconds

    return load_recipe(recipe, overrides, dataset_size=dataset_size, scaled=scaled)


def recipe_names(folder: Path) -> tuple[str, ...]:
    """The names of the recipes in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


class FiniteRange(click.FloatRange):
    """A number within bounds; click's range has NaN and infinity, too."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
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
        near = suggest(given.stem, recipe_names(self.folder))
        raise UserError(f"There is no recipe {value}. {near} The path of a YAML file works, too.")
