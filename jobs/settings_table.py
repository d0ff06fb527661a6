"""The settings of a config section: every key with its default, allowed values and attribute docstring.

Settings are documented in one place, a string literal under the field of the `@section` class. `neuclip settings` and
`docs/settings.md` are generated from it.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from pipeline.config import section_in
from pipeline.registries import Registry

REQUIRED, COMPUTED = "required", "computed"
TRAINING_TITLE = "Training (`neuclip train`, `neuclip plan`)"
OBJECTIVE_TITLE = "Objectives: "
EXPERT = frozenset(
    """
    max_skipped_steps data.replacement data.timeout_minutes data.retries data.altered_shards model.packed_attention
    optimizer.eps engine.probe engine.timeout_minutes engine.lost_rank_seconds telemetry.peak_tflops objective.eps
    objective.tau_schedule objective.tau_lr_fall objective.gamma_decay_epochs objective.npn_objective
    objective.npn_schedule objective.npn_update objective.npn_precision objective.reset_accumulator
    objective.restart_with objective.stop_gradient source.hash_kind source.rows guard.max_pixels
    guard.host_connections guard.backoff fetch.total_timeout monitor.probe blank_class relock together
    """.split()  # noqa: SIM905
)
"""Settings that hardly anybody changes: `neuclip settings` shows them when asked, docs/settings.md leaves them out."""


@dataclass(frozen=True)
class Setting:
    """The documentation of one setting."""

    key: str
    default: str
    """As YAML, or `required`."""
    allowed: str
    """Kind of value and its range, in words."""
    meaning: str
    """The attribute docstring."""


def settings_of(cls: Any, *, prefix: str = "") -> Iterator[Setting]:
    """Every key of a section class and its subsections, in order of declaration.

    Args:
        cls: A class made by `pipeline.config.section`.
        prefix: Dotted path of the section, with a trailing dot.
    """
    for name, field in cls.__pydantic_fields__.items():
        inner = section_in(field.annotation)
        if inner is not None:
            yield from settings_of(inner, prefix=f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, _default(field), _allowed(field), _meaning(cls, name))
            if (element := _element(field.annotation)) is not None:
                yield from settings_of(element, prefix=f"{prefix}{name}[].")


def _meaning(cls: Any, name: str) -> str:
    """The attribute docstring of a field as one paragraph, from the class that declares it."""
    declared = (
        vars(base)["__pydantic_fields__"].get(name) for base in cls.__mro__ if "__pydantic_fields__" in vars(base)
    )
    return " ".join(next((field.description for field in declared if field and field.description), "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return REQUIRED
    if getattr(field.default_factory, "__name__", "") == "<lambda>":  # depends on the machine, so it is not printed
        return COMPUTED
    value = field.get_default(call_default_factory=True)
    plain = json.loads(json.dumps(value, default=list))
    return str(yaml.safe_dump(plain, default_flow_style=True, width=10_000)).split("\n...")[0].strip()


def _allowed(field: FieldInfo) -> str:
    """The kind of value and its range, for example `integer ≥ 1`, `number in [0, 1)` or "`cosine` or `constant`"."""
    kind = _kind(field.annotation)
    for item in field.metadata:
        registry = getattr(getattr(item, "func", None), "__self__", None)
        if isinstance(registry, Registry):
            return _either([f"`{name}`" for name in registry.names()])
    lowest = highest = None
    for item in field.metadata:
        if isinstance(item, (annotated_types.Gt, annotated_types.Ge)):
            lowest = (item.gt, "(", ">") if isinstance(item, annotated_types.Gt) else (item.ge, "[", "≥")
        elif isinstance(item, (annotated_types.Lt, annotated_types.Le)):
            highest = (item.lt, ")", "<") if isinstance(item, annotated_types.Lt) else (item.le, "]", "≤")
    if lowest and highest:
        limits = f" in {lowest[1]}{_figure(lowest[0])}, {_figure(highest[0])}{highest[1]}"
    else:
        limits = next((f" {sign} {_figure(value)}" for value, _, sign in filter(None, (lowest, highest))), "")
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
    if _is_sequence(hint):
        many = len(inner) == 2 and inner[1] is Ellipsis
        return f"list of {_kind(inner[0])}" if many or len(inner) == 1 else f"{len(inner)} × {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    if is_dataclass(hint):
        names = ", ".join(hint.__pydantic_fields__)  # type: ignore[union-attr]
        return f"path or `{{{names}}}`"
    return {str: "string", bool: "`true` or `false`", int: "integer", float: "number"}.get(hint, str(hint))


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} or {parts[-1]}"


def _is_sequence(hint: Any) -> bool:
    return typing.get_origin(hint) in (tuple, list)


def _element(hint: Any) -> Any:
    """The section that a list holds, if it holds sections."""
    return section_in(typing.get_args(hint)[0]) if _is_sequence(hint) else None


def listing() -> Iterator[tuple[str, Sequence[Setting]]]:
    """The settings of each program, under a title for the terminal."""
    from pipeline.objectives import objective_names
    from pipeline.training.recipe_file import DEFAULT_OBJECTIVE

    methods = objective_names()
    name = Setting("objective.name", DEFAULT_OBJECTIVE, names(methods), "The method. It decides which settings follow.")
    for title, sections in programs().items():
        yield title, [setting for _, cls, prefix in sections for setting in own_settings(cls, prefix)]
    yield f"{OBJECTIVE_TITLE}the method", [name]
    for group, settings in objective_groups(methods):
        yield f"{OBJECTIVE_TITLE}{'all' if group == methods else ', '.join(group)}", settings


def programs() -> dict[str, list[tuple[str, Any, str]]]:
    """Programs with their sections (heading, class, dotted prefix), without the objective's section."""
    from data_prep.settings.download_config import DownloadConfig
    from pipeline.evaluation.run.session import EvaluationConfig
    from pipeline.evaluation.watcher import WatchConfig
    from pipeline.training.recipe import RunConfig
    from pipeline.training.recipe_file import RecipeKeys, ScheduleKeys

    return {
        TRAINING_TITLE: [
            *_sections(RunConfig, whole="The run"),
            ("Keys of recipes", RecipeKeys, ""),
            ("", ScheduleKeys, "schedule."),
        ],
        "Ingestion (`neuclip download`)": list(_sections(DownloadConfig, whole="The dataset")),
        "Evaluation (`neuclip evaluate`)": [("", EvaluationConfig, "")],
        "Watching (`neuclip watch`; those of evaluation as `evaluation.KEY`)": [("", WatchConfig, "")],
    }


