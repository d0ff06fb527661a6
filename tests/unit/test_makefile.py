"""`make` retries an installation after a network failure: pip itself only resumes a download."""

import fnmatch
import itertools
import os
import re
import shutil
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
PINS = {canonicalize_name(name): version for name, version in (line.split("==") for line in LINES)}
PYTHON = """#!/bin/sh
echo "$*${{PYTHON:+ with PYTHON}}" >> {calls}
test $(wc -l < {calls}) -gt {failures}
"""


def test_pre_commit_uses_the_same_ruff_version_as_the_tests():
    hooks = re.findall(r"ruff==([\d.]+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert hooks == [PINS["ruff"]] * 2
    assert len(PINS) == len(LINES), "one line a package"


def test_no_folder_of_tests_is_left_out(pytestconfig):
    """pytest passes over folders of some names, such as `dist`, without a word."""
    ignored = pytestconfig.getini("norecursedirs")
    folders = {part for file in (ROOT / "tests").rglob("test_*.py") for part in file.relative_to(ROOT).parts[:-1]}
    assert "dist" in folders
    assert [name for name in folders if any(fnmatch.fnmatch(name, pattern) for pattern in ignored)] == []


def test_constraints_pin_every_requirement():
    """Also those of the build: the setuptools of a new virtual environment may be too old for pyproject.toml."""
    extras = dict(SETTINGS["project"]["optional-dependencies"])
    extras.pop("trackio")  # cannot be installed with them, see pyproject.toml
    required = [*SETTINGS["build-system"]["requires"], *SETTINGS["project"]["dependencies"]]
    for requirement in map(Requirement, itertools.chain(required, *extras.values())):
        assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)]), requirement


def test_what_is_pinned_accepts_the_oldest_python():
    """Regression test: `make test` could not be installed on Debian 12, whose Python is 3.11.2."""
    oldest = re.findall(r">=([\d.]+)", SETTINGS["project"]["requires-python"])[0]
    metadata = [one.metadata for one in distributions()]
    wanted = {canonicalize_name(one["Name"]): one["Requires-Python"] for one in metadata if "Requires-Python" in one}
    assert len(wanted.keys() & PINS.keys()) > 100
    newer = {name for name in wanted.keys() & PINS.keys() if not SpecifierSet(wanted[name]).contains(f"{oldest}.0")}
    assert not newer, f"pinned releases that need a newer Python than {oldest}.0"


def test_the_changelog_starts_with_the_current_version():
    """After what is not released yet."""
    version = SETTINGS["project"]["version"]
    headings = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(heading for heading in headings if heading != "Unreleased") == version
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version


@pytest.mark.parametrize("failures", [2, 3])
def test_a_failed_installation_is_retried(tmp_path, failures):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    calls, python = tmp_path / "calls", tmp_path / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(calls=calls, failures=failures), encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "VENV=env", "PYTHON=python3", "PAUSES=0 0", "environment"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},  # set by `make test`
        capture_output=True,
        text=True,
        timeout=60,
    )
    asked, first = calls.read_text(encoding="utf-8").splitlines(), "-m pip install --quiet --upgrade pip"
    assert not any("with PYTHON" in call for call in asked)  # the cluster's templates would take this interpreter
    assert done.stdout.count("once more in 0 s") == 2
    assert asked[:3] == [first] * 3
    assert [call.split()[-1] for call in asked[3:]] == (["wheel", ".[dev]"] if failures == 2 else []), done.stderr
    assert (done.returncode == 0) == (tmp_path / "env/.ready").exists() == (failures == 2)
