"""Checks the command lines of README.md, CONTRIBUTING.md and docs/ with the programs' own parsers."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import click

from data_prep.download_config import DownloadConfig
from jobs.cli import COMMANDS, cli
from pipeline.config import merge, parse, parse_overrides, read_yaml
from pipeline.evaluation.run.session import EvaluationConfig
from pipeline.training.recipe import load_recipe

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "jobs" / "recipes"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
ASSIGNMENT = re.compile(r"[A-Z_]+=")
SETTING = re.compile(r"^[a-z_.0-9]+=")
# Required settings of a run, for command lines that are shown without a recipe.
BARE = ["output=runs/x", "samples=1000000", "batch_size=1024", "data.sources=data/x"]


@dataclass(frozen=True)
class Line:
    """One command of a page, with the assignments before it."""

    page: str
    environment: dict[str, str]
    words: tuple[str, ...]

    def __str__(self):
        return f"{self.page}: {' '.join(self.words)}"


def blocks(language, page):
    return [body for lang, body in BLOCK.findall(page.read_text(encoding="utf-8")) if lang == language]


def lines(pages=PAGES):
    """Every command of the pages' bash blocks, without comments."""
    found = []
    for page in pages:
        for text in (line for body in blocks("bash", page) for line in body.replace("\\\n", " ").splitlines()):
            words = shlex.split(text, comments=True)
            count = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))
            environment = dict(word.split("=", 1) for word in words[:count])
            if words[count:]:
                found.append(Line(page.name, environment, tuple(words[count:])))
    return found


def check(line):
    """Pass the line to the parser of the program that it calls; errors of that parser are propagated."""
    program, arguments = line.words[0], list(line.words[1:])
    if Path(program).suffix == ".sh" or (program == "bash" and arguments):
        script = program if program != "bash" else arguments.pop(0)
        for words in _dry_run(script, arguments, line.environment):
            check(Line(line.page, {}, tuple(words)))
    else:
        assert program in PROGRAMS, f"{line}: tests/documents.py does not know {program}"
        PROGRAMS[program](arguments)


def check_job(name, arguments):
    """Check `neuclip NAME ARGUMENTS` or `-m jobs.NAME ARGUMENTS`: options by click, settings by the configuration."""
    assert name in COMMANDS, f"there is no command {name}"
    command = cli.get_command(click.Context(cli), name)
    if "--help" in arguments:
        return
    given = [word for word in arguments if word != "..."]
    with mock.patch.object(click.Path, "convert", lambda self, value, param, ctx: value):  # run folders need not exist
        recipe = command.make_context(name, list(given)).params.get("recipe")
    settings = [word for word in given if SETTING.match(word)]
    assert name in SETTINGS or not settings, f"{name} takes no settings"
    assert recipe is None or (ROOT / recipe).is_file(), recipe
    if name in SETTINGS:
        SETTINGS[name](None if recipe is None else ROOT / recipe, settings)


def _neuclip(arguments):
    arguments = [word for word in arguments if word != "--debug"]
    if arguments[0] not in ("--help", "--version"):
        check_job(arguments[0], arguments[1:])


class _Parsed(Exception):
    """Raised when the parser has accepted the arguments, so that the command itself does not run."""


def _module(module, arguments):
    """Check a job, or run another program until its argparse or click parser has accepted the arguments."""
    if not module.startswith(("jobs.bench.", "data_prep.")):
        check_job(module.removeprefix("jobs."), arguments)
        return
    real = argparse.ArgumentParser.parse_args

    def parse_only(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise _Parsed

    with (
        mock.patch.object(sys, "argv", [module, *arguments]),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_only),
        mock.patch.object(click.Command, "invoke", side_effect=_Parsed),
        contextlib.suppress(_Parsed),
    ):
        runpy.run_module(module, run_name="__main__")
        raise AssertionError(f"{module} has no parser that could accept {arguments}")


