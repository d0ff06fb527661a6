"""The command line: fast help, errors in one paragraph, and exit codes."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from jobs import cli
from jobs.recipe_path import TRAINING, RecipePath
from jobs.train import command as train
from pipeline.errors import UserError


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


def test_help_lists_every_command_without_heavy_imports() -> None:
    script = "import sys; sys.argv=['x', '--help']\nimport jobs.cli\ntry: jobs.cli.main()\nexcept SystemExit: pass\n"
    script += "heavy = {'torch', 'deepspeed', 'open_clip', 'img2dataset'} & set(sys.modules); assert not heavy, heavy"
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(name, "--help") == 0
    assert "Usage: neuclip" in capsys.readouterr().out


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("trian") == 2
    assert "The nearest is train" in capsys.readouterr().err


def test_user_error_is_one_paragraph_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("train", "optimizer.lrr=3") == 2
    printed = capsys.readouterr().err
    assert "optimizer.lrr" in printed
    assert "The nearest valid key is optimizer.lr" in printed
    assert "Traceback" not in printed
    assert exit_code("--debug", "train", "optimizer.lrr=3") == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("do this"), 2, "Error: do this"),
        (RuntimeError("oops"), 70, "probably a bug in neuclip"),
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "Lower engine.micro_batch"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 2, "Cannot write or read /x/y: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x/y"), 2, "cannot be created. Show where with: neuclip"),
        (PermissionError(errno.EACCES, "a port below 1024, without a file name"), 70, "probably a bug in neuclip"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "Free some space"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(importlib.import_module("jobs.train").command, "callback", fail)
    assert exit_code("train") == code
    assert text in " ".join(capsys.readouterr().err.split())


def test_recipe_is_a_path_or_the_name_of_a_bundled_recipe(tmp_path: Path) -> None:
    recipe = RecipePath(TRAINING)
    assert recipe.convert("cc12m", None, None) == str(TRAINING / "cc12m.yaml")
    (tmp_path / "mine.yaml").write_text("")
    assert recipe.convert(str(tmp_path / "mine.yaml"), None, None) == str(tmp_path / "mine.yaml")
    allowed = "Allowed: cc12m, cc12m-fast, cc3m"
    with pytest.raises(UserError, match=f"There is no recipe cc12.yaml. The nearest is cc12m. {allowed}"):
        recipe.convert("cc12.yaml", None, None)


def test_dry_run_finds_errors_that_would_end_the_run(tmp_path: Path) -> None:
    for wrong, words in (
        ("model.arch=ViT-B32", "'ViT-B32' is not known. The nearest is ViT-B-32"),
        ("optimizer.name=lamb", "does not work with ZeRO stage 2"),
    ):
        result = CliRunner().invoke(train, ["--recipe", "cc12m", "--dry-run", wrong])
        assert isinstance(result.exception, UserError)
        assert words in str(result.exception)
        assert len(str(result.exception)) < 600
