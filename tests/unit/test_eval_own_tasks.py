"""Custom tasks: a few lines of YAML turn class folders, a CSV or a Hugging Face dataset into a task."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from jobs.evaluate import command
from pipeline.errors import UserError
from pipeline.evaluation import evaluate
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.model.evaluation_model import EvaluationModel
from tests.checkpoints import QUICK, make_model, save_checkpoint
from tests.evaluation_suite import image_bytes, write_classification
from tests.hub import Hub
from tests.web import serve

CLASSES = ("mug", "t_shirt", "plate")


@pytest.fixture(scope="module")
def model() -> EvaluationModel:
    return make_model(0)


def bodies(count: int) -> list[tuple[str, bytes]]:
    rng = np.random.default_rng(7)
    return [image_bytes(rng, number) for number in range(count)]


def write_class_folders(root: Path) -> None:
    for number, (suffix, body) in enumerate(bodies(12)):
        folder = root / "photos" / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.{suffix}").write_bytes(body)


def write_csv(root: Path, column: str) -> None:
    lines = [f"file,{column}"]
    (root / "pictures").mkdir(parents=True)
    for number, (suffix, body) in enumerate(bodies(9)):
        (root / f"pictures/{number}.{suffix}").write_bytes(body)
        value = CLASSES[number % 3] if column == "kind" else f"caption {number}"
        lines.append(f"{number}.{suffix},{value}")
    if column == "text":
        lines.append(lines[1].replace("caption 0", "another of the first"))
    (root / "items.csv").write_text("\n".join(lines) + "\n")


def one_task(root: Path, text: str) -> Entry:
    (root / "tasks.yaml").write_text(text)
    return open_suite(root).entries[0]


def opened(root: Path, text: str) -> TaskData:
    return open_task(one_task(root, text))


def test_class_folders_with_custom_names_templates_and_metric(tmp_path: Path, model: EvaluationModel) -> None:
    write_class_folders(tmp_path)
    text = """
products:
  name: Our products
  folder: photos
  templates: ["a photo of a {c}.", "a {c} in a shop"]
  classnames: {t_shirt: T-shirt}
  metric: mean_per_class_recall
