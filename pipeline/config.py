"""Typed configuration: defaults < recipe YAML < dotted overrides, checked before anything is loaded.

Every component has its section (a frozen dataclass made with `section`) beside its code. This module merges the layers,
checks them, and explains what is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, dataclass_transform

import pydantic
import yaml

from pipeline.departed import SETTINGS as DEPARTED
from pipeline.departed import VALUES
from pipeline.errors import UserError

log = logging.getLogger(__name__)
T = TypeVar("T")

Tree = dict[str, Any]
UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values of settings that are not in use."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(pydantic.Field, dataclasses.field))
def section(cls: type[T]) -> type[T]:
    """Make `cls` a config section: a frozen, keyword-only dataclass that checks types and refuses unknown keys.

    True and false are no numbers in it, though Python takes them for 1 and 0.
    """

    def no_boolean(cls: Any, value: Any, info: pydantic.ValidationInfo) -> Any:
        if any(isinstance(part, bool) for part in (value if isinstance(value, list | tuple) else [value])):
            kinds = _types_in(cls.__pydantic_fields__[info.field_name].annotation)
            if (int in kinds or float in kinds) and bool not in kinds:
                raise ValueError("should be a valid number, not true or false")
        return value

    cls._numbers_only = pydantic.field_validator("*", mode="before")(no_boolean)  # type: ignore[attr-defined]
    settings = pydantic.ConfigDict(
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )
    return pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=settings)(cls)  # type: ignore[return-value]


def _types_in(hint: Any) -> list[Any]:
    return [kind for part in typing.get_args(hint) for kind in _types_in(part)] or [hint]


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: duplicate keys are errors, 1e6 is a number, 2024-11-01 is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as the base class has it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key in [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]:
            if str(key.value) in seen:
                what = f"the key {key.value!r} is given twice in one mapping"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str | bytes) -> Any:
    """The value that a YAML text describes.

    Raises:
        ValueError: The text is not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, RecursionError) as error:  # a wrong tag: several
        raise ValueError(str(error)) from error


