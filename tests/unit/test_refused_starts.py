"""Starting a run: advice that works, suggested names, output folders, permissions and shell completion."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from click.shell_completion import ShellComplete

from jobs.cli import cli
from jobs.cli import run as run_command
from jobs.completion import complete_settings, run_settings
from pipeline.config import parse
from pipeline.distributed.world import World, start_world
from pipeline.errors import UserError
from pipeline.model.model_folder import save_tensors
from pipeline.training import run as run_module
from pipeline.training.recipe import RunConfig, check_run, load_recipe
from pipeline.training.run_folder import folder_of_a_start, hold_folder

COMMON = ["samples=100000", "data.sources=data/x"]


@pytest.mark.parametrize(("ranks", "more"), [(3, []), (7, []), (6, ["engine.micro_batch=10", "batch_size=300"])])
def test_the_advice_for_a_number_of_ranks_is_accepted(ranks: int, more: list[str]) -> None:
    given = ["output=x", "batch_size=1024", "schedule.warmup_steps=1", *COMMON]
    run = load_recipe(None, [*given, *(word for word in more if word.startswith("batch"))])
    with pytest.raises(UserError, match=f"do not fit {ranks} ranks") as caught:
        check_run(load_recipe(None, [*given, "data.streams=64"]), world_size=ranks)
    advice = re.findall(r"(?:batch_size|data\.streams)=\d+", str(caught.value))
    check_run(load_recipe(None, [*given, *advice]), world_size=ranks)
    batch, streams = (int(word.partition("=")[2]) for word in advice)
    assert batch % streams == 0
    assert streams % ranks == 0
    assert run.batch_size


@pytest.mark.parametrize(
    ("key", "meant"),
    [("learning_rate", "optimizer.lr"), ("weight_decay", "optimizer.weight_decay"), ("num_workers", "data.workers"),
     ("modle", "model"), ("architecture", "model.arch")],
)  # fmt: skip
def test_the_suggested_setting_is_the_intended_one(key: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"Unknown key {key} .* The nearest valid key is {re.escape(meant)}\."):
        parse(RunConfig, {key: 1})


def config(output: Path) -> RunConfig:
    return load_recipe(None, [f"output={output}", "batch_size=64", "schedule.warmup_steps=1", *COMMON])


def test_an_invalid_output_folder_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        with (
            pytest.raises(UserError, match=r"output = .*file.* cannot be the run's folder"),
            hold_folder(config(output), world=World()),
        ):
            pass


def test_a_refused_start_leaves_nothing_behind(tmp_path: Path) -> None:
    run = config(tmp_path / "run")
    with pytest.raises(UserError, match="no"), hold_folder(run, world=World()), folder_of_a_start(run, world=World()):
        raise UserError("no")
    assert not (tmp_path / "run").exists()
    with hold_folder(run, world=World()), folder_of_a_start(run, world=World()):
        pass
    assert (tmp_path / "run" / "config.yaml").exists()


def test_an_occupied_port_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{port}, which is used by another program"), start_world():
            pass


def test_weights_get_the_permissions_of_the_umask(tmp_path: Path) -> None:
    from pipeline.model import model_folder

    save_tensors({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert stat.S_IMODE(os.stat(tmp_path / "a.safetensors").st_mode) == 0o666 & ~model_folder._UMASK


def test_settings_and_recipes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert {"optimizer.lr", "objective.tau_init", "epochs", "data.streams"} <= set(run_settings())
    assert "optimizer" not in run_settings()
    cached = json.loads((tmp_path / "neuclip" / "settings.json").read_text())
    assert cached["settings"] == run_settings()
    completer = ShellComplete(cli, {}, "neuclip", "_NEUCLIP_COMPLETE")
    found = [item.value for item in completer.get_completions(["train"], "optimizer.l")]
    assert found == ["optimizer.layer_decay=", "optimizer.lr="]
    assert "cc3m" in [item.value for item in completer.get_completions(["train", "--recipe"], "cc")]
    assert complete_settings(None, None, "optimizer.lr=") == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), 76, "another rank: it is gone"),
        (RuntimeError("an assertion"), 70, "probably a bug"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/config.yaml"), 2, "Free some space"),
    ],
)
def test_what_others_caused_is_no_bug(
    error: Exception, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run_module, "stage_trainers", fail)
    with pytest.raises(SystemExit) as ended:
        run_command(
            cli, ["train", "output=x", "batch_size=64", "schedule.warmup_steps=1", *COMMON], prog_name="neuclip"
        )
    assert ended.value.code == code
    assert message in " ".join(capsys.readouterr().err.split())
