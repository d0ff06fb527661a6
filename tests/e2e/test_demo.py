"""The demo as a user runs it, at a very small size: end to end without mocks, twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launch import run
from tests.metrics import metrics
from tests.towers import write_tiny


@pytest.mark.slow
def test_the_demo_runs_from_urls_to_report_and_can_be_repeated(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    arguments = [
        *("demo", "--output", str(output), "--pairs", "1000", "--held-out", "60"),
        *(f"model.arch={write_tiny(tmp_path)}", "samples=640", "batch_size=32", "schedule.warmup_steps=5"),
        *("objective.prototypes=64", "checkpoint.every=10", "checkpoint.keep_every=10"),
    ]
    first = run("jobs.cli", *arguments, timeout=500)
    assert "of 1,000 URLs gave a sample" in first.stdout
    assert "All done" in first.stdout
    stages = re.findall(r"^✓ (\w.*?)  .*\[.* s\]$", first.stdout, re.MULTILINE)
    assert [stage.split()[0] for stage in stages] == ["Corpus", "Evaluation", "Training", "Evaluation"]
    assert not re.search(r"^(Checkpoint|Epoch) ", first.stdout, re.MULTILINE), "events are in metrics.jsonl"
    assert list((output / "tensorboard" / "evaluation").glob("events*")), "scores are written without a further command"

    manifest = json.loads((tmp_path / "demo-data" / "shards" / "manifest.json").read_text())
    assert manifest["attempted"] == 1000
    assert manifest["samples"] == 1000 - sum(manifest["failures"].values())
    assert {"http 404", "hash mismatch", "truncated", "not an image"} <= set(manifest["failures"])

    steps = [record["step"] for record in metrics(output, "train")]
    assert steps[-1] == 20
    results = {path.parent.name: path for path in (output / "evaluation").glob("*/scenes*")}
    assert {"step-00000010", "step-00000020"} <= {path.name for path in (output / "evaluation").iterdir()}
    assert results
    page = (output / "report.html").read_text()
    assert "<img" in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://127.0.0.1", ""), "not self-contained"
    assert "colour" in (output / "report.md").read_text()
    assert set(json.loads((output / "stages.json").read_text())) >= {"corpus and ingestion", "training", "evaluation"}

    again = run("jobs.cli", *arguments, timeout=200)
    assert re.search(r"✓ Corpus and ingestion .* done already", again.stdout)
    assert re.search(r"✓ Training .* done already", again.stdout)
    assert "All done" in again.stdout
