"""CONTRIBUTING: a tracker, a source of URLs and a chart of one's own are a file in a package with an entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from data_prep.download_config import SOURCES
from jobs import download, report
from pipeline.errors import UserError
from pipeline.metrics.logger import Telemetry, TelemetryConfig
from pipeline.metrics.sinks import SINKS
from pipeline.report.charts import CHARTS
from tests.plugins import install
from tests.report_runs import make_run

PACKAGE = """
from data_prep.download_config import SOURCES, Known
from pipeline.metrics.sinks import Sink, register_sink
from pipeline.report.charts import Line, chart, register_chart

SOURCES["toy"] = Known("A toy.", {"url": "address", "caption": "words"})

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
def nothing(run):
    return None

@register_chart
def broken(run):
    return run.no_such_curve
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package of a user's own."""
    groups = "".join(f"[neuclip.{group}]\ntoy = toys_of_mine\n" for group in ("trackers", "sources", "charts"))
    install(monkeypatch, SINKS, tmp_path / "site", groups, toys_of_mine=PACKAGE)
    monkeypatch.setattr("pipeline.report.charts.CHARTS", CHARTS[:])
    with mock.patch.dict(SOURCES):
        yield


def test_a_tracker(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    config = TelemetryConfig(trackers=("toy",), tensorboard=False, progress="quiet")
    telemetry = Telemetry(tmp_path / "run", config=config, total_steps=2, first_step=0, is_main=True)
    telemetry.begin()
    telemetry.scalars("train", step=1, values={"loss": 0.5})
    for step in (1, 2):
        telemetry.scalars("evaluation", step=step, values={"acc1": 0.5})  # which it does not expect
    assert capsys.readouterr().err == "Toy cannot be written (KeyError('loss')): metrics are missing there.\n"
    telemetry.close()
    assert (tmp_path / "run/toy.txt").read_text() == "train 1 0.5"
    with pytest.raises(UserError, match=r"telemetry.trackers: there is no sink 'tpy'.*nearest is toy"):
        Telemetry(tmp_path, config=TelemetryConfig(trackers=("tpy",)), total_steps=2, first_step=0, is_main=True)


def test_a_source_of_urls(tmp_path):
    pq.write_table(pa.table({"address": ["http://a.example/1.jpg"], "words": ["a cat"]}), tmp_path / "urls.parquet")
    given = [f"output={tmp_path / 'data'}", f"source.table={tmp_path / 'urls.parquet'}", "source.name=toy"]
    given += ["guard.contact=x@example.org", "--plan-only"]
    done = CliRunner().invoke(download.command, given, catch_exceptions=False)
    assert "1 of 1 rows in 1 shards" in done.output


def test_a_chart(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    CliRunner().invoke(report.command, [str(run)], catch_exceptions=False)
    assert "Twice the loss" in (run / "report.html").read_text()
    assert ".broken is left out: AttributeError(" in caplog.text
