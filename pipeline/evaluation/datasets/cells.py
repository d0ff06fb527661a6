"""What the cells of a table say: texts, lists of texts, and labels, with the names and prompts of their classes."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np

from pipeline.evaluation.datasets.task_data import TaskError, plain

MOST_CLASSES = 1_000_000


def as_text(value: Any, *, where: str) -> str:
    """A cell that must be text, also as UTF-8 in a column of bytes; empty where it is missing."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise TaskError(f"{where} holds text that is not UTF-8 ({error}).") from error
    if value is not None and not isinstance(value, str):
        raise TaskError(f"{where} holds {value!r:.60}, which is not text.")
    return value or ""


def as_list(value: Any, *, where: str) -> list[str]:
    """A list of texts that may itself be stored as text (JSON or Python), or one text on its own."""
    if value is None:
        return []
    if isinstance(value, list | tuple | np.ndarray):
        return [as_text(item, where=where) for item in value]
    text = as_text(value, where=where)
    if not text.strip().startswith("[") or ("]" in text and not text.strip().endswith("]")):
        return [text]
    items = _parsed(text)
    if items is None:
        raise TaskError(f"{where}: {text.strip()[:60]!r} should be a list, but is neither JSON nor Python.")
    return [as_text(item, where=where) for item in items]


def _parsed(text: str) -> list[Any] | None:
    """The list that a text is in JSON or Python."""
    for parse in (ast.literal_eval, json.loads):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: thousands of brackets
            if isinstance(items := parse(text.strip()), list):
                return items
    return None


def as_label(value: Any, *, where: str) -> str:
    """A label as text; whole numbers that are stored with a fraction are written without it, and NaN is none."""
    in_brackets = isinstance(value, str) and value.strip().startswith("[")
    if isinstance(value, list | tuple | np.ndarray) or (in_brackets and _parsed(value) is not None):
        raise TaskError(
            f"{where} has the labels {plain(value, longest=60)}, and a classification task has one per image: keep the "
            "one that counts, or give the row away. To search by several labels, join them as captions (caption)."
        )
    if isinstance(value, float):
        return "" if math.isnan(value) else str(int(value)) if value.is_integer() else str(value)
    # A CSV's numbers are text.
    text = str(value) if isinstance(value, int | Decimal | date) else as_text(value, where=where)
    return re.sub(r"^(-?[0-9]+)\.0+$", r"\1", text.strip())


def number_labels(
    values: Sequence[str], *, stored: Sequence[str], where: Callable[[int], str]
) -> tuple[list[str], list[int]]:
    """Every label there is, 0 to the highest number or the distinct names, and which of them each row has.

    `stored` are the names that the data set has for its labels, if any.
    """
    strange = [row for row, value in enumerate(values) if not re.fullmatch(r"-?[0-9]+", value)]
    if strange and not stored:
        if len(strange) < len(values) and all(_is_number(values[row]) for row in strange):
            row = strange[0]
            raise TaskError(
                f"{where(row)}: {plain(values[row], longest=60)} is not the number of a class, as the other labels are."
            )
        names = sorted(set(values))
        position = {name: number for number, name in enumerate(names)}
        return names, [position[value] for value in values]
    most = len(stored) or MOST_CLASSES
    wrong = next((row for row, value in enumerate(values) if not value.isdecimal() or int(value) >= most), None)
    if wrong is not None:
        hint = "-1 means that this split has no labels" if values[wrong] == "-1" else f"0 to {most - 1:,} are allowed"
        raise TaskError(f"{where(wrong)}: {values[wrong][:40]} is not the number of a class ({hint}).")
    labels = [int(value) for value in values]
    return [str(number) for number in range(len(stored) or max(labels, default=-1) + 1)], labels


def _is_number(label: str) -> bool:
    """Whether a label is a number or stands for a missing one, and is no name."""
    try:
        float(label)
    except ValueError:
        return label.lower() in ("none", "null", "na", "n/a", "<na>")
    return True


def class_names(
    labels: Sequence[str], given: Mapping[str, str] | Sequence[str] | None, *, stored: Sequence[str] = (), where: str
) -> tuple[str, ...]:
    """A name for every label, from what the user gave, or the data set, or the labels themselves."""
    names = list(stored) or [label.replace("_", " ") for label in labels]
    if isinstance(given, Mapping):
        _check_known("classnames", given, [*labels, *stored], labels)
        names = [str(given.get(label, given.get(name, name))) for label, name in zip(labels, names, strict=True)]
    elif given is not None:
        if len(given) != len(labels):
            raise TaskError(f"{where}: classnames has {len(given)} names, but the data has {len(labels)} classes.")
        names = list(map(str, given))
    first: dict[str, str] = {}
    for label, name in zip(labels, names, strict=True):
        if not name.strip():
            raise TaskError(f"{where}: class {label[:60]!r} has no name: give it one in classnames.")
        if (other := first.setdefault(name, label)) != label:
            raise TaskError(
                f"{where}: classes {other[:60]!r} and {label[:60]!r} are both named {name[:60]!r}, so prompts cannot "
                "tell them apart: give them different classnames."
            )
    return tuple(names)


def class_prompts(
    given: Mapping[str, Sequence[str]] | None, labels: Sequence[str], names: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """The texts of every class, given by label or class name; none where templates make them."""
    if given is None:
        return ()
    _check_known("prompts", given, [*labels, *names], names)
    prompts = [given.get(label, given.get(name, ())) for label, name in zip(labels, names, strict=True)]
    for name, texts in zip(names, prompts, strict=True):
        if not texts or not all(text.strip() for text in texts):
            raise TaskError(
                f"The class {plain(repr(name), longest=60)} has no prompts, or a blank one: give it some in prompts."
            )
    return tuple(tuple(dict.fromkeys(texts)) for texts in prompts)


def _check_known(key: str, given: Mapping[str, Any], known: Sequence[str], shown: Sequence[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        classes = ", ".join(plain(name, longest=60) for name in shown[:20])
        raise TaskError(f"{key} has {plain(repr(unknown[0]), longest=60)}, but the classes are {classes}.")
