"""The command line: fast help, errors in one paragraph, and exit codes."""

import errno
import importlib
import json
import os
import shlex

import pytest
import torch

from jobs import cli
from pipeline.errors import UserError
from tests.launch import python


def exit_code(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return int(caught.value.code or 0)


WITHOUT_TENSORS = [
    (["--help"], " ".join(cli.COMMANDS)),
    (["trian"], "The nearest is train"),
    (["train"], "There is no --recipe cc3m finetune"),
    (["train", "--help"], "--resume"),
    (["train", "--recipe", "nothing"], "There is no recipe nothing"),
    (["train", "--optimizer.lr", "1e-3"], "Settings are written without dashes: optimizer.lr=1e-3"),
    (["export", "runs/mnie", "--output=out"], "'runs/mnie' is neither a folder nor ARCH:PRETRAINED"),
    (["playground", "jobs"], "'jobs' is neither a folder with open_clip_config.json"),
    (["evaluate", "jobs", "--suite=x"], "'jobs' is neither a folder with open_clip_config.json"),
    (["evaluate", "jobs"], "Missing option '--suite'. A folder or YAML file of tasks"),
    (["export", "jobs"], "Missing option '--output'. New folder of the exported model."),
    (["export", "jobs", "--output=pipeline"], "pipeline is not empty: choose another output"),
    (["playground", "jbos"], "'jbos' is neither a folder nor ARCH:PRETRAINED The nearest name there is jobs."),
    (["evaluate", "jbos", "--suite=x"], "The nearest name there is jobs."),
    (["study", "metods"], "The nearest is methods."),
    (["study", "separation"], "docs/studies/separation has its results, commit c14979c its program."),
    (["download", "--recipe", "icons"], "The corpus of icons has left; commit c14979c has the program that makes it."),
]
MAIN = """
import contextlib, io, json, sys
import jobs.cli
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        with contextlib.suppress(SystemExit):
            jobs.cli.main(arguments)
    print(json.dumps([printed.getvalue(), sorted({"torch", "numpy", "deepspeed", "open_clip"} & set(sys.modules))]))
"""


def test_no_tensors_are_imported_where_none_are_needed():
    done = python("-c", MAIN, json.dumps([arguments for arguments, _ in WITHOUT_TENSORS]))
    assert done.returncode == 0, done.stderr
    for (arguments, words), line in zip(WITHOUT_TENSORS, done.stdout.splitlines(), strict=True):
        printed, heavy = json.loads(line)
        assert heavy == [], arguments
        assert [word for word in words.split() if word not in " ".join(printed.split())] == [], arguments


ANSWERED = [
    ("train --batch-size 64", "written without dashes: batch_size=64"),
    ("train --lr=1e-4", "written without dashes: optimizer.lr=1e-4"),
    ("train --workers 4", "written without dashes: data.workers=4 or evaluation.workers=4"),
    ("train --model ViT-B-32", "written without dashes: model.arch=ViT-B-32"),
    ("train --report-to wandb", "written without dashes: telemetry.trackers=wandb"),
    ("train --precision amp_bf16", "the setting engine.deepspeed, whose values are others: `neuclip settings engine."),
    ("train --accum-freq 4", "the setting engine.micro_batch, whose values are others"),
    ("train --local-loss", "docs/from-open-clip.md has open_clip's options."),
    ("train --recipe own --resume", "Option '--resume' requires an argument."),
    ("train --data data/mine", "data.sources=data/mine"),
    ("train --frobnicate 4", "SECTION.KEY=4: `neuclip settings frobnicate`"),
    ("train --output runs/x", "written without dashes: output=runs/x"),
    ("train --gpus 8", "give --ranks 8"),
    ("train recipe=own batch_size=64", "give --recipe own"),
    ("train --recipe own resume=latest", "give --resume latest"),
    ("train --recipe own objective.name=clip", "The nearest is openclip"),
    ("plan --recipe own ranks=8", "give --ranks 8"),
    ("plan --sample-bytes=30000", "`neuclip plan --measure` measures what the loader delivers."),
    ("doctor --quick", "No such option '--quick'. It was removed. The hashes of checkpoints are always compared."),
    ("evaluate M --suite s --batch-size 3", "written without dashes: batch_size=3"),
    ("evaluate M --suite s output=x", "give --output x"),
    ("watch R --suite s --interval 3", "written without dashes: interval=3"),
    ("download --url-list urls.txt", "written without dashes: source.table=urls.txt"),
    ("download --table urls.csv", "written without dashes: source.table=urls.csv"),
    ("score jobs --data jobs --output x --list-worst 20% w.txt", "'20%' is not a valid number"),
    ("score jobs --data jobs --output x --list-worst nan w.txt", "'nan' is not a finite number"),
    ("plan --mfu nan", "'nan' is not a finite number"),
    ("plan --measure --seconds inf", "'inf' is not a finite number"),
    ("score jobs --data jobs output=x", "give --output x"),
    ("pairs pictures x", "Missing option '--output'. Folder of the shards."),
    ("pairs pictures output=x", "give --output x"),
    ("pairs pictures --caption-field title", "give --caption title"),
    ("playground M --captions texts.txt", "Captions are not searched"),
    ("demo --output runs/x", "written without dashes: output=runs/x"),
    ("features data/mine --model M --output x", "MODEL is an argument: neuclip features MODEL"),
    ("manifest --folder x", "FOLDER is an argument: neuclip manifest FOLDER"),
    ("report R --frobnicate 4", "No such option '--frobnicate'."),
    ("train --recipe cc3m optimizer.lrr=3", "optimizer.lrr (given 3). The nearest valid key is optimizer.lr."),
    ("report A B --mixed", "Runs that were evaluated differently are not compared"),
    ("train --recipe cc12.yaml", "no recipe cc12.yaml. The nearest is cc12m. Allowed: cc12m, cc12m-fast, "),
    ("train --recipe cc12m --dry-run model.arch=ViT-B32", "'ViT-B32' is not known. The nearest is ViT-B-32"),
    ("train --recipe cc12m --dry-run engine.deepspeed=zero2_bf16 optimizer.name=lamb", "not work with ZeRO stage 2"),
]


def test_what_people_write_is_answered_by_what_is_meant(capsys):
    for line, answer in ANSWERED:
        assert exit_code(*shlex.split(line)) == 2, line
        printed = " ".join(capsys.readouterr().err.split())
        assert answer in printed, line
        assert len(printed) < 900, line


def test_help_lists_every_command_in_its_group_and_each_has_help(capsys):
    assert exit_code("--help") == 0
    printed = capsys.readouterr().out
    assert [title for title in cli.GROUPS if f"\n{title}:\n" in printed] == list(cli.GROUPS)
    for name in cli.COMMANDS:
        assert exit_code(name, "--help") == 0
        assert f"Usage: neuclip {name}" in capsys.readouterr().out


def test_a_traceback_is_printed_if_asked_for(capsys):
    for debug in ([], ["--debug"]):
        assert exit_code(*debug, "train", "--recipe", "cc3m", "optimizer.lrr=3") == 2
        assert ("Traceback" in capsys.readouterr().err) == bool(debug)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UserError("do this"), 2, "Error: do this"),
        (RuntimeError("oops"), 70, "probably a bug in neuclip"),
        (torch.OutOfMemoryError("CUDA out of memory."), 2, "Lower engine.micro_batch"),
        (torch.AcceleratorError("CUDA error: out of memory", 2), 2, "Lower engine.micro_batch"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ..."), 2, "Lower engine.micro_batch"),
        (KeyboardInterrupt(), 130, "Interrupted"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 2, "Cannot write or read /x/y: Permission denied"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/x/y"), 2, "cannot be created. Show where with: neuclip"),
        (PermissionError(errno.EACCES, "a port below 1024, without a file name"), 70, "probably a bug in neuclip"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "Free some space"),
        (OSError(errno.EFBIG, "File too large"), 2, "Cannot write or read a file: File too large. `ulimit -f`"),
        (OSError(errno.ENOSPC, "No space", "/from", None, "/to"), 2, "Cannot write or read /to: No space"),
        (OSError(errno.EACCES, "Denied", "/from", None, "/to"), 2, "Cannot write or read /from: Denied"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 2, "a file: No space left on device. Free"),
        (MemoryError(), 2, "This process got no more memory: use a machine with more"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "n" * 256), 2, "Use a shorter name"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), 2, "got no more memory (libtorch"),
    ],
)
def test_exit_codes(error, code, text, monkeypatch, capsys):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(importlib.import_module("jobs.train").command, "callback", fail)
    assert exit_code("train") == code
    assert text in " ".join(capsys.readouterr().err.split())


def test_an_interrupt_during_imports_is_no_bug():
    """Regression test: a module written in C turns the KeyboardInterrupt into an error of its own."""
    program = """
import os, signal, time
from jobs import cli
from jobs.settings import command

def import_a_module(*_, **__):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        raise ImportError("numpy.core.multiarray failed to import") from None

command.callback = import_a_module
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
cli.main(["settings"])
"""
    done = python("-c", program)
    assert done.returncode == 130, done.stderr
    assert "Interrupted." in done.stderr


def test_the_allocator_grows_its_segments_where_there_is_a_gpu_and_the_user_says_nothing(tmp_path, monkeypatch):
    (tmp_path / "nvidiactl").touch()
    for device in (False, True):
        if device:
            (tmp_path / "nvidia0").touch()
        for name in (None, *cli.ALLOCATOR_SETTINGS):
            given = {name: "max_split_size_mb:64"} if name else {}
            monkeypatch.setattr(os, "environ", dict(given))
            cli.use_expandable_segments(tmp_path)
            assert os.environ == (given or ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if device else {}))
