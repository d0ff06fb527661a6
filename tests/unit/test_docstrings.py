"""One convention for docstrings: Google style for arguments, attribute docstrings for settings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(path for package in ("pipeline", "data_prep", "jobs") for path in (ROOT / package).rglob("*.py"))
HEADING = re.compile(r"^ *(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
INLINE = re.compile(r"\b(Args|Attributes|Raises|Returns|Yields): \S")
MANY = 5
"""A public function with this many arguments describes each of them; jobs are exempt, whose options have a help."""
Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def documented(text: str) -> Iterator[tuple[Node, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Node) and (docstring := ast.get_docstring(node)):
            yield node, docstring


def entries(docstring: str, heading: str) -> list[str]:
    """The names that a section of a docstring describes."""
    lines = docstring.splitlines()
    if f"{heading}:" not in lines:
        return []
    names = []
    for line in lines[lines.index(f"{heading}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        if found := re.match(r" {4}\*{0,2}([\w.]+): ", line):
            names.append(found[1])
    return names


def parameters(node: Node) -> list[str]:
    """Names of a function's parameters, or of a class's `__init__` parameters and fields."""
    if isinstance(node, ast.ClassDef):
        fields = [
            each.target.id
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        return fields + [name for each in made for name in parameters(each)]
    every = node.args
    optional = [each for each in (every.vararg, every.kwarg) if each]
    named = (*every.posonlyargs, *every.args, *every.kwonlyargs, *optional)
    return [each.arg for each in named if each.arg != "_"]


def problems(text: str, *, needs_args: bool = True) -> Iterator[str]:
    for node, docstring in documented(text):
        if INLINE.search(docstring):
            yield f"{node.name}: a heading such as Args: is alone on its line, its entries are indented below it"
        for heading in ("Args", "Attributes"):
            unknown = set(entries(docstring, heading)) - set(parameters(node))
            if unknown:
                yield f"{node.name}: {heading} describes {sorted(unknown)}, which it does not have"
        for heading in HEADING.findall(docstring):
            if heading in ("Args", "Attributes", "Raises") and not entries(docstring, heading):
                yield f"{node.name}: {heading} has no entry of the form `name: text`"
        if isinstance(node, ast.ClassDef):
            continue
        args, own = entries(docstring, "Args"), [name for name in parameters(node) if name not in ("self", "cls")]
        if args or (len(own) >= MANY and not node.name.startswith("_") and needs_args):
            missing = [name for name in own if name not in args]
            if missing:
                yield f"{node.name}: Args lacks {missing}"


def test_arguments_are_described_in_google_style() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {problem}"
        for path in MODULES
        for problem in problems(path.read_text(encoding="utf-8"), needs_args=path.relative_to(ROOT).parts[0] != "jobs")
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("docstring", "problem"),
    [
        ("Text. Raises: UserError when it fails.", "alone on its line"),
        ("Text.\n\n    Args:\n        other: A thing.\n    ", "does not have"),
        ("Text.\n\n    Args:\n        what it needs.\n    ", "no entry"),
        ("Text.\n\n    Args:\n        first: A thing.\n    ", "lacks"),
    ],
)
def test_each_problem_is_found(docstring: str, problem: str) -> None:
    text = f'def f(first, second):\n    """{docstring}"""\n'
    assert any(problem in found for found in problems(text))
