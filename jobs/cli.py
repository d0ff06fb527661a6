"""`neuclip`: one subcommand per job; a job's module is imported only when the job runs."""

from __future__ import annotations

import gc
import importlib
import itertools
import logging
import os
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

from pipeline.departed import COMMANDS as DEPARTED
from pipeline.errors import EXIT_INTERRUPTED, UserError, exit_code_of, explain

ROOT = Path(__file__).resolve().parents[1]
# Group -> subcommand -> (module whose `command` it is, one line for `neuclip --help`).
GROUPS = {
    "Data": {
        "download": ("jobs.download", "Turn a URL table into webdataset shards with a manifest."),
        "pairs": ("jobs.pairs", "Turn your own image-text pairs into shards with a manifest."),
        "manifest": ("jobs.manifest", "Write the manifest of existing webdataset shards."),
        "verify": ("jobs.verify", "Check shards against their manifest; find duplicates, remove samples."),
        "score": ("jobs.score", "Score every image-text pair of a dataset by how well it fits, to filter data."),
        "features": ("jobs.write_features", "Store every sample's features: a teacher's, or a locked image tower's."),
    },
    "Train": {
        "demo": ("jobs.demo", "Make the built-in corpus, ingest, train, evaluate and report, with one command."),
        "plan": ("jobs.plan", "Estimate a recipe's memory, steps and time before a run."),
        "train": ("jobs.train", "Train a CLIP model from a recipe."),
        "settings": ("jobs.settings", "List settings with their defaults and meanings."),
        "doctor": ("jobs.doctor", "Check this node before a run, or say what happened to a run and how to go on."),
        "report": ("jobs.report", "Write the HTML and markdown report of a run."),
    },
    "Evaluate and use": {
        "evalsets": ("jobs.evalsets", "Fetch the 38 evaluation sets and verify every digest and count."),
        "evaluate": ("jobs.evaluate", "Evaluate a checkpoint on a suite of tasks."),
        "watch": ("jobs.watch", "Evaluate a run's checkpoints as they are written, with any number of watchers."),
        "export": ("jobs.export", "Export a checkpoint to a folder for open_clip and model hubs, with a model card."),
        "playground": ("jobs.playground", "Try a model on a local page: find images, classify an image."),
    },
    "Research": {
        "normalizers": ("jobs.normalizers", "Compute exact log-normalizers and the error of a method's estimates."),
        "study": ("jobs.study", "Run a study (the papers' tables, small or in full) and render its results."),
    },
}
SYNONYMS = {"gpus": "ranks", "num_gpus": "ranks", "nproc": "ranks", "nproc_per_node": "ranks", "out": "output",
            "output_dir": "output", "caption_field": "caption", "caption_key": "caption"}  # fmt: skip
"""What other programs call options of ours."""
OTHER_VALUES = ("accum_freq", "precision")
"""Options of open_clip that are settings with other values here."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
ALLOCATOR_SETTINGS = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
"""torch's name of the variable, and its older one."""