"""
    data = opened(tmp_path, text)
    assert data.classnames == ("mug", "plate", "T-shirt")
    assert data.templates == ("a photo of a {c}.", "a {c} in a shop")
    assert data.labels is not None
    assert np.bincount(data.labels).tolist() == [4, 4, 4]
    found = evaluate(model, suite=tmp_path, output=tmp_path / "out", config=QUICK)[0]
    result = found.results["products"]
    assert (result.name, result.main_metric) == ("Our products", "mean_per_class_recall")
    assert result.score == result.metrics["mean_per_class_recall"]
    assert not result.official
    (tmp_path / "tasks.yaml").write_text(text.replace("mean_per_class_recall", "F1-macro_all"))
    other = evaluate(model, suite=tmp_path, output=tmp_path / "out", config=QUICK)[0]
    assert not other.reused
    assert other.results["products"].score == other.results["products"].metrics["F1-macro_all"]


def test_a_csv_of_labels_and_a_csv_of_captions(tmp_path: Path, model: EvaluationModel) -> None:
    write_csv(tmp_path / "labels", "kind")
    data = opened(tmp_path / "labels", "kinds: {csv: items.csv, images: pictures, image: file, label: kind}")
    assert data.classnames == ("mug", "plate", "t shirt")
    assert data.samples == 9
    assert [data.images.read(k) for k in range(9)] == [body for _, body in bodies(9)]
    write_csv(tmp_path / "captions", "text")
    text = "catalogue: {csv: items.csv, images: pictures, image: file, caption: text, metric: text_retrieval_recall@5}"
    data = opened(tmp_path / "captions", text)
    assert data.samples == 9
    assert data.captions[0] == ("caption 0", "another of the first"), "the captions of two rows with the same image"
    found = evaluate(model, suite=tmp_path / "captions", output=tmp_path / "out", config=QUICK)[0]
    assert found.results["catalogue"].score == found.results["catalogue"].metrics["text_retrieval_recall@5"]


def saved_dataset(root: Path, *, parquet: bool) -> None:
    import datasets

    kind = datasets.ClassLabel(names=list(CLASSES))
    features = datasets.Features({"image": datasets.Image(), "species": kind})
    images = [{"bytes": body, "path": None} for _, body in bodies(9)]
    made = datasets.Dataset.from_dict({"image": images, "species": [k % 3 for k in range(9)]}, features=features)
    if parquet:
        (root / "birds").mkdir(parents=True)
        made.to_parquet(str(root / "birds/test-00000-of-00001.parquet"))
    else:
        made.save_to_disk(str(root / "birds"))


@pytest.mark.parametrize("parquet", [True, False])
def test_hugging_face_dataset(tmp_path: Path, model: EvaluationModel, parquet: bool) -> None:
    saved_dataset(tmp_path, parquet=parquet)
    data = opened(tmp_path, "birds: {dataset: birds, label: species, metric: acc1}")
    assert data.classnames == CLASSES, "the dataset's own label names"
    assert not evaluate(model, suite=tmp_path, output=tmp_path / "out", config=QUICK)[0].failures
    assert opened(tmp_path, "birds: {dataset: birds, label: species, classnames: [a, b, c]}").classnames == tuple("abc")


def test_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_dataset(tmp_path / "made", parquet=True)
    body = next((tmp_path / "made").rglob("*.parquet")).read_bytes()
    entry = one_task(tmp_path, "birds: {dataset: someone/birds, label: species}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(TaskError, match="cannot be fetched from the hub"):
            open_task(entry)
    with serve() as site:
        hub = Hub(site, {"someone/birds": {"data/test-00000-of-00001.parquet": body}})

        def snapshot(repo: str, **options: Any) -> str:
            return str(real(repo, endpoint=hub.base, **options))

        import huggingface_hub

        real = huggingface_hub.snapshot_download
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert open_task(entry).classnames == CLASSES
        hub.asked.clear()
        assert open_task(entry).samples == 9
        assert not hub.asked, "the dataset must be fetched only once"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {}", "needs exactly one of folder, csv and dataset, but has none"),
        ("a: {folder: x, csv: y}", "but has folder and csv"),
        ("a: {folder: x, label: y}", "the folders' names are the labels"),
        ("a: {csv: x}", "needs either caption .* or label"),
        ("a: {folder: x, templates: [photo]}", "the template 'photo' needs {c}"),
        ("a: {folder: x, metric: recall}", "metric = 'recall' is not known. Allowed: acc1, acc5"),
        ("a: {folder: x, tempaltes: [photo]}", "The nearest valid key is a.templates"),
        ("imagenet1k: {folder: x}", "has the key of a task of the benchmark"),
        ("../a: {folder: x}", "a key is made of letters"),
        ("a: photos", "must be a mapping"),
        ("", "describes no task"),
    ],
)
def test_mistakes_in_the_yaml_are_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "tasks.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        open_suite(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {folder: nowhere}", "There is no folder"),
        ("a: {csv: nowhere.csv, label: x}", "There is no CSV"),
        ("a: {csv: items.csv, image: file, label: x}", "has no column x; its columns are file, kind"),
        ("a: {csv: items.csv, image: file, label: kind, classnames: [one]}", "has 1 names, but the data has 3 classes"),
        ("a: {csv: items.csv, image: file, label: kind, classnames: {cup: x}}", "classnames has 'cup'"),
        ("a: {dataset: nowhere, label: x}", "There is no data set"),
        ("a: {folder: pictures}", "holds no folders of classes"),
    ],
)
def test_data_that_does_not_match_the_yaml_is_reported(tmp_path: Path, text: str, message: str) -> None:
    write_csv(tmp_path, "kind")
    with pytest.raises(TaskError, match=message):
        opened(tmp_path, text)


def test_non_image_files_and_missing_images_are_reported(tmp_path: Path, model: EvaluationModel) -> None:
    write_class_folders(tmp_path)
    (tmp_path / "photos/mug/notes.txt").write_text("stray")
    with pytest.raises(TaskError, match=r"holds notes\.txt, which is not an image"):
        opened(tmp_path, "a: {folder: photos}")
    write_csv(tmp_path / "csv", "kind")
    (tmp_path / "csv/pictures/4.jpg").unlink(missing_ok=True)
    next((tmp_path / "csv/pictures").iterdir()).unlink()
    (tmp_path / "csv/tasks.yaml").write_text("kinds: {csv: items.csv, images: pictures, image: file, label: kind}")
    found = evaluate(model, suite=tmp_path / "csv", output=tmp_path / "out", config=QUICK)[0]
    assert "Cannot read" in found.failures["kinds"]


def test_command_accepts_a_yaml_file_with_or_without_benchmark_tasks(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    write_classification(tmp_path, replace(TASKS["mnist"], key="other"))
    (tmp_path / "tasks.yaml").write_text("products: {folder: photos}")
    checkpoint = save_checkpoint(tmp_path / "step-00000001", 0)
    for suite, keys in ((tmp_path, {"products", "other"}), (tmp_path / "tasks.yaml", {"products"})):
        output = tmp_path / f"out-{len(keys)}"
        arguments = [str(checkpoint), "--suite", str(suite), "--output", str(output), "--device", "cpu", "workers=0"]
        done = CliRunner().invoke(command, arguments, standalone_mode=False)
        assert done.return_value == 0, done.output
        assert set(json.loads((output / "summary.json").read_text())["scores"]) == keys


def labelled(root: Path, lines: list[str], *, kind: str = "label") -> str:
    write_csv(root, "kind")
    (root / "items.csv").write_text("\n".join(lines) + "\n")
    return f"mine: {{csv: items.csv, images: pictures, image: file, {kind}: kind}}"


WRONG_CSVS = {
    "cells beyond the header": (["file,kind", "0.jpg,mug,1", "1.jpg,plate,2"], "more cells than the header"),
    "two columns of one name": (["file,kind,kind", "0.jpg,mug,1"], "two columns 'kind'"),
    "zeros in the middle": (["file,kind", "0.jpg,mug\0\0", "1.jpg,plate"], "holds zero bytes"),
    "a negative label": (["file,kind", "0.jpg,0", "1.jpg,-1"], "-1 means that this split has no labels"),
    "a label that is no class": (["file,kind", "0.jpg,0", "1.jpg,20261122"], "is not the number of a class"),
}


@pytest.mark.parametrize("name", WRONG_CSVS)
def test_csvs_that_would_lose_or_shift_data_are_refused(name: str, tmp_path: Path) -> None:
    lines, message = WRONG_CSVS[name]
    text = labelled(tmp_path / "suite", lines)
    with pytest.raises(TaskError, match=message):
        opened(tmp_path / "suite", text)


def test_one_image_under_two_spellings_is_one_image(tmp_path: Path) -> None:
    names = [path.name for path in sorted((write_csv(tmp_path, "kind"), tmp_path / "pictures")[1].iterdir())]
    lines = ["file,kind", f"{names[0]},one", f"./{names[0]},two", f"{names[1]},three"]
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n")
    data = opened(tmp_path, "mine: {csv: items.csv, images: pictures, image: file, caption: kind}")
    assert data.captions == (("one", "two"), ("three",))


def test_images_that_would_be_skipped_in_class_folders_are_refused(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    text = "mine: {folder: photos}"
    loose = tmp_path / "photos/loose.jpg"
    loose.write_bytes(bodies(1)[0][1])
    with pytest.raises(TaskError, match=r"holds loose.jpg beside its folders of classes"):
        opened(tmp_path, text)
    loose.unlink()
    (tmp_path / "photos/mug/link.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(TaskError, match=r"link.jpg is a link to nothing"):
        opened(tmp_path, text)


def write_parquet(path: Path, **columns: list[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": [body for _, body in bodies(2)], **columns}), path)


def test_parquet_of_other_splits_and_rows_without_values_are_refused(tmp_path: Path) -> None:
    text = "mine: {dataset: ds, label: label}"
    write_parquet(tmp_path / "a/ds/train.parquet", label=[0, 1])
    with pytest.raises(TaskError, match=r"no files of the split test, but of others \(train.parquet\): set split"):
        opened(tmp_path / "a", text)
    write_parquet(tmp_path / "a/ds/test.parquet", label=[0.0, 1.0])
    write_parquet(tmp_path / "a/ds/testimony.parquet", label=[5.0, 6.0])
    assert opened(tmp_path / "a", text).classnames == ("0", "1"), "whole numbers may be stored as floats"
    write_parquet(tmp_path / "a/ds/test.parquet", label=["00", "02"])
    padded = opened(tmp_path / "a", text)
    assert padded.labels is not None
    assert (padded.labels.tolist(), padded.classnames) == ([0, 2], ("0", "1", "2")), "numbers may begin with zeros"
    write_parquet(tmp_path / "b/ds/test.parquet", label=[0.0, float("nan")])
    with pytest.raises(TaskError, match=r"row 1 of .* has no label"):
        opened(tmp_path / "b", text)
    write_parquet(tmp_path / "c/ds/test.parquet", caption=[["a", None], ["b", "c"]])
    with pytest.raises(TaskError, match=r"row 0 of .* has an empty caption"):
        opened(tmp_path / "c", "mine: {dataset: ds, caption: caption}")


def test_a_task_with_one_class_has_no_score(tmp_path: Path, model: EvaluationModel) -> None:
    write_class_folders(tmp_path)
    for name in CLASSES[1:]:
        shutil.rmtree(tmp_path / "photos" / name)
    one_task(tmp_path, "mine: {folder: photos}")
    found = evaluate(model, suite=tmp_path, output=tmp_path / "out", config=QUICK)[0]
    assert "needs two at least" in found.failures["mine"]


def write_columns(root: Path) -> None:
    """A CSV with two columns of images, of labels and of captions."""
    lines = ["image,other,label,label2,text,text2"]
    for number, (suffix, body) in enumerate(bodies(8)):
        (root / f"{number}.{suffix}").write_bytes(body)
    names = [f"{number}.{suffix}" for number, (suffix, _) in enumerate(bodies(8))]
    for k, name in enumerate(names):
        lines.append(f"{name},{names[-1 - k]},{k % 3},{k // 3},caption {k},words {7 - k}")
    (root / "items.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("changed", ["label: label2", "label: label, image: other", "caption: text2"])
def test_other_columns_of_the_same_files_are_other_data(tmp_path: Path, model: EvaluationModel, changed: str) -> None:
    write_columns(tmp_path)
    config = replace(QUICK, cache=str(tmp_path / "cache"))
    first = "caption: text" if "caption" in changed else "label: label"
    one_task(tmp_path, f"mine: {{csv: items.csv, {first}}}")
    evaluate(model, suite=tmp_path, output=tmp_path / "out", config=config)
    one_task(tmp_path, f"mine: {{csv: items.csv, {changed}}}")
    refused = evaluate(model, suite=tmp_path, output=tmp_path / "out", config=config)[0]
    assert "others when it was first evaluated" in refused.failures["mine"]
    accepted = evaluate(model, suite=tmp_path, output=tmp_path / "out", config=replace(config, relock=True))[0]
    fresh = evaluate(model, suite=tmp_path, output=tmp_path / "fresh", config=QUICK)[0]
    assert not accepted.reused
    assert accepted.results["mine"] == fresh.results["mine"]
    outcomes = [np.load(tmp_path / f"{name}/mine.outcomes.npz") for name in ("out", "fresh")]
    assert all(np.array_equal(outcomes[0][key], outcomes[1][key]) for key in outcomes[1].files)


def test_numbers_of_classes_may_be_written_as_floats(tmp_path: Path) -> None:
    for number, (suffix, body) in enumerate(bodies(12)):
        (tmp_path / f"{number}.{suffix}").write_bytes(body)
    names = [f"{number}.{suffix}" for number, (suffix, _) in enumerate(bodies(12))]
    text = "mine: {csv: items.csv, label: label}"
    (tmp_path / "items.csv").write_text("image,label\n" + "".join(f"{name},{k}.0\n" for k, name in enumerate(names)))
    labels = opened(tmp_path, text).labels
    assert labels is not None
    assert labels.tolist() == list(range(12)), "in the order of the numbers, not of their letters"
    (tmp_path / "items.csv").write_text(f"image,label\n{names[0]},0\n{names[1]},NaN\n{names[2]},1\n")
    with pytest.raises(TaskError, match=r"row 2 of .*items.csv, column label: NaN is not the number of a class"):
        opened(tmp_path, text)
    (tmp_path / "items.csv").write_text(f"image;label\n{names[0]};0\n{names[1]};1\n")
    with pytest.raises(
        TaskError, match=r"items.csv has no column image; its columns are image;label. Cells are separated by commas"
    ):
        opened(tmp_path, text)


def test_a_task_does_not_take_the_place_of_the_summary(tmp_path: Path, model: EvaluationModel) -> None:
    write_class_folders(tmp_path)
    (tmp_path / "tasks.yaml").write_text(
        "Summary: {folder: photos}\nsuite.lock: {folder: photos}\nmine: {folder: photos}"
    )
    for suite in (tmp_path, tmp_path / "tasks.yaml"):
        found = evaluate(model, suite=suite, output=tmp_path / "out", config=QUICK)[0]
        assert set(found.failures) == {"Summary", "suite.lock"}
        assert "give the task another name" in found.failures["Summary"]
        assert set(json.loads((tmp_path / "out/summary.json").read_text())["scores"]) == {"mine"}


def test_misspelt_keys_are_reported_with_their_file(tmp_path: Path) -> None:
    write_class_folders(tmp_path)
    with pytest.raises(UserError, match=r"tasks.yaml: .*Unknown key mine.templtes"):
        one_task(tmp_path, "mine: {folder: photos, templtes: []}")