def _launcher(program, arguments):
    """Check the options of a launcher, and of the module that it starts."""
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.launcher.runner import parse_args
    from torch.distributed.run import get_args_parser

    if program == "deepspeed":
        options = parse_args(arguments)
        assert options.hostfile == "/job/hostfile" or (ROOT / options.hostfile).is_file()
        _module(options.user_script, options.user_args)
    else:
        parser = get_args_parser() if program == "torchrun" else launch_command_parser()
        options = parser.parse_args(arguments if program == "torchrun" else arguments[1:])
        _module(options.training_script, options.training_script_args)
    assert options.module


def _sbatch(arguments):
    """Check the options of sbatch, then one of our scripts and its arguments."""
    place = next(i for i, word in enumerate(arguments) if not word.startswith("-"))
    script = ROOT / arguments[place]
    assert "#SBATCH" in script.read_text(encoding="utf-8")
    for words in _dry_run(arguments[place], arguments[place + 1 :], {}):
        check(Line(script.name, {}, tuple(words)))


def _dry_run(script, arguments, environment):
    """Yield the commands that one of our scripts would run."""
    variables = {**os.environ, **environment, "CONTAINER": "", "DRY_RUN": "1"}
    words = ["bash", script, *arguments]
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    printed = [shlex.split(text) for text in (done.stdout + done.stderr).splitlines()]
    commands = [words for words in printed if words and words[0] in ("neuclip", "python", "sbatch")]
    assert commands, f"{script} printed no command"
    for words in commands:
        if words[0] == "sbatch":  # sbatch with --wrap COMMAND instead of a script
            words = words[words.index("--wrap") + 1 :]
        yield [word.replace("$SLURM_ARRAY_TASK_ID", "0") for word in words]


def _make(arguments):
    for target in (word for word in arguments if "=" not in word):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), target


def _container(arguments):
    """Check docker and apptainer: the files of ours that they name, and the command that runs in the container."""
    for option, value in itertools.pairwise(arguments):
        if option == "--file":
            assert (ROOT / value).is_file(), value
    if "--entrypoint" in arguments:
        PROGRAMS[arguments[arguments.index("--entrypoint") + 1]](arguments[arguments.index("neuclip") + 1 :])
    elif arguments[0] in ("run", "exec"):
        _neuclip(arguments[arguments.index("neuclip") + 1 :])


PROGRAMS: dict[str, Callable[[list[str]], None]] = {
    "neuclip": _neuclip,
    "python": lambda arguments: _module(arguments[1], arguments[2:]),  # -m
    **{name: functools.partial(_launcher, name) for name in ("deepspeed", "torchrun", "accelerate")},
    "sbatch": _sbatch,
    "make": _make,
    "docker": _container,
    "apptainer": _container,
    **dict.fromkeys(("source", "git", "tensorboard", "pytest", "ruff", "mypy"), lambda arguments: None),
}


def _training(recipe, settings):
    load_recipe(recipe, settings if recipe is not None else [*BARE, *settings], dataset_size=100_000)


def _download(recipe, settings):
    tree = read_yaml(recipe) if recipe is not None else {}
    source = parse(DownloadConfig, merge(tree, parse_overrides(settings))).source
    assert source.table or source.hub, settings


def _watch(recipe, settings):
    from pipeline.evaluation.watcher import WatchConfig

    tree = parse_overrides(settings)
    parse(EvaluationConfig, tree.pop("evaluation", {}), prefix="evaluation")
    parse(WatchConfig, tree)


SETTINGS: dict[str, Callable[[Path | None, list[str]], object]] = {
    "train": _training,
    "plan": _training,
    "normalizers": lambda _, settings: _training(RECIPES / "demo.yaml", settings),
    "demo": lambda _, settings: _training(RECIPES / "demo.yaml", settings),
    "study": lambda _, settings: _training(RECIPES / "desk.yaml", settings),
    "download": _download,
    "evaluate": lambda _, settings: parse(EvaluationConfig, parse_overrides(settings)),
    "watch": _watch,
}
