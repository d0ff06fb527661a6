"""docs/settings.md says what the configuration classes say, and every setting has its attribute docstring."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jobs.settings import EXPERT, chapters, command, page
from pipeline.config import read_yaml
from pipeline.errors import UserError
from pipeline.objectives import objective_names

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "settings.md"


def all_settings():
    return [setting for chapter in chapters(objective_names()) for setting in chapter.settings]


def test_every_setting_is_documented():
    assert not [setting.key for setting in all_settings() if not setting.meaning], "these need docstrings"


def test_the_page_is_up_to_date():
    """For the methods that the page has: a new one is added to the page by `make settings`, when its author likes."""
    text = PAGE.read_text(encoding="utf-8")
    listed = re.search(r"`objective.name` selects the method: (.+?)\.", text)
    assert listed, "the page lists no methods"
    methods = re.findall(r"`(\w+)`", listed[1])
    assert "neuclip" in methods
    assert text == page(methods), "docs/settings.md is out of date: run `make settings`"


def keys_in(tree, prefix=""):
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
    keys = {setting.key for setting in all_settings()}
    lost = [key for key in sorted(keys - named) if not ("[]" in key and key.rpartition(".")[2] in named)]
    assert not lost, f"in no recipe, study or page: {', '.join(lost)}"


def shown(*arguments):
    return CliRunner().invoke(command, list(arguments), catch_exceptions=False).output


def test_settings_in_the_terminal():
    assert "data.streams  (default 64; integer in [1, 65,536])" in shown("data.streams")
    assert "tau_lr" not in shown("data.streams")
    assert "objective.tau_lr" in shown("tau", "lr")
    for wrong, nearest in (("data.straems", "data.streams"), ("optimzer", "optimizer")):
        with pytest.raises(UserError, match=f"The nearest is {nearest}\\."):
            shown(wrong)


def test_expert_settings_are_shown_to_those_who_ask():
    keys = {setting.key for setting in all_settings()}
    assert keys >= EXPERT, f"no settings: {sorted(EXPERT - keys)}"
    for arguments, there in (((), False), (("--all",), True), (("engine.",), False), (("engine.probe",), True)):
        assert ("  engine.probe  (" in shown(*arguments)) == there, arguments
    assert "`engine.probe`" not in PAGE.read_text(encoding="utf-8")
