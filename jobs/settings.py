"""`neuclip settings`: every setting with its default, allowed values and meaning, as in docs/settings.md.

A setting is documented in one place, a string literal under its field of a `@section` class.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple

import click
import yaml
from pydantic.fields import FieldInfo

from pipeline.config import SYNONYMS, section_in, suggest
from pipeline.errors import UserError
from pipeline.registries import Registry

TRAINING_TITLE = "Training (`neuclip train`, `neuclip plan`)"
OBJECTIVE_TITLE = "Objectives"
OBJECTIVES = """\
`objective.name` selects the method: {methods}. It decides
which other settings the section has; equations are in [Methods](methods.md). Where methods have different defaults,
the default column names them."""
SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
EXPERT = frozenset(
    """
    max_skipped_steps data.timeout_minutes data.retries data.altered_shards model.packed_attention
    optimizer.eps engine.probe engine.timeout_minutes engine.lost_rank_seconds telemetry.peak_tflops objective.eps
    objective.tau_schedule objective.tau_lr_fall objective.gamma_decay_epochs objective.npn_objective
    objective.npn_schedule objective.npn_update objective.npn_precision objective.reset_accumulator
    objective.restart_with objective.stop_gradient source.hash_kind source.rows guard.max_pixels
    guard.host_connections guard.backoff fetch.total_timeout blank_class relock
    """.split()  # noqa: SIM905
)
"""Settings that hardly anybody changes: `neuclip settings` shows them when asked, docs/settings.md leaves them out."""
INTRODUCTION = """\
# Settings

The settings of `neuclip train`, `download`, `evaluate` and `watch`, with their defaults and what is allowed. This page
is written by `make settings` from the docstrings of the configuration classes; `neuclip settings WORD` prints the same
in a terminal. `neuclip settings --all` adds the {expert} expert settings, which hardly anybody changes.

A recipe is a tree of these settings in YAML, and the command line overrides it:
`neuclip train --recipe cc12m data.workers=8`. `neuclip train --dry-run` checks a configuration and prints it.
`null` means none or automatic.

