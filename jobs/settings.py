"""`neuclip settings`: every setting with its default, allowed values and meaning, as in docs/settings.md."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence

import click

from jobs.settings_table import (
    COMPUTED,
    EXPERT,
    REQUIRED,
    Setting,
    listing,
    names,
    objective_groups,
    own_settings,
    programs,
)
from pipeline.config import suggest
from pipeline.errors import UserError

INTRODUCTION = """\
# Settings

The settings of `neuclip train`, `download`, `evaluate` and `watch`, with their defaults and what is allowed. This page
is written by `make settings` from the docstrings of the configuration classes; `neuclip settings WORD` prints the same
in a terminal. `neuclip settings --all` adds the {expert} expert settings, which hardly anybody changes.

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
@click.option("--all", "everything", is_flag=True, help="Expert settings, too.")
@click.option("--markdown", is_flag=True, help="Print docs/settings.md.")
@click.argument("words", nargs=-1, metavar="[WORD]...")
def command(everything: bool, markdown: bool, words: tuple[str, ...]) -> None:
    """List settings with their defaults, allowed values and meanings.

    WORD selects the settings whose name contains it, or whose description has it: `neuclip settings data.` or
    `neuclip settings temperature`. Expert settings are left out if others match, unless --all is given.
    """
    if markdown:
        from pipeline.objectives import objective_names

        click.echo(page(objective_names()), nl=False)
        return
    table = [
        (title, [setting for setting in settings if all(_has(setting, word) for word in words)])
        for title, settings in listing()
    ]
    keys = {setting.key for _, settings in table for setting in settings}
    if not keys:
        every = [setting.key for _, settings in listing() for setting in settings]
        known = tuple(sorted({*every, *(part for key in every for part in key.split("."))}))
        raise UserError(f"No setting contains {' and '.join(map(repr, words))}. {suggest(words[0], known)}")
    hidden = frozenset() if everything or keys <= EXPERT else keys & EXPERT
    for title, settings in table:
        shown = [setting for setting in settings if setting.key not in hidden]
        if shown:
            click.secho(title, bold=True)
        for setting in shown:
            default = REQUIRED if setting.default == REQUIRED else f"default {setting.default}"
            click.echo(f"  {setting.key}  ({_plain(default)}; {_plain(setting.allowed)})")
            click.echo(textwrap.fill(_plain(setting.meaning), 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if hidden:
        click.echo(f"\n{len(hidden)} expert settings are left out; --all has them.")


def _has(setting: Setting, word: str) -> bool:
    """Whether a setting's name contains a word, or its description has it as a word, with any ending."""
    return word in setting.key or bool(re.search(rf"(?i)\b{re.escape(word)}(s|es|ed|ing)?\b", setting.meaning))


def page(methods: Sequence[str]) -> str:
    """The text of docs/settings.md with these objectives."""
    parts = [INTRODUCTION.format(expert=len(EXPERT))]
    for title, sections in programs().items():
        parts.append(f"## {title}\n\n")
        for heading, cls, prefix in sections:
            parts.append(f"### {heading}\n\n" if heading else "")
            about = inspect.cleandoc(cls.__doc__ or "").strip()
            parts.append(f"{about}\n\n" if about else "")
            parts.append(_table((setting.key, _default(setting), setting) for setting in own_settings(cls, prefix)))
    parts.append(OBJECTIVES.format(methods=names(methods)))
    for group, settings in objective_groups(methods):
        if any(setting.key not in EXPERT for setting in settings):
            parts.append(f"### {'All methods' if group == tuple(methods) else names(group)}\n\n")
            parts.append(_table((setting.key, setting.default, setting) for setting in settings))
    return "".join(parts).rstrip() + "\n"


def _table(rows: Iterable[tuple[str, str, Setting]]) -> str:
    text = "| key | default | allowed | meaning |\n|---|---|---|---|\n"
    for key, default, setting in rows:
        if setting.key in EXPERT:
            continue
        text += f"| `{key}` | {default} | {_cell(setting.allowed)} | {_cell(setting.meaning)} |\n"
    return text + "\n"


def _default(setting: Setting) -> str:
    return setting.default if setting.default in (REQUIRED, COMPUTED) else f"`{setting.default}`"


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
