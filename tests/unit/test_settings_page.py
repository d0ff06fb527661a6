"""docs/settings.md says what the configuration classes say, and every setting has its attribute docstring."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jobs.settings import EXPERT, chapters, command, page, settings_of
from pipeline.config import read_yaml
from pipeline.errors import UserError
from pipeline.objectives import objective_names
from pipeline.training.recipe import RunConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"


def sections() -> Iterator[tuple[str, str]]:
    """Module and name of every public class with the `section` decorator."""
    for path in sorted(path for folder in ("pipeline", "data_prep", "jobs") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if "section" in map(ast.unparse, node.decorator_list):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts), node.name


@pytest.mark.parametrize(("module", "name"), sections(), ids=lambda value: value)
def test_every_setting_is_documented(module, name):
    """Subsections need no docstring under their field: their class has one."""
    cls = getattr(importlib.import_module(module), name)
    own = [setting for setting in settings_of(cls) if "." not in setting.key]
    missing = [setting.key for setting in own if not setting.meaning]
    assert not missing, f"{module}.{name} needs a docstring under each of: {', '.join(missing)}"


def test_the_page_is_up_to_date():
    """For the methods that the page has: a new one is added to the page by `make settings`, when its author likes."""
    text = PAGE.read_text(encoding="utf-8")
    listed = re.search(r"`objective.name` selects the method: (.+?)\.", text)
    assert listed, "the page lists no methods"
    methods = re.findall(r"`(\w+)`", listed[1])
    assert "neuclip" in methods
    assert text == page(methods), "docs/settings.md is out of date: run `make settings`"


def keys_in(tree: object, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a recipe; those of a list's entries as `key[].inner`."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield f"{prefix}{name}"
            yield from keys_in(value, f"{prefix}{name}{'[]' if isinstance(value, list) else ''}.")
    elif isinstance(tree, list):
        for value in tree:
            yield from keys_in(value, prefix)


def test_every_setting_is_in_a_recipe_a_study_or_a_page():
    """A setting that is in none of them has no known use: it leaves, or a page says when to change it."""
    recipes = {key for path in ROOT.glob("jobs/recipes/**/*.yaml") for key in keys_in(read_yaml(path))}
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *ROOT.glob("docs/*.md")) if path != PAGE]
    code = [span for text in pages for span in re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)]
    blocks = [yaml.safe_load(block) for text in pages for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    text = "\n".join([*code, *(path.read_text(encoding="utf-8") for path in ROOT.glob("jobs/studies/*.yaml"))])
    named = recipes | {key for block in blocks for key in keys_in(block)}
    named |= set(re.findall(r"[\w.]*\w", text))
    keys = {setting.key for chapter in chapters(objective_names()) for setting in chapter.settings}
    lost = [key for key in sorted(keys - named) if not ("[]" in key and key.rpartition(".")[2] in named)]
    assert not lost, f"in no recipe, study or page: {', '.join(lost)}"


def test_settings_in_the_terminal():
    done = CliRunner().invoke(command, ["data.streams"])
    assert "data.streams  (default 64; integer in [1, 65,536])" in done.output
    assert "tau_lr" not in done.output
    assert "objective.tau_lr" in CliRunner().invoke(command, ["tau", "lr"]).output
    for wrong, nearest in (("data.straems", "data.streams"), ("optimzer", "optimizer")):
        with pytest.raises(UserError, match=f"The nearest is {nearest}\\."):
            CliRunner().invoke(command, [wrong], catch_exceptions=False)


def test_expert_settings_are_shown_to_those_who_ask():
    def shown(*arguments: str) -> str:
        return CliRunner().invoke(command, list(arguments), catch_exceptions=False).output

    keys = {setting.key for chapter in chapters(objective_names()) for setting in chapter.settings}
    assert keys >= EXPERT, f"no settings: {sorted(EXPERT - keys)}"
    for arguments, there in (((), False), (("--all",), True), (("engine.",), False), (("engine.probe",), True)):
        assert ("  engine.probe  (" in shown(*arguments)) == there, arguments
    assert "`engine.probe`" not in PAGE.read_text(encoding="utf-8")


def test_every_key_of_training_is_listed_with_its_default():
    found = {setting.key: setting for setting in settings_of(RunConfig)}
    assert found["samples"].default == "required"
    assert found["optimizer.betas"].default == "`[0.9, 0.98]`"
    assert found["optimizer.name"].allowed == "`adamw`, `lamb`, `lion`, `sgd` or `muon`"
    assert found["model.patch_dropout"].allowed == "number in [0, 1) or null"
    assert found["data.sources[].weight"].default == "`1.0`"