class LazyGroup(click.Group):
    """A click group that lists its commands from a table and imports only the invoked one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[name][0]).command
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS:
            from pipeline.config import suggest

            raise click.UsageError(f"There is no command {args[0]!r}. {suggest(args[0], tuple(COMMANDS))}", ctx)
        resolved = super().resolve_command(ctx, args)
        if resolved[1] is not None:
            _refuse_options_as_settings(resolved[1], resolved[2])
        return resolved

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))  # so that the groups align
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{widest}}", help_line) for name, (_, help_line) in group.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the full traceback of an error.")
@click.version_option(package_name="neuclip")
def cli(debug: bool) -> None:
    """Pretrain CLIP models with few GPUs: from URLs to an evaluated model.

    `neuclip COMMAND --help` describes a command. Settings are `section.key=value`; see jobs/recipes/. Results go to
    --output FOLDER, or to output=FOLDER where a recipe has that setting: in download, train and demo.
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `neuclip` script."""
    run(cli, argv, prog_name="neuclip")


def run(command: click.Command, argv: Sequence[str] | None = None, *, prog_name: str) -> None:
    """Run a click command and exit: 0 done, 2 the user can fix it, 70 a bug of the program, 130 interrupted."""
    # OpenMP threads that spin while waiting take CPU cores from data-loading workers and other ranks.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    use_expandable_segments()
    # Imports create half a million objects: with Python's threshold of 700, collections are an eighth of a start.
    gc.set_threshold(20_000, 10, 10)
    logging.basicConfig(format="%(levelname)s: %(message)s")  # by default, lines begin with the module's name
    # Child processes (`python -m ...`) import our packages, and not a `pipeline.py` of the working folder.
    os.environ["PYTHONSAFEPATH"] = "1"
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if ROOT.name not in ("site-packages", "dist-packages") and str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *paths])
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    interrupts = _noted_interrupts()
    try:
        if not isinstance(command, click.Group):
            _refuse_options_as_settings(command, arguments)
        result = command.main(arguments, prog_name=prog_name, standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _fail("Interrupted.", EXIT_INTERRUPTED)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            hint = _hint(error, arguments)
            message = error.message if hint else error.format_message()  # with click's guesses, which look like it
            error = click.UsageError(f"{message}{hint}", error.ctx)
        elif isinstance(error, click.MissingParameter) and error.ctx:
            meaning = getattr(error.param, "help", None) or error.ctx.command.get_short_help_str(limit=300)
            error = click.UsageError(f"{error.format_message()} {meaning}", error.ctx)
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        if debug:
            traceback.print_exc()
        by_user = isinstance(error, UserError)
        if interrupts and not by_user:  # modules written in C turn one into an ImportError or a SystemError
            _fail("Interrupted.", EXIT_INTERRUPTED)
        explained = explain(error) or f"Unexpected {type(error).__name__}: {error}. This is probably a bug in neuclip."
        hint = "" if debug or by_user else f" Show where with: {prog_name} --debug ..."
        _fail(explained + hint, exit_code_of(error))
    _leave(result if isinstance(result, int) else 0)


def _hint(error: click.NoSuchOption, arguments: Sequence[str]) -> str:
    """How this command calls what `--optimizer.lr 1e-3`, `--lr 1e-3`, `--gpus 8` or `--output DIR` mean."""
    option, command = error.option_name, error.ctx.command if error.ctx else None
    words = [word for argument in arguments for word in argument.split("=", 1)]
    following = words[words.index(option) + 1 :] if option in words else []
    value = following[0] if following and not following[0].startswith("--") else "VALUE"
    key = option.lstrip("-").replace("-", "_")
    if left := DEPARTED.get(option) or (command and DEPARTED.get(f"{command.name} {option}")):
        return f" It was removed. {left}"
    if command is None:
        return ""
    if answer := _as_parameter(command, SYNONYMS.get(key, key), value):
        return f" {answer}"
    if not any("KEY=VALUE" in str(parameter.metavar).upper() for parameter in command.params):
        return ""
    from jobs.settings import settings_named

    if "." in key:
        named = [key]
    elif not (named := settings_named(key, command=str(command.name))):
        foreign = " docs/from-open-clip.md has open_clip's options." if command.name == "train" else ""
        return f" Settings are written without dashes, SECTION.KEY={value}: `neuclip settings {key}`.{foreign}"
    if key in OTHER_VALUES:
        return f" Here it is the setting {named[0]}, whose values are others: `neuclip settings {named[0]}`."
    return f" Settings are written without dashes: {f'={value} or '.join(named)}={value}"


def _as_parameter(command: click.Command, name: str, value: str) -> str:
    """How to give a command's option or argument of this name, if it has one."""
    for parameter in command.params:
        if parameter.name == name and isinstance(parameter, click.Argument):
            usage = " ".join(each.make_metavar(click.Context(command)) for each in command.params
                             if isinstance(each, click.Argument))  # fmt: skip
            return f"{name.upper()} is an argument: neuclip {command.name} {usage}"
        if f"--{name}" in parameter.opts:
            return f"{name} is an option and no setting: give --{name} {value}."
    return ""


def _refuse_options_as_settings(command: click.Command, arguments: Sequence[str]) -> None:
    """Refuse `output=DIR` where it is `--output DIR`; what follows an option may be its value."""
    for before, word in itertools.pairwise(["", *arguments]):
        name, is_setting, value = word.partition("=")
        if is_setting and not before.startswith("-") and (answer := _as_parameter(command, name, value)):
            raise UserError(answer)


def _noted_interrupts() -> list[int]:
    """A list to which every SIGINT is added before it raises KeyboardInterrupt."""
    noted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return noted


def use_expandable_segments(devices: Path = Path("/dev")) -> None:
    """Let torch's CUDA allocator grow its segments where there is an NVIDIA GPU, unless the user configures it.

    Texts have another width in every batch, so that segments of a fixed size become fragmented. torch reads the setting
    when it first allocates, and child processes inherit it.
    """
    if not ALLOCATOR_SETTINGS & os.environ.keys() and any(devices.glob("nvidia[0-9]*")):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _fail(message: str, code: int) -> NoReturn:
    print(textwrap.fill(f"Error: {message}", 110, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
    _leave(code)


def _leave(code: int) -> NoReturn:
    world = sys.modules.get("pipeline.distributed.world")  # not imported by commands that need no torch
    if world is not None:
        world.leave(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
