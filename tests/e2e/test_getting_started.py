"""The commands of docs/getting-started.md, run unchanged and in order, at a tiny size; the wheel runs the demo."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.documents import BLOCK, ROOT, blocks, lines
from tests.launch import Program, environment, run, wait_for
from tests.metrics import metrics
from tests.towers import write_tiny

PAGE = ROOT / "docs" / "getting-started.md"
SHRINK = 40
"""The page's budgets are divided by this."""
# The files of a first run that the page lists, except the budget. Commands after the demo use its output.
SMALLER_DEMO = ["--pairs", "1000", "--held-out", "50", "objective.prototypes=64"]
SMALLER_RUN = ["batch_size=32", "schedule.warmup_steps=5", "checkpoint.every=10", "checkpoint.keep_every=10"]
PACKAGES = ("pipeline", "data_prep", "jobs", "ds_configs")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the sources without network, and installed in `installed` beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "neuclip.py"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel = next(folder.glob("neuclip-*.whl"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(folder / "installed"), str(wheel)], check=True, timeout=300)
    return wheel


def test_the_wheel_has_every_file_that_is_not_python(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        path.relative_to(ROOT).as_posix()
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"
    }
    assert {"neuclip.py", "jobs/recipes/own.yaml", "ds_configs/zero1_bf16.json", "pipeline/report/run.html"} <= held
    assert not expected - held


def here(word, tmp):
    """Return a word of a command with its output folders moved below `tmp`."""
    if word == "source.table=urls.parquet":
        return f"source.table={tmp}/runs/scenes/urls.parquet"
    word = re.sub(r"samples=(\d+)", lambda found: f"samples={int(found[1]) // SHRINK}", word)
    return re.sub(r"^((?:[a-z.]+=)?)(runs|hub|data/mine)(?=/|$)", rf"\1{tmp}/\2", word)


def command(line, tmp, tiny):
    """Return what to run for a line of the page: the module, its arguments and the number of ranks."""
    program, *arguments = (here(word, tmp) for word in line.words)
    module, ranks = "jobs.cli", 0
    if program == "torchrun":
        option, count, flag, module, *arguments = arguments
        assert (option, flag) == ("--nproc-per-node", "-m")
        ranks = int(count)
    elif program == "python":
        flag, module, *arguments = arguments
        assert flag == "-m"
    else:
        assert program == "neuclip", f"the test does not know how to run {program}"
    if arguments[0] == "demo":
        arguments += SMALLER_DEMO
    if arguments[0] in ("demo", "train") or ranks:
        arguments += [f"model.arch={tiny}", *SMALLER_RUN]
    if f"output={tmp}/data/mine" in arguments:
        arguments += ["guard.allow_addresses=[127.0.0.1]"]
    return module, arguments, ranks


@pytest.mark.slow
def test_every_command_does_what_the_page_says(tmp_path, wheel):
    tiny, installed = write_tiny(tmp_path), wheel.parent / "installed"
    outputs: dict[str, str] = {}
    with ExitStack() as servers:
        for line in lines([PAGE]):
            text = " ".join(line.words)
            if line.words[0] in ("make", "source"):  # this test already runs in that environment
                continue
            module, arguments, ranks = command(line, tmp_path, tiny)
            if module == "data_prep.scenes":  # runs in the second terminal of the page
                server = servers.enter_context(Program(module, *arguments))
                table = Path(arguments[arguments.index("--table") + 1])
                wait_for(table.exists, "the table", process=server, seconds=120)
                continue
            if arguments[0] == "demo":
                call = [sys.executable, str(installed / "bin" / "neuclip"), *arguments]
                where = {**environment(), "PYTHONPATH": str(installed)}  # instead of the repository
                done = subprocess.run(call, cwd=tmp_path, env=where, text=True, capture_output=True, timeout=600)
                outputs["again"] = run(module, *arguments).stdout
            else:
                done = run(module, *arguments, ranks=ranks, timeout=500, check=False)
            # Whether this machine is suitable for large runs is not tested here.
            allowed = (0, 1) if line.words[1] == "doctor" else (0,)
            assert done.returncode in allowed, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            outputs[text] = done.stdout + done.stderr
    listed = [row.split()[0] for language, body in BLOCK.findall(PAGE.read_text()) if not language
              for row in body.splitlines()]  # fmt: skip
    assert len(listed) > 5
    for path in (*listed, "data/mine/manifest.json"):
        assert (tmp_path / path).exists(), path
    assert any((tmp_path / "runs/comparison").iterdir())
    for beginning, words in (
        ("neuclip demo", "All done"),
        ("neuclip verify runs/first-data", "everything matches"),
        ("neuclip train --recipe jobs/recipes/demo.yaml --dry-run", "name: openclip"),
        ("torchrun", "Resumed from step-00000020"),
        ("torchrun", "Settings that differ from the checkpoint's"),
        ("torchrun", "samples 640 -> 800"),
        ("neuclip evaluate", "scenes/retrieval"),
        ("neuclip watch", "tasks done"),
        ("neuclip download --recipe jobs/recipes/download/scenes.yaml", "URLs gave a sample"),
    ):
        printed = " ".join(text for command, text in outputs.items() if command.startswith(beginning))
        assert words in " ".join(printed.split()), beginning
    check_demo(outputs, tmp_path / "runs" / "first")
    for run_, samples in (("first", 25_600), ("openclip", 32_000)):
        assert metrics(tmp_path / "runs" / run_, "train")[-1]["step"] == samples // SHRINK // 32
    for snippet in blocks("python", PAGE):
        scope: dict[str, object] = {}
        exec(snippet.replace("hub/", f"{tmp_path}/hub/"), scope)
        assert scope["features"].shape[0] == 1


def check_demo(outputs, run):
    """From URLs to the report, without mocks, and repeated."""
    (printed,) = (text for words, text in outputs.items() if words.startswith("neuclip demo"))
    assert "of 1,000 URLs gave a sample" in printed
    stages = re.findall(r"^✓ (\w.*?)  .*\[.* s\]$", printed, re.MULTILINE)
    assert [stage.split()[0] for stage in stages] == ["Corpus", "Evaluation", "Training", "Evaluation"]
    assert list((run / "tensorboard" / "evaluation").glob("events*")), "scores are written without a further command"
    manifest = json.loads((run.parent / "first-data" / "shards" / "manifest.json").read_text())
    assert manifest["attempted"] == 1000
    assert manifest["samples"] == 1000 - sum(manifest["failures"].values())
    assert {"http 404", "hash mismatch", "truncated", "not an image"} <= set(manifest["failures"])
    assert list((run / "evaluation" / "step-00000010").glob("scenes*"))
    page = (run / "report.html").read_text()
    assert "<img" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", ""), "not self-contained"
    assert "colour" in (run / "report.md").read_text()
    for stage in ("Corpus and ingestion", "Training"):
        assert re.search(rf"✓ {stage} .* done already", outputs["again"])
    assert "All done" in outputs["again"]