def read_yaml(path: str | Path) -> Tree:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        UserError: The file is missing, is not YAML or is not a mapping.
    """
    path = Path(path)
    try:
        tree = parse_yaml(path.read_bytes()) or {}
    except OSError as error:
        raise UserError(
            f"Cannot read the recipe {path}: {error.strerror}. The shipped recipes are in jobs/recipes/."
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} must be a mapping of sections, but is a {type(tree).__name__}.")
    return tree


def parse_overrides(overrides: Iterable[str]) -> Tree:
    """`["a.b=1", "c=x"]` -> `{"a": {"b": 1}, "c": "x"}`; values are read as YAML."""
    tree: Tree = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"Override {text!r} is not of the form section.key=value, for example optimizer.lr=1e-3.")
        try:
            tree = merge(tree, _nested(key, parse_yaml(value) if value else None))
        except ValueError as error:
            raise UserError(f"The value in override {text!r} is not valid YAML: {error}") from error
    return tree


def _nested(key: str, value: Any) -> Tree:
    """`"a.b", 1` -> `{"a": {"b": 1}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """Merge two trees: mappings key by key, and for everything else the value of `above` replaces that of `below`."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def parse(cls: type[T], tree: Mapping[str, Any], *, prefix: str = "", extra_keys: Iterable[str] = ()) -> T:
    """Build `cls` from a tree of plain values.

    Args:
        cls: A section.
        tree: Its values.
        prefix: Dotted path of this section, put before the keys in messages.
        extra_keys: Dotted keys outside `cls` that are suggested, too, when a key is unknown.

    Raises:
        UserError: It names every wrong key, its value, what is allowed and the nearest valid key.
    """
    try:
        return pydantic.TypeAdapter(cls).validate_python(dict(tree))
    except pydantic.ValidationError as error:
        dot = f"{prefix}." if prefix else ""
        valid = [dot + key for key in keys(cls)] + list(extra_keys)
        problems = [_explain(problem, dot=dot, valid=valid) for problem in error.errors()]
        raise UserError("The configuration is not valid. " + " ".join(problems)) from error


def first_problem(error: pydantic.ValidationError, *, file: str) -> str:
    """What is wrong first in a file that the program has written, as a phrase."""
    first = error.errors()[0]
    return f"in {file}, {'.'.join(map(str, first['loc']))} is wrong: {first['msg']}"


def keys(cls: Any) -> list[str]:
    """Every dotted key of a section class, depth first."""
    names: list[str] = []
    for name, field in cls.__pydantic_fields__.items():
        inner = section_in(field.annotation)
        names += [name, *(f"{name}.{key}" for key in (keys(inner) if inner else ()))]
    return names


def to_tree(config: Any) -> Tree:
    """The plain values of a section, ready for YAML or JSON."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json", serialize_as_any=True)


def dump(config: Any) -> str:
    """The resolved configuration as YAML, keys in the order they are declared."""
    return yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def section_in(hint: Any) -> Any:
    """The section class that a field's annotation names, alone or in a union; None if there is none."""
    candidates = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return next((c for c in candidates if dataclasses.is_dataclass(c)), None)


# What people call a setting -> its name here.
SYNONYMS = {
    "learning_rate": "lr", "base_lr": "lr", "wd": "weight_decay", "warmup": "warmup_steps", "batch": "batch_size",
    "global_batch_size": "batch_size", "num_workers": "workers", "temperature": "tau_init", "architecture": "arch",
    "checkpoint_every": "every", "loss": "name", "accum_freq": "micro_batch", "grad_clip_norm": "gradient_clipping",
    "train_data": "sources", "output_dir": "output", "num_samples": "samples", "resolution": "image_size",
    "model": "arch", "precision": "deepspeed", "report_to": "trackers", "force_image_size": "image_size",
    "force_patch_dropout": "patch_dropout", "torchcompile": "compile",
    "train_num_samples": "samples", "lr_scheduler": "kind", "logs": "output", "data": "sources", "url_list": "table",
    "output_folder": "output",
}  # fmt: skip


def departed(key: str) -> str | None:
    """What `DEPARTED` says of a dotted key, or of a whole section."""
    names = (name for name in DEPARTED if key == name or (name.endswith(".") and f"{key}.".startswith(name)))
    return next((DEPARTED[name] for name in names), None)


def without_departed(stored: Mapping[str, Any], *, file: str | Path) -> Tree:
    """An earlier version's stored configuration without the settings that are gone; those that were set are logged."""
    current, gone = Tree(), list[str]()
    for name, value in flatten(stored).items():
        if departed(name) is None and (name, str(value)) not in VALUES:
            current = merge(current, _nested(name, value))
        elif value not in UNSET:
            gone.append(f"{name} = {value!r}")
    if gone:
        log.warning("%s: settings of an earlier version are ignored: %s.", file, ", ".join(gone))
    return current


def _explain(problem: Any, *, dot: str, valid: list[str]) -> str:
    key, value = dot + ".".join(str(part) for part in problem["loc"]), problem["input"]
    if problem["type"] == "unexpected_keyword_argument":
        if instead := departed(key):
            return f"The setting {key} (given {value!r}) was removed. {instead}"
        # One of the same name in another section, a synonym's, or the closest spelling.
        above, _, last = key.rpartition(".")
        same = [name for name in valid if name.rpartition(".")[2] == SYNONYMS.get(last, last)]
        nearest = difflib.get_close_matches(key, same or valid, n=1, cutoff=0.0)
        siblings = [name.rpartition(".")[2] for name in valid if name.rpartition(".")[0] == above]
        hint = f" The nearest valid key is {nearest[0]}." if nearest else ""
        here = f" Valid here: {', '.join(siblings)}." if siblings else ""
        return f"Unknown key {key} (given {value!r}).{hint}{here}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key} is required and was not given."
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if not problem["loc"]:
        return message.rstrip(".") + "."
    if left := VALUES.get((key, str(value))):
        return f"{key} = {value!r} was removed. {left}"
    shown = value if not dataclasses.is_dataclass(value) else "this section"
    return f"{key} = {shown!r}: {message.rstrip('.')}."


@functools.cache
def suggest(given: str, allowed: tuple[str, ...]) -> str:
    """A sentence for messages about an unknown name: the nearest allowed name, then all of them, or the six nearest."""
    near = difflib.get_close_matches(given, allowed, n=6, cutoff=0.0)
    hint = f"The nearest is {near[0]}. " if near else ""
    if len(allowed) > 40:
        return f"{hint}Near it are {', '.join(near[1:])}, out of {len(allowed)} allowed names."
    return f"{hint}Allowed: {', '.join(allowed)}."
