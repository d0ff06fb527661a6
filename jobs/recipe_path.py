"""The type of `--recipe`: a file, or the name of a bundled recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pipeline.config import suggest
from pipeline.errors import UserError

TRAINING = Path(__file__).parent / "recipes"
DOWNLOAD = TRAINING / "download"


def recipe_names(folder: Path) -> tuple[str, ...]:
    """The names of the recipes in a folder, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.yaml")))


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
        known = recipe_names(self.folder)
        raise UserError(f"There is no recipe {value}. {suggest(given.stem, known)} A path works, too.")

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Recipe names, or files if `incomplete` looks like a path."""
        if "/" in incomplete or incomplete.startswith("."):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(path.stem) for path in sorted(self.folder.glob(f"{incomplete}*.yaml"))]
