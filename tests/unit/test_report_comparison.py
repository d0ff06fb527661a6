"""Comparison of several runs: aggregates, paired bootstrap, tables."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.files import sha256_of
from pipeline.report import write_report
from pipeline.report.comparison import compare, groups_of, labels, resample, statistic
from pipeline.report.run_data import read_run
from pipeline.report.stored_scores import Score, StoredEvaluation
from tests.report_runs import make_run


def make_score(folder, metric, outcomes, *, task="t", protocol="classification"):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "t.outcomes.npz", **outcomes)
    digest = sha256_of(folder / "t.outcomes.npz")
    inputs = {"task_data": "same"}
    facts = {"outcomes": digest, "path": folder / "t.json"}
    return Score(task, task, protocol, metric, 0.0, {}, None, 0, False, inputs, **facts)


@pytest.fixture
def pair(tmp_path):
    return [make_run(tmp_path / "a"), make_run(tmp_path / "b", name="openclip", right=90)]


def test_differences_and_their_intervals(pair):
    comparison = compare([read_run(path) for path in pair])
    assert comparison.labels == ["a", "b"]
    row = next(row for row in comparison.tasks if row.name == "colour")
    first, delta = row.differences
    assert (row.scores, first, delta.value) == ([0.6, 0.9], None, pytest.approx(0.3))
    # 30 of 100 samples differ, all in one direction: the interval is that of a binomial proportion of 0.3.
    assert delta.interval == pytest.approx((0.21, 0.39), abs=0.02)
    assert delta.is_clear
    same = [read_run(pair[0])] * 2
    again = compare(same)
    assert all(row.differences[1].interval == (0.0, 0.0) and not row.differences[1].is_clear for row in again.tasks)
    assert not any("DataComp" in name or "ImageNet" in name for name in groups_of([run.latest for run in same]))
    assert {row.name: row.scores for row in comparison.aggregates} == {"Zero-shot": [0.6, 0.9], "Retrieval": [0.6, 0.9]}


def test_bootstrap_agrees_with_the_standard_error(tmp_path):
    rng = np.random.default_rng(0)
    ranks = [(rng.random(2_000) > p).astype(int) for p in (0.5, 0.6)]
    scores = [make_score(tmp_path / str(k), "acc1", {"rank": rank}) for k, rank in enumerate(ranks)]
    values = resample(scores, resamples=2_000)
    hits = np.array([rank == 0 for rank in ranks], dtype=float)
    np.testing.assert_allclose(values.mean(1), hits.mean(1), atol=0.002)
    paired = (hits[1] - hits[0]).std() / np.sqrt(2_000)
    assert (values[1] - values[0]).std() == pytest.approx(paired, rel=0.06)
    np.testing.assert_array_equal(values, resample(scores, resamples=2_000))


def test_no_interval_for_other_data_or_without_outcomes(tmp_path):
    one = make_score(tmp_path / "1", "acc1", {"rank": np.zeros(5)})
    shorter = make_score(tmp_path / "2", "acc1", {"rank": np.zeros(4)})
    other = replace(one, inputs={"task_data": "another set"})
    gone = replace(one, path=tmp_path / "nowhere" / "t.json")
    assert resample([one, one]) is not None
    for second in (shorter, other, gone):
        assert resample([one, second]) is None


def test_statistics_equal_the_metrics_of_the_evaluation(tmp_path):
    """On the original samples, every statistic must equal the metric that the evaluation computes."""
    from pipeline.evaluation.datasets.datacomp import TASKS
    from pipeline.evaluation.protocols import association, classification, retrieval

    rng = np.random.default_rng(1)
    rows = {"target": rng.integers(0, 6, 300), "prediction": rng.integers(0, 6, 300), "rank": rng.integers(0, 9, 300)}
    for task in ("cifar10", "vtab/pets", "wilds/iwildcam", "wilds/fmow", "fairness/dollar_street", "fairness/geode"):
        fields = {f"field:{name}": rng.integers(0, 3, 300) for name in TASKS[task].fields}
        outcomes = rows | fields
        score = make_score(tmp_path / task, TASKS[task].main_metric, outcomes, task=task)
        units, compute = statistic(score, outcomes)
        expected = classification.metrics(TASKS[task], outcomes, classes=9)[TASKS[task].main_metric]
        assert compute(np.arange(units)) == pytest.approx(expected, abs=1e-12), task
    owner = np.repeat(np.arange(40), rng.integers(1, 8, 40))
    ranks = {
        "caption_owner": owner,
        "caption_rank": rng.integers(0, 3, len(owner)),
        "image_rank": rng.integers(0, 3, 40),
    }
    score = make_score(tmp_path / "r", "mean_recall@1", ranks, protocol="retrieval")
    units, compute = statistic(score, ranks)
    assert units == 40
    assert compute(np.arange(units)) == pytest.approx(retrieval.metrics(ranks)["mean_recall@1"], abs=1e-12)
    found = {"jaccard": rng.random(60), "candidates": rng.choice([5, 6, 10, 12], 60)}
    score = make_score(tmp_path / "w", "jaccard_score_10-12", found, protocol="association")
    units, compute = statistic(score, found)
    assert compute(np.arange(units)) == pytest.approx(association.metrics(found)["jaccard_score_10-12"], abs=1e-12)


def test_written_files(pair, tmp_path):
    page = write_report(pair, output=tmp_path / "out")
    html = page.read_text()
    assert "+30.00 [+2" in html
    assert 'class="ci up"' in html
    assert "scenes/size could not be scored" in html
    text = page.with_suffix(".md").read_text()
    assert "\n| aggregate, % | a | b |\n|---|---:|---:|\n| Zero-shot | 60.00 | 90.00 (+30.00 [" in text
    assert "| colour | 60.00 | 90.00 (+30.00 [" in text
    with page.with_suffix(".csv").open() as file:
        rows = {(row["task"], row["run"]): row for row in csv.DictReader(file)}
    assert float(rows["colour", "b"]["score"]) == 0.9
    assert float(rows["colour", "b"]["ci_low"]) > 0.15
    assert rows["colour", "a"]["difference"] == ""


def test_labels_are_unique(tmp_path):
    runs = [read_run(make_run(tmp_path / name / "run")) for name in ("x", "y")]
    assert labels(runs) == ["x/run", "y/run"]
    assert labels([runs[0], runs[0]]) == ["run (1)", "run (2)"]


def test_runs_that_were_evaluated_differently_are_not_compared(pair):
    for run, precision in zip(pair, ("fp32", "bf16"), strict=True):
        for path in (run / "evaluation").glob("*/scenes-*.json"):
            path.write_text(path.read_text().replace('"inputs": {', f'"inputs": {{"precision": "{precision}", '))
    with pytest.raises(UserError, match=r"was evaluated with different precision \(a: fp32, b: bf16\)"):
        compare([read_run(path) for path in pair])


def test_an_aggregate_over_unofficial_data_is_marked(tmp_path):
    from pipeline.evaluation.datasets.datacomp import AGGREGATES

    def evaluated(official):
        keys = AGGREGATES["Retrieval"]
        path = tmp_path / "x.json"
        scores = [Score(k, k, "retrieval", "m", 0.5, {}, None, 9, official, {}, path=path) for k in keys]
        return StoredEvaluation("step-1", 1, 1, tuple(scores))

    assert list(groups_of([evaluated(True)])) == ["Retrieval"]
    assert list(groups_of([evaluated(True), evaluated(False)])) == ["Retrieval (not the official data)"]
