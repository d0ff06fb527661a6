"""The report of one run: it reads what exists, lists what is missing, and is a self-contained file."""

import json
import math
import re
import shutil

import numpy as np
import pytest

from pipeline.data.shards.manifest_format import make_manifest
from pipeline.errors import UserError
from pipeline.report import update_scores, write_report
from pipeline.report.charts import SMALL, Line, line_chart, pooled, smoothed
from pipeline.report.run_data import read_run
from tests.report_runs import make_run


def append(run, *records):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_ends_of_epochs_do_not_hide_other_events(run):
    ends = [{"epoch": k, "samples": 288, "dropped": 11, "replaced": int(k == 50), "order_hash": "0"} for k in (49, 50)]
    append(run, {"kind": "event", "time": 1, "message": "A step was skipped"})
    append(run, *({"kind": "event", "time": 9, "message": f"Epoch {e['epoch']} done", "data": e} for e in ends))
    page = write_report([run]).read_text()
    table = page[page.index('aria-label="Events"') :].split("</table>")[0]
    assert re.findall(r"<td>(.*?)</td>", table) == ["started", "A step was skipped", "Epoch 50 done"]


def test_a_run_that_was_only_validated_shows_its_result(run):
    """Fine-tuning: no evaluation, no stages. Nothing is missing, so no box says so."""
    assert "Validation loss" not in write_report([run]).read_text()
    shutil.rmtree(run / "evaluation")
    for step, loss, text, image in (
        (50, 9.0, 0.1, 0.1), (50, 1.5, 0.25, 0.35), (100, 1.0, 0.5, 0.7), (150, 2.0, 0.4, 0.4), (151, math.nan, 0, 0)
    ):  # fmt: skip
        scores = {"loss": loss, "image_to_text_r1": text, "text_to_image_r1": image, "pairs": 100.0}
        append(run, {"kind": "validation", "step": step, **scores})
    x, y = read_run(run).validation("loss")  # the last line of a step counts, as after a resume
    assert (x.tolist(), y.tolist()) == ([400, 800, 1200], [1.5, 1.0, 2.0])
    html = write_report([run]).read_text()
    assert 'role="note"' not in html
    assert html.index("<h3>Loss</h3>") < html.index("<h3>Validation loss</h3>") < html.index("<h3>Temperature")
    for part in (
        "60.0%", "mean of 50.0% and 70.0% among 100 held-out pairs", "at step 100, the lowest of 3; 2.000 at step 150",
        "At the end 2.", "<h3>Validation R@1</h3>", f"<code>neuclip evaluate {run} --suite FOLDER</code>",
        f"Next: <code>neuclip evaluate {run} --suite FOLDER</code>",
    ):  # fmt: skip
        assert part in html


def test_axes_begin_at_0_and_enclose_the_curves():
    for values, options, labels in (
        ([0.0408, 0.0412], {}, "0 0.01 0.02 0.03 0.04 0.05"),
        ([0, 3e-6, 9e-6], {}, "0 2.0e-6 4.0e-6 6.0e-6 8.0e-6 1.0e-5"),
        ([-0.79, 0.34], {}, "-1.0 -0.5 0 0.5"),
        ([-5, -5], {}, "-5 -4 -3 -2 -1 0"),
        ([0.4, 0.94], {"percent": True, "size": SMALL}, "0 50% 100%"),  # not 120%
    ):
        svg = line_chart([Line(np.linspace(0.0, 219_904.0, len(values)), np.array(values, float))], **options)
        texts = re.findall(r">([^<>]+)</text>", svg.replace("\u2212", "-"))
        assert " ".join(texts) == f"{'0 200k' if 'size' in options else '0 100k 200k'} {labels}"


def test_page_is_self_contained_and_escaped(run):
    html = write_report([run]).read_text()
    loaded = re.findall(r"""\s(?:src|href|xlink:href)\s*=\s*["']?([^"'\s>]*)""", html)
    assert loaded
    assert all(item.startswith(("#", "data:image/jpeg;base64,")) for item in loaded), loaded
    assert not re.search(r"<(iframe|link)\b|url\((?!#)", html)
    for name in ("html", "body", "main", "div", "dl", "figure", "table", "details", "svg", "g"):
        assert len(re.findall(rf"<{name}[\s>]", html)) == html.count(f"</{name}>"), name
    assert "&lt;script&gt;" in html
    assert "<script>alert" not in html
    assert "<b>odd</b>" not in html
    assert "caption &lt;1&gt;" in html, "a caption retrieved for an image"
    assert "| &lt;b>odd&lt;/b> | 3 |" in (run / "report.md").read_text()


