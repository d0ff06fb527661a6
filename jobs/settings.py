"""`neuclip settings`: every setting with its default, allowed values and meaning, as in docs/settings.md."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from jobs.settings_table import COMPUTED, REQUIRED, Setting, settings_of
from pipeline.errors import UserError

INTRODUCTION = """\
# Settings

Every setting of `neuclip train`, `download`, `evaluate` and `watch`, with its default and what is allowed. This page is
written by `make settings` from the docstrings of the configuration classes; `neuclip settings WORD` prints the same in
a terminal.

A recipe is a tree of these settings in YAML, and the command line overrides it:
`neuclip train --recipe cc12m data.workers=8`. `neuclip train --dry-run` checks a configuration and prints it.
`null` means none or automatic.

"""
OBJECTIVES = """\
## Objectives

`objective.name` selects the method: {methods}. It decides
which other settings the section has; equations are in [Methods](methods.md). Where methods have different defaults,
the default column names them.

"""


@click.command(name="settings")
@click.option("--markdown", is_flag=True, help="Print docs/settings.md.")
@click.argument("words", nargs=-1, metavar="[WORD]...")
def command(markdown: bool, words: tuple[str, ...]) -> None:
    """List settings with their defaults, allowed values and meanings.

    WORD selects the settings whose name contains it: `neuclip settings data.` or `neuclip settings tau lr`.
    """
    from pipeline.objectives import objective_names

    if markdown:
        click.echo(page(objective_names()), nl=False)
        return
    found = 0
    for title, settings in listing():
        chosen = [setting for setting in settings if all(word in setting.key for word in words)]
        found += len(chosen)
        if chosen:
            click.secho(title, bold=True)
        for setting in chosen:
            default = REQUIRED if setting.default == REQUIRED else f"default {setting.default}"
            click.echo(f"  {setting.key}  ({default}; {_plain(setting.allowed)})")
            click.echo(textwrap.fill(_plain(setting.meaning), 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if not found:
        raise UserError(f"No setting contains {' and '.join(map(repr, words))}: neuclip settings lists all of them.")


def listing() -> Iterator[tuple[str, Sequence[Setting]]]:
    """The settings of each program, under a title for the terminal."""
    from pipeline.objectives import objective_names

    for title, sections in programs().items():
        yield title, [setting for _, cls, prefix in sections for setting in _own(cls, prefix)]
    for name in objective_names():
        yield f"Objective {name}", list(settings_of(_objective(name), prefix="objective."))


def programs() -> dict[str, list[tuple[str, Any, str]]]:
    """Programs with their sections (heading, class, dotted prefix), without the objective's section."""
    from data_prep.settings.download_config import DownloadConfig
    from data_prep.settings.icons_config import IconsConfig
    from pipeline.evaluation.runner.session import EvaluationConfig
    from pipeline.evaluation.watch.watcher import WatchConfig
    from pipeline.training.recipe import RunConfig

    return {
        "Training (`neuclip train`, `neuclip plan`)": list(_sections(RunConfig, whole="The run")),
        "Ingestion (`neuclip download`)": list(_sections(DownloadConfig, whole="The dataset")),
        "Icons (`neuclip download --recipe icons`)": list(_sections(IconsConfig, whole="The dataset")),
        "Evaluation (`neuclip evaluate`)": [("", EvaluationConfig, "")],
        "Watching (`neuclip watch`; those of evaluation as `evaluation.KEY`)": [("", WatchConfig, "")],
    }


def _sections(cls: Any, *, whole: str) -> Iterator[tuple[str, Any, str]]:
    yield whole, cls, ""
    for name, field in cls.__pydantic_fields__.items():
        if hasattr(field.annotation, "__pydantic_fields__") and name != "objective":
            yield f"`{name}`", field.annotation, f"{name}."


def _own(cls: Any, prefix: str) -> Iterator[Setting]:
    """The settings of a section; for a whole program (no prefix), only those outside its sections."""
    for setting in settings_of(cls, prefix=prefix):
        if prefix or "." not in setting.key:
            yield setting


def _objective(name: str) -> Any:
    from pipeline.objectives import parse_objective

    return type(parse_objective({"name": name}))


def page(methods: Sequence[str]) -> str:
    """The text of docs/settings.md with these objectives."""
    parts = [INTRODUCTION]
    for title, sections in programs().items():
        parts.append(f"## {title}\n\n")
        for heading, cls, prefix in sections:
            parts.append(f"### {heading}\n\n" if heading else "")
            about = _summary(cls)
            parts.append(f"{about}\n\n" if about else "")
            parts.append(_table((setting.key, _default(setting), setting) for setting in _own(cls, prefix)))
    parts += [OBJECTIVES.format(methods=_names(methods)), *_objective_tables(methods)]
    return "".join(parts).rstrip() + "\n"


def _objective_tables(methods: Sequence[str]) -> Iterator[str]:
    """One table per group of methods that share settings, the largest group first."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in methods:
        for setting in settings_of(_objective(name), prefix="objective."):
            if setting.key != "objective.name":
                rows.setdefault((setting.key, setting.allowed, setting.meaning), {})[name] = setting.default
    groups: dict[tuple[str, ...], list[tuple[str, str, Setting]]] = {}
    for (key, allowed, meaning), defaults in rows.items():
        setting = Setting(key, "", allowed, meaning)
        groups.setdefault(tuple(defaults), []).append((key, _defaults(defaults), setting))
    for group, members in sorted(groups.items(), key=lambda item: -len(item[0])):
        yield f"### {'All methods' if group == tuple(methods) else _names(group)}\n\n"
        yield _table(members)


def _defaults(defaults: Mapping[str, str]) -> str:
    """The most common default, then the others with their methods."""
    methods_of: dict[str, list[str]] = {}
    for name, value in defaults.items():
        methods_of.setdefault(value, []).append(name)
    usual, *others = sorted(methods_of, key=lambda value: -len(methods_of[value]))
    return "; ".join([f"`{usual}`", *(f"{_names(methods_of[value])}: `{value}`" for value in others)])


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)


def _table(rows: Iterable[tuple[str, str, Setting]]) -> str:
    text = "| key | default | allowed | meaning |\n|---|---|---|---|\n"
    for key, default, setting in rows:
        text += f"| `{key}` | {default} | {_cell(setting.allowed)} | {_cell(setting.meaning)} |\n"
    return text + "\n"


def _default(setting: Setting) -> str:
    return setting.default if setting.default in (REQUIRED, COMPUTED) else f"`{setting.default}`"


def _summary(cls: type) -> str:
    """The class docstring without its indentation."""
    return inspect.cleandoc(cls.__doc__ or "").strip()


def _cell(text: str) -> str:
    """Replace None, True and False by their YAML names, and escape pipes, which would end the table cell."""
    for python, yaml in (("None", "`null`"), ("True", "`true`"), ("False", "`false`")):
        text = re.sub(rf"`?\b{python}\b`?", yaml, text)
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    return _cell(text).replace("`", "")


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.settings")
