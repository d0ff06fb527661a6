"""The README tells the truth: its commands exist, its recipes parse, its files are there, its snippet runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from jobs.cli import COMMANDS, cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for page in PAGES for lang, body in BLOCK.findall(page.read_text()) if lang == language]


def commands() -> list[list[str]]:
    """Every command line of the pages' bash blocks, without comments."""
    lines = [line for body in blocks("bash") for line in body.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def job_calls() -> list[tuple[str, list[str]]]:
    """(subcommand, arguments) of `neuclip X ...` and `... -m jobs.X ...`."""
    calls = []
    for words in commands():
        module = next((word for word in words if word.startswith("jobs.") and not word.startswith("jobs.bench")), None)
        if words[0] == "neuclip" and len(words) > 1 and not words[1].startswith("-"):
            calls.append((words[1], words[2:]))
        elif module:
            calls.append((module.removeprefix("jobs."), words[words.index(module) + 1 :]))
    return calls


def test_the_pages_hold_commands() -> None:
    assert len(job_calls()) >= 5
    assert {"make demo", "make test"} <= {" ".join(words) for words in commands()}


@pytest.mark.parametrize(("name", "arguments"), job_calls(), ids=lambda value: " ".join(value)[:60])
def test_every_command_parses(name: str, arguments: list[str]) -> None:
    assert name in COMMANDS
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    if "--help" not in arguments:
        command.make_context(name, [word for word in arguments if word != "..."], resilient_parsing=False)
    if "--recipe" in arguments:
        recipe = arguments[arguments.index("--recipe") + 1]
        assert recipe == "..." or (ROOT / recipe).is_file(), recipe


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for words in commands():
        if words[0] == "make":
            for target in (word for word in words[1:] if "=" not in word):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_and_folders_are_there() -> None:
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for folder in re.findall(r"^\| `([\w/]+)/` \|", text, re.MULTILINE):
            assert (ROOT / folder).is_dir(), f"{page.name}: {folder}"


def test_the_library_snippet_runs() -> None:
    """The README's training loop with any objective, on towers that are two linear maps."""
    import torch

    snippet = next(body for body in blocks("python") if "build_objective" in body)
    torch.manual_seed(0)
    towers = torch.nn.ModuleDict({"image": torch.nn.Linear(8, 512), "text": torch.nn.Linear(8, 512)})
    pairs = torch.randn(512, 8)
    halves = [torch.arange(512)[i::2] for i in range(2)]
    batches = [(pairs[ids], pairs[ids] + 0.1 * torch.randn(256, 8), ids) for ids in halves] * 3
    scope = {
        "encode_image": lambda x: torch.nn.functional.normalize(towers["image"](x), dim=-1),
        "encode_text": lambda x: torch.nn.functional.normalize(towers["text"](x), dim=-1),
        "loader": batches,
        "optimizer": torch.optim.AdamW(towers.parameters(), lr=3e-3),
        "losses": [],
    }
    exec(snippet.replace("loss.backward()", "loss.backward(); losses.append(loss.item())"), scope)
    assert len(scope["losses"]) == 6
    assert sum(scope["losses"][-2:]) < sum(scope["losses"][:2])