def test_page_reports_the_results_of_the_run(run):
    folder = run / "checkpoints" / "step-00000100"
    assert read_run(run).architecture == "tiny"
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text('{"architecture": "ViT-B-32"}')  # else it has a file's path
    html = write_report([run]).read_text()
    assert html.index(">http 404<") < html.index("&lt;b&gt;odd")
    assert html.count('class="thumb own"') == 1, "the correct image is shown although it was not retrieved"
    assert html.count("data:image/jpeg") == 4
    titles = ["Loss", "Normalizer gap", "Temperature τ", "Learning rate of the encoders"]
    titles += ["Throughput, samples per second", "Waiting for data, share of a step", "Largest ratio of normalizers"]
    for part in (
        *(f"<h3>{title}</h3>" for title in titles), "ViT-B-32", "60.0%", "rank 42", "90.0% of 100 URLs",
        "Why URLs gave no sample", "the data is cut short", "At the end in use 0.1, cold 0.4.",
        "Constant throughout: Corrupt samples in this epoch 0.",
    ):  # fmt: skip
        assert part in html
    assert re.search(r">colour</th>.*?width: 60.00%.*?left: 10.00%.*?>60.0%</td>", html), "a bar with a tick at chance"
    part = html[html.index("Every task over samples seen") : html.index("Images retrieved for captions")]
    assert re.findall(r"<h3>([^<]+)</h3>", part) == ["colour", "retrieval"]
    text, end, shards = (run / "report.md").read_text(), html.split("<footer>")[1], read_run(run).manifests[0].root
    for part in (
        "| colour | acc1 | 60.0% | 10.0% | 100 |", "| http 404 | 7 |", "scenes/size could not be scored: the",
        f"Next: `neuclip playground {run} --images {shards}` lets you try it",
    ):  # fmt: skip
        assert part in text
    assert f"Next: <code>neuclip playground {run} --images {shards}</code>" in end
    assert f"<code>neuclip export {run} --output hub/run</code>" in end
    assert "neuclip evaluate" not in end
    assert write_report([run]).read_text() == html, "the same run gives the same bytes"


def test_data_that_were_not_downloaded_have_no_urls(run):
    for facts, counted in (({"made by": "neuclip pairs"}, "rows"), ({}, "samples")):
        failures = {"image file missing": 10} if counted == "rows" else {}
        make_manifest([("0.tar", 90, 1_000, "0" * 64)], failures=failures, facts=facts).save(run / "shards")
        html, markdown = write_report([run]).read_text(), (run / "report.md").read_text()
        assert f"of {90 + sum(failures.values())} {counted}" in html
        assert f"<dt>{counted} tried</dt>" in html
        assert ("Why rows gave no sample" in html) == bool(failures)
        assert ("| failure | rows |" in markdown) == bool(failures)
        assert ("None of 90 samples failed." in html) != bool(failures)
        assert "URL" not in re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL) + markdown


