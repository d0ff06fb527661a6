"""Custom tasks: a few lines of YAML turn class folders, a CSV or a Hugging Face dataset into a task."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from pipeline.evaluation.compute import Compute
from pipeline.evaluation.datasets.suite import open_task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.protocols.classification import ZeroShot
from pipeline.evaluation.run.images import ImagePass
from pipeline.pictures.pixels import WHITE
from tests.checkpoints import scored
from tests.hub import Hub, use_hub
from tests.own_tasks import CLASSES, bodies, one_task, opened, write_class_folders, write_csv, write_parquet
from tests.web import serve


def test_class_folders_with_custom_names_templates_and_metric(tmp_path, model):
    write_class_folders(tmp_path)
    Image.new("P", (8, 8)).save(tmp_path / "photos/mug/12.gif", transparency=0)
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
    assert np.bincount(data.labels).tolist() == [5, 4, 4]
    found = scored(model, tmp_path, tmp_path / "out")
    result = found.results["products"]
    assert (result.name, result.main_metric) == ("Our products", "mean_per_class_recall")
    assert result.score == result.metrics["mean_per_class_recall"]
    assert not result.official
    (tmp_path / "tasks.yaml").write_text(text.replace("mean_per_class_recall", "F1-macro_all"))
    other = scored(model, tmp_path, tmp_path / "out")
    assert not other.reused
    assert other.results["products"].score == other.results["products"].metrics["F1-macro_all"]


def test_every_class_may_have_prompts_of_its_own(tmp_path, model):
    write_class_folders(tmp_path)
    features = []
    for given in (
        "templates: ['a {c}.', 'one {c}']",
        "prompts: {mug: [a mug., one mug], plate: [a plate., one plate], t_shirt: [a t shirt., one t shirt]}",
        "prompts: {mug: [a cup], plate: [a plate., a dish, a saucer], t shirt: [a shirt, clothes]}",
    ):
        entry = one_task(tmp_path, f"mine: {{folder: photos, {given}}}")
        texts = ZeroShot(entry.task, open_task(entry)).texts
        features.append(texts.encode(model, 0, compute=Compute(torch.device("cpu")), micro_batch=4))
    torch.testing.assert_close(features[0], features[1], rtol=0, atol=1e-6)
    assert not torch.allclose(features[0][0], features[2][0], atol=1e-3)
    cup = model.encode_text(model.tokenize(["a cup"]))[0]
    torch.testing.assert_close(features[2][0], cup, rtol=0, atol=1e-5)


def test_transparent_pictures_are_on_white_in_own_tasks_only(tmp_path):
    picture = Image.new("RGBA", (8, 8), (10, 200, 30, 0))
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        picture.save(tmp_path / f"photos/{name}/1.png")
    data = opened(tmp_path, "mine: {folder: photos}")
    assert data.on_background
    sizes = {"micro_batch": 2, "batch_size": 2, "workers": 0}
    for background, colour in ((WHITE, (255, 255, 255)), (None, (10, 200, 30))):
        [(_, _, tensors)] = ImagePass(data.images, {"": to_tensor}, **sizes, background=background).run()
        assert tensors[""][0, :, 0, 0].mul(255).round().int().tolist() == list(colour)
    assert not TaskData(tmp_path, "webdataset", data.images, ()).on_background, "official tasks drop alpha"


def test_a_csv_of_labels_and_a_csv_of_captions(tmp_path, model):
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
    found = scored(model, tmp_path / "captions", tmp_path / "out")
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
def test_hugging_face_dataset(tmp_path, model, parquet):
    saved_dataset(tmp_path, parquet=parquet)
    data = opened(tmp_path, "birds: {dataset: birds, label: species, metric: acc1}")
    assert data.classnames == CLASSES, "the dataset's own label names"
    assert not scored(model, tmp_path, tmp_path / "out").failures
    assert opened(tmp_path, "birds: {dataset: birds, label: species, classnames: [a, b, c]}").classnames == tuple("abc")


def test_hub_dataset(tmp_path, monkeypatch):
    saved_dataset(tmp_path / "made", parquet=True)
    body = next((tmp_path / "made").rglob("*.parquet")).read_bytes()
    entry = one_task(tmp_path, "birds: {dataset: someone/birds, label: species}")
    use_hub(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(TaskError, match="cannot be fetched from the hub"):
        open_task(entry)
    with serve() as site:
        hub = Hub(site, {"someone/birds": {"data/test-00000-of-00001.parquet": body}})
        use_hub(monkeypatch, site.base)
        assert open_task(entry).classnames == CLASSES
        hub.asked.clear()
        assert open_task(entry).samples == 9
        assert not hub.asked, "the dataset must be fetched only once"


def test_one_image_under_two_spellings_is_one_image(tmp_path):
    names = [path.name for path in sorted((write_csv(tmp_path, "kind"), tmp_path / "pictures")[1].iterdir())]
    (tmp_path / "pictures/link").symlink_to(names[0])
    lines = ["file,kind", f"{names[0]},one", f"./{names[0]},two", f"{names[1]},three", "link,four"]
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n")
    data = opened(tmp_path, "mine: {csv: items.csv, images: pictures, image: file, caption: kind}")
    assert data.captions == (("one", "two", "four"), ("three",))
    image = [body for _, body in bodies(2)]
    columns = {"image": [image[0], image[1], image[0]], "kind": ["one", "two", "three"]}
    write_parquet(tmp_path / "ds/test.parquet", **columns)
    data = opened(tmp_path, "mine: {dataset: ds, caption: kind}")
    assert data.captions == (("one", "three"), ("two",)), "rows with the same bytes"


def write_columns(root: Path) -> None:
    """A CSV with two columns of images, of labels and of captions."""
    lines = ["image,other,label,label2,text,text2"]
    for number, (suffix, body) in enumerate(bodies(8)):
        (root / f"{number}.{suffix}").write_bytes(body)
    names = [f"{number}.{suffix}" for number, (suffix, _) in enumerate(bodies(8))]
    for k, name in enumerate(names):
        lines.append(f"{name},{names[-1 - k]},{k % 3},{k // 3},caption {k},words {7 - k}")
    (root / "items.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("changed", ["label: label, image: other", "caption: text2"])
def test_other_columns_of_the_same_files_are_other_data(tmp_path, model, changed):
    write_columns(tmp_path)
    first = "caption: text" if "caption" in changed else "label: label"
    one_task(tmp_path, f"mine: {{csv: items.csv, {first}}}")
    scored(model, tmp_path, tmp_path / "out")
    one_task(tmp_path, f"mine: {{csv: items.csv, {changed}}}")
    refused = scored(model, tmp_path, tmp_path / "out")
    assert "others when it was first evaluated" in refused.failures["mine"]
    accepted = scored(model, tmp_path, tmp_path / "out", relock=True)
    fresh = scored(model, tmp_path, tmp_path / "fresh")
    assert not accepted.reused
    assert accepted.results["mine"] == fresh.results["mine"]
    outcomes = [np.load(tmp_path / f"{name}/mine.outcomes.npz") for name in ("out", "fresh")]
    assert all(np.array_equal(outcomes[0][key], outcomes[1][key]) for key in outcomes[1].files)
