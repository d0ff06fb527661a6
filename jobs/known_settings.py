"""Every setting with its default, allowed values and meaning; settings and recipes on the command line.

A setting is documented in one place, a string literal under its field of a `@section` class.
"""

from __future__ import annotations

import inspect
import json
import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import yaml
from pydantic.fields import FieldInfo

from pipeline.config import SYNONYMS, flatten, parse_overrides, section_in, suggest
from pipeline.departed import COMMANDS
from pipeline.errors import UserError
from pipeline.registries import Registry

if TYPE_CHECKING:
    from pipeline.training.recipe import RunConfig

TRAINING = Path(__file__).parent / "recipes"
DOWNLOAD = TRAINING / "download"
REQUIRED_KEYS = (("output",), ("data.sources", "data"), ("samples", "epochs"), ("batch_size",))
"""What a run must be given, each with what can be given instead."""
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


@dataclass(frozen=True)
class Setting:
    """The documentation of one setting, in markdown."""

    key: str
    default: str
    """As YAML, or `required`, or `computed` on the machine."""
    allowed: str
    """Kind of value and its range, in words."""
    meaning: str
    """The attribute docstring."""


@dataclass(frozen=True)
class Chapter:
    """Settings that are listed together."""

    program: str
    heading: str
    about: str
    settings: Sequence[Setting]


def chapters(methods: Sequence[str]) -> Iterator[Chapter]:
    """All settings by program and section, those of these objectives last."""
    from data_prep.download_config import DownloadConfig
    from pipeline.evaluation.run.session import EvaluationConfig
    from pipeline.evaluation.watcher import WatchConfig
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
    about = OBJECTIVES.format(methods=_names(methods))
    meaning = "The method. It decides which settings follow."
    name = Setting("objective.name", f"`{DEFAULT_OBJECTIVE}`", _names(methods), meaning)
    yield Chapter(OBJECTIVE_TITLE, "", about, [name])
    for group, settings in _objective_groups(methods):
        yield Chapter(OBJECTIVE_TITLE, "All methods" if group == tuple(methods) else _names(group), "", settings)


def _sections(program: str, whole: str, cls: Any) -> Iterator[tuple[str, str, Any, str]]:
    yield program, whole, cls, ""
    for name, field in cls.__pydantic_fields__.items():
        if hasattr(field.annotation, "__pydantic_fields__") and name != "objective":
            yield program, f"`{name}`", field.annotation, f"{name}."


def _objective_groups(methods: Sequence[str]) -> list[tuple[tuple[str, ...], list[Setting]]]:
    """Groups of methods that share settings, the largest first; where defaults differ, they name their methods."""
    from pipeline.objectives import parse_objective

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
    return sorted(groups.items(), key=lambda item: -len(item[0]))


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
        yield Setting(prefix + name, _default(field), _allowed(field), meaning)
        if typing.get_origin(field.annotation) in (tuple, list):
            element = section_in(typing.get_args(field.annotation)[0])
            yield from settings_of(element, prefix=f"{prefix}{name}[].") if element else ()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if getattr(field.default_factory, "__name__", "") == "<lambda>":  # depends on the machine, so it is not printed
        return "computed"
    plain = json.loads(json.dumps(field.get_default(call_default_factory=True), default=list))
    text = str(yaml.safe_dump(plain, default_flow_style=True, width=10_000)).strip()
    return f"`{text.removesuffix('...').strip()}`"


def _allowed(field: FieldInfo) -> str:
    """The kind of value and its range, for example `integer ≥ 1`, `number in [0, 1)` or "`cosine` or `constant`"."""
    bounds: dict[str, str] = {}
    for item in field.metadata:
        registry = getattr(getattr(item, "func", None), "__self__", None)
        if isinstance(registry, Registry):
            return _either([f"`{name}`" for name in registry.names()])
        bounds |= {name: _figure(getattr(item, name)) for name in SIGNS if hasattr(item, name)}
    limits = "".join(f" {SIGNS[name]} {bound}" for name, bound in bounds.items())
    if len(bounds) == 2:
        ends = ", ".join(bounds[name] for name in SIGNS if name in bounds)
        limits = f" in {'(' if 'gt' in bounds else '['}{ends}{')' if 'lt' in bounds else ']'}"
    kind = _kind(field.annotation)
    return kind.replace(" or null", f"{limits} or null") if " or null" in kind else kind + limits


def _figure(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


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
        return f"path or `{{{', '.join(hint.__pydantic_fields__)}}}`"  # type: ignore[union-attr]
    return {str: "string", bool: "`true` or `false`", int: "integer", float: "number"}.get(hint, str(hint))


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def settings_named(word: str, *, command: str) -> list[str]:
    """The settings of a command that `--WORD` may stand for: of that name, or what people call so."""
    from pipeline.objectives import objective_names

    of_a_run = command in ("train", "plan", "demo", "study", "normalizers")
    programs = (TRAINING_TITLE, OBJECTIVE_TITLE) if of_a_run else (f"`neuclip {command}`",)
    listed = (one.settings for one in chapters(objective_names()) if any(name in one.program for name in programs))
    known = sorted({setting.key for settings in listed for setting in settings if "[]" not in setting.key})
    name = SYNONYMS.get(word, word)
    return [name] if name in known else [key for key in known if key.rpartition(".")[2] == name]


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
