"""`neuclip settings`: every setting with its default, allowed values and meaning, as in docs/settings.md."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import click

from jobs.known_settings import EXPERT, OBJECTIVE_TITLE, Chapter, Setting, chapters
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


@click.command(name="settings")
@click.option("--all", "everything", is_flag=True, help="Expert settings, too.")
@click.option("--markdown", is_flag=True, help="Print docs/settings.md.")
@click.argument("words", nargs=-1, metavar="[WORD]...")
def command(everything: bool, markdown: bool, words: tuple[str, ...]) -> None:
    """List settings with their defaults, allowed values and meanings.

    WORD selects the settings whose name contains it, or whose description has it: `neuclip settings data.` or
    `neuclip settings temperature`. Expert settings are left out if others match, unless --all is given.
    """
    from pipeline.objectives import objective_names

    if markdown:
        click.echo(page(objective_names()), nl=False)
        return
    listed = [(_title(chapter), setting) for chapter in chapters(objective_names()) for setting in chapter.settings]
    chosen = [(title, setting) for title, setting in listed if all(_has(setting, word) for word in words)]
    if not chosen:
        known = tuple(sorted({part for _, setting in listed for part in (setting.key, *setting.key.split("."))}))
        raise UserError(f"No setting contains {' and '.join(map(repr, words))}. {suggest(words[0], known)}")
    keys = {setting.key for _, setting in chosen}
    hidden = frozenset() if everything or keys <= EXPERT else keys & EXPERT
    printed = ""
    for title, setting in chosen:
        if setting.key in hidden:
            continue
        if title != printed:
            click.secho(printed := title, bold=True)
        default = setting.default if setting.default == "required" else f"default {setting.default}"
        click.echo(_plain(f"  {setting.key}  ({default}; {_cell(setting.allowed)})"))
        meaning = _plain(_cell(setting.meaning))
        click.echo(textwrap.fill(meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if hidden:
        click.echo(f"\n{len(hidden)} expert settings are left out; --all has them.")


def _title(chapter: Chapter) -> str:
    of_methods = chapter.program == OBJECTIVE_TITLE and chapter.heading
    return f"{chapter.program}: {_plain(chapter.heading)}" if of_methods else chapter.program


def _has(setting: Setting, word: str) -> bool:
    """Whether a setting's name contains a word, or its description has it as a word, with any ending."""
    return word in setting.key or bool(re.search(rf"(?i)\b{re.escape(word)}(s|es|ed|ing)?\b", setting.meaning))


def page(methods: Sequence[str]) -> str:
    """The text of docs/settings.md with these objectives."""
    text, program = INTRODUCTION.format(expert=len(EXPERT)), ""
    for chapter in chapters(methods):
        rows = [setting for setting in chapter.settings if setting.key not in EXPERT | {"objective.name"}]
        if chapter.program != program:
            text += f"## {chapter.program}\n\n"
            program = chapter.program
        elif not rows:
            continue
        text += f"### {chapter.heading}\n\n" if chapter.heading else ""
        text += f"{chapter.about}\n\n" if chapter.about else ""
        if rows:
            text += "| key | default | allowed | meaning |\n|---|---|---|---|\n"
            cells = ([f"`{s.key}`", s.default, _cell(s.allowed), _cell(s.meaning)] for s in rows)
            text += "".join(f"| {' | '.join(row)} |\n" for row in cells) + "\n"
    return text.rstrip() + "\n"


def _cell(text: str) -> str:
    """Replace None, True and False by their YAML names, and escape pipes, which would end the table cell."""
    for python, name in (("None", "`null`"), ("True", "`true`"), ("False", "`false`")):
        text = re.sub(rf"`?\b{python}\b`?", name, text)
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    return text.replace("`", "")


if __name__ == "__main__":
    from jobs.cli import run as run_command

    run_command(command, prog_name="jobs.settings")
