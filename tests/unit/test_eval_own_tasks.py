"""Custom tasks: a few lines of YAML turn class folders, a CSV or a Hugging Face dataset into a task.

What would be lost, shifted or counted twice is refused with the file, the row and the reason.
"""

import os
import shutil
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import to_tensor

from pipeline.errors import UserError
from pipeline.evaluation.compute import Compute
from pipeline.evaluation.datasets.suite import open_task
from pipeline.evaluation.datasets.task_data import TaskData, TaskError
from pipeline.evaluation.protocols.classification import ZeroShot
from pipeline.evaluation.run.images import ImagePass
from pipeline.files import MOST_TEXT
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
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGBA", (8, 8), (10, 200, 30, 0)).save(tmp_path / f"photos/{name}/1.png")
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
    assert [data.images.read(k) for k in range(data.samples)] == [body for _, body in bodies(9)]
    write_csv(tmp_path / "captions", "text")
    text = "catalogue: {csv: items.csv, images: pictures, image: file, caption: text, metric: text_retrieval_recall@5}"
    data = opened(tmp_path / "captions", text)
    assert data.samples == 9
    assert data.captions[0] == ("caption 0", "another of the first"), "the captions of two rows with the same image"
    found = scored(model, tmp_path / "captions", tmp_path / "out")
    assert found.results["catalogue"].score == found.results["catalogue"].metrics["text_retrieval_recall@5"]


