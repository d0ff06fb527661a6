"""The commands of docs/getting-started.md, run unchanged and in order, at a tiny size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import BLOCK, ROOT, Line, blocks, lines
from tests.launch import environment, run, wait_for
from tests.metrics import metrics
from tests.towers import write_tiny

PAGE = ROOT / "docs" / "getting-started.md"
SHRINK = 40
"""The page's budgets are divided by this."""
# The files of a first run that the page lists, except the budget. Commands after the demo use its output.
SMALLER_DEMO = ["--pairs", "1000", "--held-out", "50", "objective.prototypes=64"]
SMALLER_RUN = ["batch_size=32", "schedule.warmup_steps=5", "checkpoint.every=10", "checkpoint.keep_every=10"]


def here(word: str, tmp: Path) -> str:
    """Return a word of a command with its output folders moved below `tmp`."""
    if word == "source.table=urls.parquet":
        return f"source.table={tmp}/runs/scenes/urls.parquet"
    word = re.sub(r"samples=(\d+)", lambda found: f"samples={int(found[1]) // SHRINK}", word)
    return re.sub(r"^((?:[a-z.]+=)?)(runs|hub|data/mine)(?=/|$)", rf"\1{tmp}/\2", word)


def command(line: Line, tmp: Path, tiny: str) -> list[str]:
    """Return the command to run for a line of the page."""
    words = [here(word, tmp) for word in line.words]
    program, arguments = words[0], words[1:]
    if program == "neuclip":
        start = [sys.executable, "-m", "jobs.cli"]
    elif program == "python":
        start = [sys.executable]
    else:
        assert program == "torchrun", f"the test does not know how to run {program}"
        start = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
        start += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    if arguments[0] == "demo":
        arguments += SMALLER_DEMO
    if arguments[0] in ("demo", "train") or program == "torchrun":
        arguments += [f"model.arch={tiny}", *SMALLER_RUN]
    if f"output={tmp}/data/mine" in arguments:
        arguments += ["guard.allow_addresses=[127.0.0.1]"]
    return [*start, *arguments]


def steps(run: Path) -> list[int]:
    return [record["step"] for record in metrics(run, "train")]


@pytest.mark.slow
def test_every_command_does_what_the_page_says(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path)
    outputs: dict[str, str] = {}
    server: subprocess.Popen[str] | None = None
    try:
        for line in lines([PAGE]):
            text = " ".join(line.words)
            if line.words[0] in ("make", "source"):  # this test already runs in that environment
                continue
            call = command(line, tmp_path, tiny)
            if "data_prep.scenes" in call:  # runs in the second terminal of the page
                server = subprocess.Popen(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True)  # fmt: skip
                wait_for(Path(call[call.index("--table") + 1]).exists, "the table", process=server, seconds=120)
                continue
            _, _, module, *arguments = call
            done = run(module, *arguments, timeout=500, check=False)
            # Whether this machine is suitable for large runs is not tested here.
            allowed = (0, 1) if line.words[1] == "doctor" else (0,)
            assert done.returncode in allowed, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            outputs[text] = done.stdout + done.stderr
    finally:
        if server is not None:
            server.terminate()
            server.communicate(timeout=30)
    check_files(tmp_path)
    check_outputs(outputs)
    assert steps(tmp_path / "runs" / "first")[-1] == 25_600 // SHRINK // 32
    assert steps(tmp_path / "runs" / "openclip")[-1] == 32_000 // SHRINK // 32
    for snippet in blocks("python", PAGE):
        scope: dict[str, object] = {}
        exec(snippet.replace("hub/", f"{tmp_path}/hub/"), scope)
        assert scope["features"].shape[0] == 1  # type: ignore[attr-defined]


def check_files(tmp: Path) -> None:
    """Check the files that the page lists."""
    listed = [row.split()[0] for language, body in BLOCK.findall(PAGE.read_text()) if not language
              for row in body.splitlines()]  # fmt: skip
    assert len(listed) > 5
    for path in listed:
        assert (tmp / path).exists(), path
    assert (tmp / "data" / "mine" / "manifest.json").exists()
    assert (tmp / "runs" / "comparison" / "comparison.html").exists() or list((tmp / "runs" / "comparison").iterdir())


def check_outputs(outputs: dict[str, str]) -> None:
    def output_of(beginning: str) -> str:
        return "\n".join(text for words, text in outputs.items() if words.startswith(beginning))

    assert "All done" in output_of("neuclip demo")
    assert "everything matches" in output_of("neuclip verify runs/first-data")
    assert "name: openclip" in output_of("neuclip train --recipe jobs/recipes/demo.yaml --dry-run")
    resumed = " ".join(output_of("torchrun").split())
    assert "Resumed from step-00000020" in resumed
    assert "Settings that differ from the checkpoint's" in resumed
    assert "samples 640 -> 800" in resumed
    assert "scenes/retrieval" in output_of("neuclip evaluate")
    assert "tasks done" in output_of("neuclip watch")
    assert "URLs gave a sample" in output_of("neuclip download --recipe jobs/recipes/download/scenes.yaml")