"""


class Setting(NamedTuple):
    """The documentation of one setting, in markdown for the cells of a table."""

    key: str
    default: str
    """As YAML, or `required`, or `computed` on the machine."""
    allowed: str
    """Kind of value and its range, in words."""
    meaning: str
    """The attribute docstring."""


class Chapter(NamedTuple):
    """Settings that are listed together."""

    program: str
    heading: str
    about: str
    settings: Sequence[Setting]


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
    listed = [(chapter, setting) for chapter in chapters(objective_names()) for setting in chapter.settings]
    # In the name, or in the description as a word with any ending.
    ended = [rf"(?i)\b{re.escape(word)}(s|es|ed|ing)?\b" for word in words]
    chosen = [
        (chapter, one)
        for chapter, one in listed
        if all(word in one.key or re.search(as_word, one.meaning) for word, as_word in zip(words, ended, strict=True))
    ]
    if not chosen:
        known = tuple(sorted({part for _, setting in listed for part in (setting.key, *setting.key.split("."))}))
        raise UserError(f"No setting contains {' and '.join(map(repr, words))}. {suggest(words[0], known)}")
    keys = {setting.key for _, setting in chosen}
    hidden = frozenset() if everything or keys <= EXPERT else keys & EXPERT
    printed = ""
    for chapter, setting in chosen:
        if setting.key in hidden:
            continue
        of_methods = chapter.program == OBJECTIVE_TITLE and chapter.heading
        title = f"{chapter.program}: {chapter.heading}".replace("`", "") if of_methods else chapter.program
        if title != printed:
            click.secho(printed := title, bold=True)
        default = setting.default if setting.default == "required" else f"default {setting.default}"
        click.echo(f"  {setting.key}  ({default}; {setting.allowed})".replace("`", ""))
        meaning = setting.meaning.replace("`", "")
        click.echo(textwrap.fill(meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    if hidden:
        click.echo(f"\n{len(hidden)} expert settings are left out; --all has them.")


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
            text += "".join(f"| `{key}` | {' | '.join(cells)} |\n" for key, *cells in rows) + "\n"
    return text.rstrip() + "\n"


def settings_named(word: str, *, command: str) -> list[str]:
    """The settings of a command that `--WORD` may stand for: of that name, or what people call so."""
    from pipeline.objectives import objective_names

    of_a_run = command in ("train", "plan", "demo", "study", "normalizers")
    programs = (TRAINING_TITLE, OBJECTIVE_TITLE) if of_a_run else (f"`neuclip {command}`",)
    listed = (one.settings for one in chapters(objective_names()) if any(name in one.program for name in programs))
    known = sorted({setting.key for settings in listed for setting in settings if "[]" not in setting.key})
    name = SYNONYMS.get(word, word)
    return [name] if name in known else [key for key in known if key.rpartition(".")[2] == name]


def chapters(methods: Sequence[str]) -> Iterator[Chapter]:
    """All settings by program and section, those of these objectives last."""
    from data_prep.download_config import DownloadConfig
    from pipeline.evaluation.run.session import EvaluationConfig
    from pipeline.evaluation.watcher import WatchConfig
    from pipeline.objectives import parse_objective
    from pipeline.training.recipe import RunConfig
    from pipeline.training.recipe_file import DEFAULT_OBJECTIVE, RecipeKeys, ScheduleKeys

    watching = "Watching (`neuclip watch`; those of evaluation as `evaluation.KEY`)"
    for program, heading, cls, prefix in (
        *_sections(TRAINING_TITLE, "The run", RunConfig),
        (TRAINING_TITLE, "Keys of recipes", RecipeKeys, ""),
        (TRAINING_TITLE, "", ScheduleKeys, "schedule."),
        *_sections("Ingestion (`neuclip download`)", "The dataset", DownloadConfig),
        ("Evaluation (`neuclip evaluate`)", "", EvaluationConfig, ""),
        (watching, "", WatchConfig, ""),
    ):
        # Of a whole program, those outside its sections; entries of validation.sources are those of data.sources.
        settings = [s for s in settings_of(cls, prefix=prefix) if prefix or "." not in s.key]
        settings = [s for s in settings if not s.key.startswith("validation.sources[]")]
        yield Chapter(program, heading, inspect.cleandoc(cls.__doc__ or "").strip(), settings)
    meaning = "The method. It decides which settings follow."
    setting = Setting("objective.name", f"`{DEFAULT_OBJECTIVE}`", _names(methods), meaning)
    yield Chapter(OBJECTIVE_TITLE, "", OBJECTIVES.format(methods=_names(methods)), [setting])
    # Groups of methods that share settings, the largest first; where defaults differ, they name their methods.
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in methods:
        for setting in settings_of(type(parse_objective({"name": name})), prefix="objective."):
            if setting.key != "objective.name":
                rows.setdefault((setting.key, setting.allowed, setting.meaning), {})[name] = setting.default
    groups: dict[tuple[str, ...], list[Setting]] = {}
    for (key, allowed, meaning), defaults in rows.items():
        methods_of: dict[str, list[str]] = {}
        for name, value in defaults.items():
            methods_of.setdefault(value, []).append(name)
        usual, *others = sorted(methods_of, key=lambda value: -len(methods_of[value]))
        default = "; ".join([usual, *(f"{_names(methods_of[value])}: {value}" for value in others)])
        groups.setdefault(tuple(defaults), []).append(Setting(key, default, allowed, meaning))
    for group, settings in sorted(groups.items(), key=lambda item: -len(item[0])):
        yield Chapter(OBJECTIVE_TITLE, "All methods" if group == tuple(methods) else _names(group), "", settings)


def _sections(program: str, whole: str, cls: Any) -> Iterator[tuple[str, str, Any, str]]:
    yield program, whole, cls, ""
    for name, field in cls.__pydantic_fields__.items():
        if hasattr(field.annotation, "__pydantic_fields__") and name != "objective":
            yield program, f"`{name}`", field.annotation, f"{name}."


def _names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)


def settings_of(cls: Any, *, prefix: str = "") -> Iterator[Setting]:
    """Every key of a section class and its subsections, in order of declaration.

    Args:
        cls: A class made by `pipeline.config.section`.
        prefix: Dotted path of the section, with a trailing dot.
    """
    for name, field in cls.__pydantic_fields__.items():
        if (inner := section_in(field.annotation)) is not None:
            yield from settings_of(inner, prefix=f"{prefix}{name}.")
            continue
        fields = (vars(base).get("__pydantic_fields__", {}).get(name) for base in cls.__mro__)
        meanings = (declared.description for declared in fields if declared)  # the class that declares it has one
        meaning = " ".join(next(filter(None, meanings), "").split())
        if field.is_required():
            default = "required"
        elif getattr(field.default_factory, "__name__", "") == "<lambda>":  # depends on the machine: it is not printed
            default = "computed"
        else:
            plain = json.loads(json.dumps(field.get_default(call_default_factory=True), default=list))
            text = str(yaml.safe_dump(plain, default_flow_style=True, width=10_000)).strip()
            default = f"`{text.removesuffix('...').strip()}`"
        yield Setting(prefix + name, default, _in_yaml(_allowed(field)), _in_yaml(meaning))
        if typing.get_origin(field.annotation) in (tuple, list):
            element = section_in(typing.get_args(field.annotation)[0])
            yield from settings_of(element, prefix=f"{prefix}{name}[].") if element else ()


def _in_yaml(text: str) -> str:
    """Replace None, True and False by their YAML names, and escape pipes, which would end the table cell."""
    for python, name in (("None", "`null`"), ("True", "`true`"), ("False", "`false`")):
        text = re.sub(rf"`?\b{python}\b`?", name, text)
    return text.replace("|", "\\|")


def _allowed(field: FieldInfo) -> str:
    """The kind of value and its range, for example `integer ≥ 1`, `number in [0, 1)` or "`cosine` or `constant`"."""
    bounds: dict[str, str] = {}
    for item in field.metadata:
        registry = getattr(getattr(item, "func", None), "__self__", None)
        if isinstance(registry, Registry):
            return _either([f"`{name}`" for name in registry.names()])
        limited = {name: getattr(item, name) for name in SIGNS if hasattr(item, name)}
        bounds |= {name: f"{end:,}" if isinstance(end, int) else f"{end:g}" for name, end in limited.items()}
    limits = "".join(f" {SIGNS[name]} {bound}" for name, bound in bounds.items())
    if len(bounds) == 2:
        ends = ", ".join(bounds[name] for name in SIGNS if name in bounds)
        limits = f" in {'(' if 'gt' in bounds else '['}{ends}{')' if 'lt' in bounds else ']'}"
    kind = _kind(field.annotation)
    return kind.replace(" or null", f"{limits} or null") if " or null" in kind else kind + limits


def _kind(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return _either([f"`{value}`" for value in inner])
    if origin in (typing.Union, types.UnionType):
        return _either([_kind(part) for part in inner if part is not type(None)] + ["null"] * (type(None) in inner))
    if origin in (tuple, list):
        many = len(inner) == 1 or inner[1] is Ellipsis
        return f"list of {_kind(inner[0])}" if many else f"{len(inner)} × {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    if is_dataclass(hint):
        fields = hint.__pydantic_fields__  # type: ignore[union-attr]
        return f"{'path or ' * ('manifest' in fields)}`{{{', '.join(fields)}}}`"
    return {str: "string", bool: "`true` or `false`", int: "integer", float: "number"}.get(hint, str(hint))


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"