def test_datasets_from_a_folder_or_the_hub_have_their_own_label_names(tmp_path, model, monkeypatch):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "species": datasets.ClassLabel(names=list(CLASSES))})
    images = [{"bytes": body, "path": None} for _, body in bodies(9)]
    made = datasets.Dataset.from_dict({"image": images, "species": [k % 3 for k in range(9)]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "birds").mkdir()
    made.to_parquet(str(tmp_path / "birds/test-00000-of-00001.parquet"))
    for folder in ("saved", "birds"):
        text = f"birds: {{dataset: {folder}, label: species, metric: acc1"
        assert opened(tmp_path, text + ", classnames: [a, b, c]}").classnames == tuple("abc")
        assert opened(tmp_path, text + "}").classnames == CLASSES
        assert not scored(model, tmp_path, tmp_path / folder / "out").failures
    entry = one_task(tmp_path, "birds: {dataset: someone/birds, label: species}")
    use_hub(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(TaskError, match="cannot be fetched from the hub"):
        open_task(entry)
    with serve() as site:
        body = next((tmp_path / "birds").glob("*.parquet")).read_bytes()
        hub = Hub(site, {"someone/birds": {"data/test-00000-of-00001.parquet": body}})
        use_hub(monkeypatch, site.base)
        assert open_task(entry).classnames == CLASSES
        hub.asked.clear()
        assert open_task(entry).samples == 9
        assert not hub.asked, "the dataset must be fetched only once"


def test_one_image_under_two_spellings_is_one_image(tmp_path):
    write_csv(tmp_path, "kind")
    names = sorted(path.name for path in (tmp_path / "pictures").iterdir())
    (tmp_path / "pictures/link").symlink_to(names[0])
    lines = ["file,kind", f"{names[0]},one", f"./{names[0]},two", f"{names[1]},three", "link,four"]
    (tmp_path / "items.csv").write_text("\n".join(lines) + "\n")
    data = opened(tmp_path, "mine: {csv: items.csv, images: pictures, image: file, caption: kind}")
    assert data.captions == (("one", "two", "four"), ("three",))
    image = [body for _, body in bodies(2)]
    write_parquet(tmp_path / "ds/test.parquet", image=[image[0], image[1], image[0]], kind=["one", "two", "three"])
    data = opened(tmp_path, "mine: {dataset: ds, caption: kind}")
    assert data.captions == (("one", "three"), ("two",)), "rows with the same bytes"


@pytest.mark.parametrize("changed", ["label: label, image: other", "caption: text2"])
def test_other_columns_of_the_same_files_are_other_data(tmp_path, model, changed):
    names = [f"{number}.{suffix}" for number, (suffix, _) in enumerate(bodies(8))]
    for name, (_, body) in zip(names, bodies(8), strict=True):
        (tmp_path / name).write_bytes(body)
    rows = [f"{name},{names[-1 - k]},{k % 3},{k // 3},caption {k},words {7 - k}" for k, name in enumerate(names)]
    (tmp_path / "items.csv").write_text("\n".join(["image,other,label,label2,text,text2", *rows]) + "\n")
    first = "caption: text" if "caption" in changed else "label: label"
    one_task(tmp_path, f"mine: {{csv: items.csv, {first}}}")
    scored(model, tmp_path, tmp_path / "out")
    one_task(tmp_path, f"mine: {{csv: items.csv, {changed}}}")
    refused = scored(model, tmp_path, tmp_path / "out")
    assert "other columns are read (" in refused.failures["mine"]
    accepted = scored(model, tmp_path, tmp_path / "out", relock=True)
    fresh = scored(model, tmp_path, tmp_path / "fresh")
    assert not accepted.reused
    assert accepted.results["mine"] == fresh.results["mine"]


def test_mistakes_in_the_yaml_and_data_that_does_not_match_it_are_reported(tmp_path):
    write_csv(tmp_path, "kind")
    (tmp_path / "empty").mkdir()
    csv = "a: {csv: items.csv, image: file, label: kind"
    for text, message in (
        ("a: {}", "needs exactly one of folder, csv and dataset"),
        ("a: {folder: x, csv: y}", "needs exactly one of folder, csv and dataset"),
        ("a: {folder: x, label: y}", "The labels of a folder are the names of its folders"),
        ("a: {csv: x}", "either caption .* or label"),
        ("a: {csv: x, caption: y, label: z}", "either caption .* or label"),
        ("a: {csv: x, caption: y, prompts: {b: [c]}}", "prompts are for classes, .* or a caption"),
        ("a: {folder: x, templates: [photo]}", "the template 'photo' needs {c}"),
        ("a: {folder: x, templates: ['{c}'], prompts: {b: [c]}}", "prompts are for classes, instead of templates"),
        ("a: {folder: x, metric: recall}", "metric = 'recall' is not known. Allowed: acc1, acc5"),
        ("a: {folder: x, tempaltes: [photo]}", r"tasks.yaml: .*The nearest valid key is a.templates"),
        ("imagenet1k: {folder: x}", "has the key of a task of the benchmark"),
        ("../a: {folder: x}", "a key is made of letters"),
        ("a: photos", "must be a mapping"),
        ("a: {folder: x, protocol: retrieva}", "no such evaluation protocol. The nearest is retrieval"),
        ("", "describes no task"),
        ("a: {folder: nowhere}", r"1 of 1 tasks is not where .* says \(a: .*nowhere\)"),
        (f"a: {{folder: {'x' * 300}}}", "1 of 1 tasks is not where"),
        ("Summary: {folder: pictures}", "to one with another purpose: rename"),
        ("a/b: {csv: items.csv, label: y}\na--b: {csv: items.csv, label: y}", "a/b and a--b would be written to the"),
        ("a: {csv: items.csv, image: file, label: x}", "has no column x; its columns are file, kind"),
        (f"{csv}, classnames: [one]}}", "has 1 names, the data 3 classes"),
        (f"{csv}, classnames: {{cup: x}}}}", "classnames has 'cup'"),
        (f"{csv}, classnames: [a, ' ', c]}}", "class '.*' has no name"),
        (f"{csv}, classnames: [a, b, a]}}", "are both named 'a', so prompts"),
        (f"{csv}, prompts: {{cup: [a cup]}}}}", "prompts has 'cup'"),
        (f"{csv}, prompts: {{mug: [a mug]}}}}", "class '.*' has no prompts"),
        ("a: {folder: empty}", "holds no folders of classes"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path, text)


def test_files_that_would_be_skipped_or_are_missing_are_refused(tmp_path, model):
    write_class_folders(tmp_path)
    for place, make, message in (
        ("mug/notes.txt", lambda path: path.write_text("stray"), r"holds notes\.txt, which is not an image"),
        ("mug/link.jpg", lambda path: path.symlink_to("gone.jpg"), r"holds link\.jpg, .* a link to nothing"),
        ("loose.jpg", lambda path: path.write_bytes(b""), r"holds loose\.jpg beside its folders of classes"),
    ):
        make(tmp_path / "photos" / place)
        with pytest.raises(TaskError, match=message):
            opened(tmp_path, "a: {folder: photos}")
        (tmp_path / "photos" / place).unlink()
    for name in CLASSES[1:]:
        shutil.rmtree(tmp_path / "photos" / name)
    assert "needs at least two" in scored(model, tmp_path, tmp_path / "one").failures["a"]
    write_csv(tmp_path / "csv", "kind")
    text = "kinds: {csv: items.csv, images: pictures, image: file, label: kind}"
    one = next((tmp_path / "csv/pictures").iterdir())
    one.unlink()
    os.mkfifo(one)
    with pytest.raises(TaskError, match="is no file: reading a pipe or a device would not end"):
        opened(tmp_path / "csv", text)
    one.unlink()
    one_task(tmp_path / "csv", text)
    assert "Cannot read" in scored(model, tmp_path / "csv", tmp_path / "out").failures["kinds"]
    os.truncate(tmp_path / "csv/items.csv", MOST_TEXT + 1)
    with pytest.raises(TaskError, match=r"items\.csv is .* another file than a task has: larger than 256 MiB"):
        opened(tmp_path / "csv", text)


def test_csvs_that_would_lose_or_shift_data_are_refused(tmp_path):
    for number, (lines, message) in enumerate(
        (
            (["file,kind", "0.jpg,mug,1", "1.jpg,plate,2"], "more cells than the header"),
            (["file,kind,kind", "0.jpg,mug,1"], "two columns 'kind'"),
            (["file,kind", "0.jpg,mug\0\0", "1.jpg,plate"], "holds zero bytes"),
            (["file,kind", "0.jpg,0", "1.jpg,-1"], "-1 means that the split has no labels"),
            (["file,kind", "0.jpg,0", "1.jpg,NaN"], "row 2 .*, column kind: NaN is not the number of a class, as"),
            (["file;kind", "0.jpg;0", "1.jpg;1"], "no column file; .* file;kind. Cells are separated by commas"),
            (["file,kind", "0.jpg,0", "1.jpg,1.5"], "1.5 is not the number of a class, as the other labels"),
            (["file,kind", "0.jpg,mug", "1.jpg,plate", "./0.jpg,mug"], "which would count twice"),
            (["file,kind", "0.jpg,mug", "1.jpg,plate", "./0.jpg,plate"], "with different labels"),
            (["file,kind", '0.jpg,"[""dog"",""cat""]"', "1.jpg,dog"], "one per image"),
            (["file,kind", "0.jpg,['dog']", "1.jpg,dog"], "row 1 .* has the labels"),
            (["file,kind, Split", "0.jpg,mug,test", "1.jpg,plate,val"], "is of the split 'val', and"),
            (["file,kind", "0.jpg,0", "1.jpg,20261122"], "is not the number of a class"),
            (["file,kind", "0.jpg,0", f"1.jpg,{'9' * 5_000}"], "is not the number of a class"),
            (["file,kind", '0.jpg,"mug', "1.png,plate"], "row 1 .*: a quote is not closed, .* line '1.png,plate'"),
            (["file,kind", '0.jpg,"mug', '1.png,plate"', "2.webp,mug"], "row 1 .*: a quote is not closed"),
            (["file,kind", "0.jpg,mug", "1.jpg"], "row 2 .* has fewer cells than the header"),
        )
    ):
        write_csv(tmp_path / str(number), "kind")
        (tmp_path / str(number) / "items.csv").write_text("\n".join(lines) + "\n")
        with pytest.raises(TaskError, match=message):
            opened(tmp_path / str(number), "mine: {csv: items.csv, images: pictures, image: file, label: kind}")


def test_files_elsewhere_are_read_only_with_consent(tmp_path):
    """Names and links in the data of strangers could have any file of the user's read, and shown in a report."""
    private, root = tmp_path / "private", tmp_path / "suite"
    write_class_folders(private)
    write_csv(root, "kind")
    shutil.copytree(private / "photos", root / "photos")
    one = next((private / "photos/mug").iterdir())
    (root / "absolute.csv").write_text(f"file,kind\n{one},mug\n")
    (root / "dots.csv").write_text(f"file,kind\n../private/photos/mug/{one.name},mug\n")
    (root / "photos/plate" / one.name).symlink_to(one)
    (root / "linked/mug").parent.mkdir()
    (root / "linked/mug").symlink_to(private / "photos/mug")
    (root / "linked/plate").symlink_to(root / "photos/mug")
    write_parquet(private / "test.parquet", label=[0, 1])
    (root / "ds").mkdir()
    (root / "ds/test.parquet").symlink_to(private / "test.parquet")
    for text in (
        "mine: {csv: absolute.csv, image: file, label: kind}",
        "mine: {csv: dots.csv, images: ., image: file, label: kind}",
        "mine: {folder: photos}",
        "mine: {folder: linked}",
        "mine: {dataset: ds, label: label}",
    ):
        entry = one_task(root, text)
        with pytest.raises(TaskError, match=r"is outside of .*, or a link that leads out of it .*allow_outside=true"):
            open_task(entry)
        data = open_task(entry, allow_outside=True)
        assert all(data.images.read(k) for k in range(len(data.images)))
    (root / "linked/mug").unlink()
    (root / "photos/plate" / one.name).unlink()
    (root / "photos/linked").symlink_to(root / "photos/mug")
    with pytest.raises(TaskError, match=r"mug/.* and .*linked/.* are one file, and an image counts once"):
        opened(root, "mine: {folder: photos}")
    (root / "photos/mug").rename(root / "photos/.store")
    (root / "photos/linked").unlink()
    (root / "photos/mug").symlink_to(".store")
    counts = np.bincount(opened(root, "mine: {folder: photos}").labels).tolist()
    assert counts == [4, 4, 4], "links within the folder are followed"
    (root / "photos/t_shirt/all").symlink_to("/")
    with pytest.raises(TaskError, match="photos/t_shirt/all is a link to /, which contains it"):
        opened(root, "mine: {folder: photos}")


def test_parquet_of_other_splits_or_columns_is_refused(tmp_path):
    text = "mine: {dataset: ds, label: label}"
    write_parquet(tmp_path / "a/ds/train.parquet", label=[0, 1])
    with pytest.raises(TaskError, match=r"no files of the split test, but of others \(train.parquet\): set split"):
        opened(tmp_path / "a", text)
    write_parquet(tmp_path / "a/ds/test.parquet", label=[0.0, 1.0])
    write_parquet(tmp_path / "a/ds/testimony.parquet", label=[5.0, 6.0])
    assert opened(tmp_path / "a", text).classnames == ("0", "1")
    write_parquet(tmp_path / "b/ds/0000.parquet", label=[0, 1])
    for other, message in (
        ({"labels": [0, 1]}, r"0001.parquet has other columns than .*0000.parquet"),
        ({"label": ["cat", "dog"]}, r"ds cannot be read .*are its parquet files of one data set"),
        ({"label": pa.array([], pa.int64()), "image": pa.array([], pa.binary())}, r"0001.*holds no rows at all"),
    ):
        write_parquet(tmp_path / "b/ds/0001.parquet", **other)
        with pytest.raises(TaskError, match=message):
            opened(tmp_path / "b", text)


def test_cells_that_are_no_text_are_not_scored_as_text(tmp_path):
    """Regression test: a column of bytes was scored as numbers (captions) or as "b'cat'" (class names)."""
    maps = pa.array([[("a", 1)]] * 2, pa.map_(pa.string(), pa.int64()))
    for columns, message in (
        ({"caption": [1, 2]}, "row 0 of .* holds 1, which is not text"),
        ({"caption": [[49406, 320], [49406, 530]]}, "holds 49406, which is not text"),
        ({"caption": [b"a", b"\xff"]}, "row 1 of .* holds text that is not UTF-8"),
        ({"label": [[0], [1]]}, r"row 0 of .* has the labels \[0\]"),
        ({"caption": ["a", "[" * 9_999]}, "row 1 of .* should be a list"),
        ({"label": [1e17, 2e17]}, "row 0 of .*: 100000000000000000 is not the number of a class"),
        ({"label": [0, 1], "maps": maps}, "ds cannot be read .*map<string"),
        ({"label": [0.0, float("nan")]}, "row 1 of .* has no label"),
        ({"label": [0, 1], "image": [True, False]}, "row 0 of .* holds no image, and names none"),
        ({"label": [0, 1], "image": [{"bytes": "a"}, {"bytes": "b"}]}, "row 0 of .* holds no image, and names none"),
        ({"caption": [["a", None], ["b", "c"]]}, "row 0 of .* has an empty caption"),
        ({"caption": ["one", "two"], "Split": [b"test", b"train"]}, "is of the split b'train', and 'test' is scored"),
        ({"caption": ["one", "two"], "split": ["test", None]}, "row 1 of .* is of the split None, and 'test' is"),
    ):
        write_parquet(tmp_path / "ds/test.parquet", **columns)
        column = next(iter(columns))
        with pytest.raises(TaskError, match=message):
            opened(tmp_path, f"mine: {{dataset: ds, {column}: {column}}}")


def test_labels_and_captions_may_have_any_form(tmp_path):
    image = pa.array([[body] for _, body in bodies(2)], pa.list_(pa.binary(), 1))
    write_parquet(tmp_path / "ds/test.parquet", caption=[b"one", b"two"], image=image)
    assert opened(tmp_path, "mine: {dataset: ds, caption: caption}").captions == (("one",), ("two",))
    for given, labels, names in (
        ([b"cat", b"dog"], [0, 1], ("cat", "dog")),
        ([Decimal("1.00"), Decimal("0.00")], [1, 0], ("0", "1")),
        (["00", "02"], [0, 2], ("0", "1", "2")),  # numbers may begin with zeros
        (["10.0", "9.0"], [10, 9], tuple(map(str, range(11)))),  # in the order of the numbers
    ):
        write_parquet(tmp_path / "ds/test.parquet", label=given)
        data = opened(tmp_path, "mine: {dataset: ds, label: label}")
        assert (data.labels.tolist(), data.classnames) == (labels, names)
