"""CONTRIBUTING: a package outside of the repository adds parts of every kind, which the public commands use."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.launch import python
from tests.metrics import metrics
from tests.own_tasks import write_class_folders
from tests.plugins import write_package
from tests.shards import write_shards
from tests.towers import write_tiny
from tests.training import SMALL
from tests.unit.test_objectives_registry import LOSS_OUTSIDE
from tests.unit.test_own_order import EXAMPLE as ORDER_PAGE

ROOT = Path(__file__).parents[2]
PROTOCOL_PAGE = (ROOT / "docs/evaluation.md").read_text().partition("### A protocol of your own")[2]
TOYS = """
from data_prep.download_config import SOURCES
from pipeline.metrics.sinks import Sink, register_sink
from pipeline.report.charts import Line, chart, register_chart

SOURCES["toy"] = {"url": "address", "caption": "words"}

@register_sink("toy")
class Toy(Sink):
    def __init__(self, context):
        self.file = context.run / "toy.txt"

    def scalars(self, kind, *, step, values):
        self.file.write_text(f"{kind} {step} {values['loss']}")

@register_chart
def doubled(run):
    samples, loss = run.curve("loss")
    return chart("Twice the loss", [Line(samples, 2 * loss)])

@register_chart
def broken(run):
    return run.no_such_curve
"""
PARTS = {
    "objectives": LOSS_OUTSIDE,
    "engines": "import tests.unit.test_own_engine",
    "orders": ORDER_PAGE.partition("```python\n")[2].partition("```")[0],
    "protocols": PROTOCOL_PAGE.partition("```python\n")[2].partition("```")[0],
    **dict.fromkeys(("trackers", "charts", "sources"), "from mine_toys import *"),
}
PROGRAM = """
import sys, json
from jobs.cli import cli
if __name__ == "__main__":
    for command in json.loads(sys.argv[1]):
        print("$", *command, flush=True)
        code = cli.main(command, standalone_mode=False)
        assert not code, (command, code)
"""


@pytest.mark.slow
def test_the_commands_use_what_a_package_adds(tmp_path):
    site, run, table = tmp_path / "site", tmp_path / "run", tmp_path / "urls.parquet"
    modules = {f"mine_{group}": text for group, text in PARTS.items()}
    groups = "".join(f"[neuclip.{group}]\nmine = mine_{group}\n" for group in PARTS)
    write_package(site, groups, mine_toys=TOYS, **modules)
    (tmp_path / "program.py").write_text(PROGRAM)
    write_shards(tmp_path / "shards", [20, 20])
    write_class_folders(tmp_path / "suite")
    (tmp_path / "suite/tasks.yaml").write_text("toys: {folder: photos, protocol: median_rank}\n")
    pq.write_table(pa.table({"address": ["http://a.example/1.jpg"], "words": ["a cat"]}), table)
    recipe = [
        "--recipe", "own", *SMALL, "objective.name=margin", "objective.margin=0.2", "engine.name=plain",
        "data.order=as_stored", "telemetry.trackers=[jsonl, toy]", f"data.sources={tmp_path / 'shards'}",
        f"output={run}", f"model.arch={write_tiny(tmp_path)}", "samples=32",
    ]  # fmt: skip
    source = [f"output={tmp_path / 'data'}", f"source.table={table}", "source.name=toy", "guard.contact=x@example.org"]
    commands = [
        ["settings", "objective.margin"],
        ["download", *source, "--plan-only"],
        ["plan", *recipe],
        ["train", *recipe],
        ["evaluate", str(run), "--suite", str(tmp_path / "suite"), "--output", str(tmp_path / "scores")],
        ["report", str(run)],
    ]
    path = os.pathsep.join([str(ROOT), str(site)])
    done = python(str(tmp_path / "program.py"), json.dumps(commands), timeout=600, PYTHONPATH=path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Objectives: margin" in done.stdout
    assert "1 of 1 rows in 1 shard;" in done.stdout
    assert "margin on tiny-towers" in done.stdout
    losses = [record["loss"] for record in metrics(run, "train")]
    assert len(losses) == 4
    assert (run / "toy.txt").read_text().startswith("train 4 ")
    assert json.loads((tmp_path / "scores/toys.json").read_text())["main_metric"] == "median_rank"
    assert "Twice the loss" in (run / "report.html").read_text()
    assert ".broken is left out: AttributeError(" in done.stderr