def _sections(cls: Any, *, whole: str) -> Iterator[tuple[str, Any, str]]:
    yield whole, cls, ""
    for name, field in cls.__pydantic_fields__.items():
        if hasattr(field.annotation, "__pydantic_fields__") and name != "objective":
            yield f"`{name}`", field.annotation, f"{name}."


def own_settings(cls: Any, prefix: str) -> Iterator[Setting]:
    """The settings of a section; for a whole program (no prefix), only those outside its sections.

    The entries of `validation.sources` are those of `data.sources`.
    """
    for setting in settings_of(cls, prefix=prefix):
        if (prefix or "." not in setting.key) and not setting.key.startswith("validation.sources[]"):
            yield setting


def _objective(name: str) -> Any:
    from pipeline.objectives import parse_objective

    return type(parse_objective({"name": name}))


def objective_groups(methods: Sequence[str]) -> Iterator[tuple[tuple[str, ...], list[Setting]]]:
    """Groups of methods that share settings, the largest first; where defaults differ, they name their methods."""
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in methods:
        for setting in settings_of(_objective(name), prefix="objective."):
            if setting.key != "objective.name":
                rows.setdefault((setting.key, setting.allowed, setting.meaning), {})[name] = setting.default
    groups: dict[tuple[str, ...], list[Setting]] = {}
    for (key, allowed, meaning), defaults in rows.items():
        groups.setdefault(tuple(defaults), []).append(Setting(key, _defaults(defaults), allowed, meaning))
    yield from sorted(groups.items(), key=lambda item: -len(item[0]))


def _defaults(defaults: Mapping[str, str]) -> str:
    """The most common default, then the others with their methods."""
    methods_of: dict[str, list[str]] = {}
    for name, value in defaults.items():
        methods_of.setdefault(value, []).append(name)
    usual, *others = sorted(methods_of, key=lambda value: -len(methods_of[value]))
    return "; ".join([f"`{usual}`", *(f"{names(methods_of[value])}: `{value}`" for value in others)])


def names(methods: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in methods)