def test_missing_inputs_are_listed_and_not_invented(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run", "nowhere"):
        with pytest.raises(UserError, match=name):
            read_run(tmp_path / name)
    (folder / "metrics.jsonl").write_text(
        '{"kind": "train", "step": 1, "samples": 8, "loss": 2.0}\n{"kind": "train", "step": 1e999, "samples": 8}\n'
        '{"kind": "train", "step": "2", "samples": "16"}\n{"kind": "validation", "step": "2"}\n{"kind": "tra'
    )
    notes = " ".join(read_run(folder).notes)
    for missing in ("No configuration", "No ingestion", "2 of 5 lines"):
        assert missing in notes
    html = write_report([folder]).read_text()
    assert "No checkpoint has been evaluated" in html
    assert "Zero-shot accuracy" not in html
    assert "Throughput" not in html
    for text in ("samples: !!bool x", "\0"):
        (folder / "config.yaml").write_text(text)
        assert "No configuration: config.yaml cannot be read" in " ".join(read_run(folder).notes)
    (folder / "config.yaml").write_text("data: {sources: 5}\n")
    line = {"kind": "train", "step": 1, "samples": 8, "loss": 10**30, "other": 10**400}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "No ingestion figures of 5" in write_report([folder]).read_text()
    assert read_run(folder).scalars() == ["loss"]
    odd = ({}, {"time": "x"}, {"time": math.inf}, {"time": 1, "data": [1]})
    append(folder, *({"kind": "event", "message": "m", **facts} for facts in odd))
    append(folder, {"kind": "validation", "step": 1, "loss": 1.25})  # without its recalls
    html = write_report([folder]).read_text()
    assert "1.250" in html
    assert "R@1" not in html
    assert "4 of 6 lines of metrics.jsonl could not be read" in html


def test_relative_paths_are_relative_to_where_the_run_was_started(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "shards").rename(tmp_path / "my-shards")
    config = {"output": "runs/one", "data": {"sources": [{"manifest": "my-shards"}]}}
    (folder / "config.yaml").write_text(json.dumps(config))
    monkeypatch.chdir("/")
    assert sum(manifest.n for manifest in read_run(folder).manifests) == 90
    (folder / "config.yaml").write_text(json.dumps({**config, "output": "/elsewhere/one"}))
    assert not read_run(folder).manifests  # a folder of this name further up may hold other data


def test_damaged_results_and_those_of_other_weights_are_skipped_and_listed(run):
    folder, secret = run / "evaluation" / "step-00000100", run.parent / "secret"
    secret.write_text("of the reader")
    colour = json.loads((folder / "scenes-colour.json").read_text())
    (folder / "scenes-shape.json").write_text(json.dumps({**colour, "task": "scenes/shape", "score": "high"}))
    assert any("scenes-shape.json is not a task's result" in note for note in read_run(run).notes)
    (folder / "scenes-shape.json").write_text('{"task": "scenes/sh')
    picture = folder / "scenes-retrieval.examples" / "0.jpg"
    picture.unlink()
    picture.symlink_to(secret)
    read = read_run(run)
    for damaged in ("scenes-shape.json", "0.jpg is a link to a file outside of the folder"):
        assert any(damaged in note for note in read.notes)
    assert [score.task for score in read.latest.scores] == ["scenes/colour", "scenes/retrieval"]
    for name, weights in (("summary.json", "new"), ("scenes-colour.json", "old"), ("scenes-retrieval.json", "new")):
        tree = json.loads((folder / name).read_text())
        (tree if name == "summary.json" else tree["inputs"])["checkpoint"] = weights
        (folder / name).write_text(json.dumps(tree))
    read = read_run(run)
    assert [score.task for score in read.latest.scores] == ["scenes/retrieval"]
    assert any("scenes-colour.json scores other weights" in note for note in read.notes)


def test_the_curves_and_evaluations_of_a_run(run):
    append(run, {"kind": "train", "step": 50, "samples": 400, "loss": 123.0, "ratio_max": 1.0})
    read = read_run(run)
    samples, loss = read.curve("loss")
    assert list(samples) == [8 * step for step in range(10, 101, 10)], "a resumed run counts each step once"
    assert loss[4] == 123.0
    assert len(read.curve("ratio_max")[0]) == 9, "a value that is not finite is not drawn"
    assert [(e.checkpoint, e.samples) for e in read.evaluations] == [("step-00000050", 400), ("step-00000100", 800)]
    for step, source in ((50, "run/checkpoints/step-00000050/ema"), (100, "run/checkpoints/step-00000100")):
        (run / f"evaluation/step-{step:08d}/timings.json").write_text(json.dumps({"source": source, "tasks": {}}))
    assert any("step-00000050 are of the average of the weights (EMA)" in note for note in read_run(run).notes)
    shutil.rmtree(run / "evaluation/step-00000100")
    assert not any("average" in note for note in read_run(run).notes)


def test_scores_as_tensorboard_scalars(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run / "tensorboard").mkdir()
    for _ in range(2):  # a second evaluation replaces the first one's scalars
        update_scores(run)
    events = EventAccumulator(str(run / "tensorboard" / "evaluation"))
    events.Reload()
    scalars = [(e.step, pytest.approx(e.value)) for e in events.Scalars("evaluation/scenes/colour")]
    assert scalars == [(50, 0.3), (100, 0.6)]


def test_pooling_and_smoothing_preserve_means_and_lines():
    x = np.arange(1_000.0)
    px, py = pooled(x, 2 * x, limit=100)
    assert len(px) == 100
    np.testing.assert_allclose(py, 2 * px)
    assert px.mean() == pytest.approx(x.mean())
    np.testing.assert_allclose(smoothed(x)[50:-50], x[50:-50], err_msg="a centred average does not lag")
    assert smoothed(np.array([0.0, 1.0] * 50)).std() < 0.15
