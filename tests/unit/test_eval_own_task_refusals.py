"""Own tasks whose description or data is wrong are refused with the file, the row and the reason."""

from __future__ import annotations

import json
import os
import shutil
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import UserError
from pipeline.evaluation.datasets.suite import open_suite, open_task
from pipeline.evaluation.datasets.task_data import TaskError
from pipeline.files import MOST_TEXT
from tests.checkpoints import scored
from tests.own_tasks import CLASSES, bodies, labelled, one_task, opened, write_class_folders, write_csv, write_parquet


def test_mistakes_in_the_yaml_are_reported(tmp_path):
    for text, message in (
        ("a: {}", "needs exactly one of folder, csv and dataset, but has none"),
        ("a: {folder: x, csv: y}", "but has folder and csv"),
        ("a: {folder: x, label: y}", "the folders' names are the labels"),
        ("a: {csv: x}", "needs either caption .* or label"),
        ("a: {folder: x, templates: [photo]}", "the template 'photo' needs {c}"),
        ("a: {folder: x, templates: ['{c}'], prompts: {b: [c]}}", "has prompts and templates"),
        ("a: {csv: x, caption: y, prompts: {b: [c]}}", "has prompts and caption"),
        ("a: {folder: x, metric: recall}", "metric = 'recall' is not known. Allowed: acc1, acc5"),
        ("a: {folder: x, tempaltes: [photo]}", "The nearest valid key is a.templates"),
        ("imagenet1k: {folder: x}", "has the key of a task of the benchmark"),
        ("../a: {folder: x}", "a key is made of letters"),
        ("a: photos", "must be a mapping"),
        ("a: {folder: x, protocol: retrieva}", "no such evaluation protocol. The nearest is retrieval"),
        ("a: {folder: x, templtes: []}", r"tasks.yaml: .*Unknown key a.templtes"),
        ("", "describes no task"),
    ):
        (tmp_path / "tasks.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            open_suite(tmp_path)


def test_data_that_does_not_match_the_yaml_is_reported(tmp_path):
    write_csv(tmp_path, "kind")
    for text, message in (
        ("a: {folder: nowhere}", "There is no folder"),
        ("a: {csv: nowhere.csv, label: x}", "There is no CSV"),
        ("a: {csv: items.csv, image: file, label: x}", "has no column x; its columns are file, kind"),
        ("a: {csv: items.csv, image: file, label: kind, classnames: [one]}", "has 1 names, but the data has 3 classes"),
        ("a: {csv: items.csv, image: file, label: kind, classnames: {cup: x}}", "classnames has 'cup'"),
        ("a: {csv: items.csv, image: file, label: kind, classnames: [a, ' ', c]}", "class '.*' has no name"),
        ("a: {csv: items.csv, image: file, label: kind, classnames: [a, b, a]}", "are both named 'a', so prompts"),
        ("a: {csv: items.csv, image: file, label: kind, prompts: {cup: [a cup]}}", "prompts has 'cup'"),
        ("a: {csv: items.csv, image: file, label: kind, prompts: {mug: [a mug]}}", "class '.*' has no prompts"),
        ("a: {dataset: nowhere, label: x}", "There is no data set"),
        ("a: {folder: pictures}", "holds no folders of classes"),
    ):
        with pytest.raises(TaskError, match=message):
            opened(tmp_path, text)


def test_non_image_files_and_missing_images_are_reported(tmp_path, model):
    write_class_folders(tmp_path)
    (tmp_path / "photos/mug/notes.txt").write_text("stray")
    with pytest.raises(TaskError, match=r"holds notes\.txt, which is not an image"):
        opened(tmp_path, "a: {folder: photos}")
    write_csv(tmp_path / "csv", "kind")
    (tmp_path / "csv/pictures/4.jpg").unlink(missing_ok=True)
    text = "kinds: {csv: items.csv, images: pictures, image: file, label: kind}"
    one = next((tmp_path / "csv/pictures").iterdir())
    one.unlink()
    os.mkfifo(one)
    with pytest.raises(TaskError, match="is no file: reading a pipe or a device would not end"):
        opened(tmp_path / "csv", text)
    one.unlink()
    (tmp_path / "csv/tasks.yaml").write_text(text)
    found = scored(model, tmp_path / "csv", tmp_path / "out")
    assert "Cannot read" in found.failures["kinds"]
    os.truncate(tmp_path / "csv/items.csv", MOST_TEXT + 1)
    with pytest.raises(TaskError, match=r"items\.csv is larger than 256 MiB, more than a text"):
        opened(tmp_path / "csv", text)


def test_csvs_that_would_lose_or_shift_data_are_refused(tmp_path):
    for number, (lines, message) in enumerate(
        (
            (["file,kind", "0.jpg,mug,1", "1.jpg,plate,2"], "more cells than the header"),
            (["file,kind,kind", "0.jpg,mug,1"], "two columns 'kind'"),
            (["file,kind", "0.jpg,mug\0\0", "1.jpg,plate"], "holds zero bytes"),
            (["file,kind", "0.jpg,0", "1.jpg,-1"], "-1 means that this split has no labels"),
            (["file,kind", "0.jpg,0", "1.jpg,NaN"], "row 2 .*, column kind: NaN is not the number of a class, as"),
            (["file;kind", "0.jpg;0", "1.jpg;1"], "no column file; .* file;kind. Cells are separated by commas"),
            (["file,kind", "0.jpg,0", "1.jpg,1.5"], "1.5 is not the number of a class, as the other labels"),
            (["file,kind", "0.jpg,mug", "1.jpg,plate", "./0.jpg,mug"], "which would count twice"),
            (["file,kind", "0.jpg,mug", "1.jpg,plate", "./0.jpg,plate"], "with different labels"),
            (["file,kind", '0.jpg,"[""dog"",""cat""]"', "1.jpg,dog"], "one per image"),
            (["file,kind", "0.jpg,['dog']", "1.jpg,dog"], "row 1 .* has the labels"),
            (["file,kind,split", "0.jpg,mug,test", "1.jpg,plate,train"], "is of the split 'train', and"),
            (["file,kind, Split", "0.jpg,mug,test", "1.jpg,plate,val"], "is of the split 'val', and"),
            (["file,kind", "0.jpg,0", "1.jpg,20261122"], "is not the number of a class"),
            (["file,kind", '0.jpg,"mug', "1.png,plate"], "row 1 .*: a quote is not closed, .* line '1.png,plate'"),
            (["file,kind", '0.jpg,"mug', '1.png,plate"', "2.webp,mug"], "row 1 .*: a quote is not closed"),
            (["file,kind", "0.jpg,mug", "1.jpg"], "row 2 .* has fewer cells than the header"),
        )
    ):
        text = labelled(tmp_path / str(number), lines)
        with pytest.raises(TaskError, match=message):
            opened(tmp_path / str(number), text)


def test_images_that_would_be_skipped_in_class_folders_are_refused(tmp_path):
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


def test_files_elsewhere_are_read_only_with_consent(tmp_path):
    """Names and links in the data of strangers could have any file of the user's read, and shown in a report."""
    private, root = tmp_path / "private", tmp_path / "suite"
    write_class_folders(private)
    write_csv(root, "kind")
    shutil.copytree(private / "photos", root / "photos")
    one = next((private / "photos/mug").iterdir())
    write_parquet(root / "ds/test.parquet", label=[0, 1])
    (root / "absolute.csv").write_text(f"file,kind\n{one},mug\n")
    (root / "dots.csv").write_text(f"file,kind\n../private/photos/mug/{one.name},mug\n")
    (root / "photos/plate" / one.name).symlink_to(one)
    (root / "linked/mug").parent.mkdir()
    (root / "linked/mug").symlink_to(private / "photos/mug")
    (root / "linked/plate").symlink_to(root / "photos/mug")
    (root / "ds/test.parquet").rename(private / "test.parquet")
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


def test_parquet_of_other_splits_is_refused_and_numbers_may_have_any_form(tmp_path):
    text = "mine: {dataset: ds, label: label}"
    write_parquet(tmp_path / "a/ds/train.parquet", label=[0, 1])
    with pytest.raises(TaskError, match=r"no files of the split test, but of others \(train.parquet\): set split"):
        opened(tmp_path / "a", text)
    write_parquet(tmp_path / "a/ds/test.parquet", label=[0.0, 1.0])
    write_parquet(tmp_path / "a/ds/testimony.parquet", label=[5.0, 6.0])
    assert opened(tmp_path / "a", text).classnames == ("0", "1"), "whole numbers may be stored as floats"
    write_parquet(tmp_path / "b/ds/0000.parquet", label=[0, 1])
    write_parquet(tmp_path / "b/ds/0001.parquet", labels=[0, 1])
    with pytest.raises(TaskError, match=r"0001.parquet has other columns than .*0000.parquet"):
        opened(tmp_path / "b", text)
    write_parquet(tmp_path / "b/ds/0001.parquet", label=["cat", "dog"])
    with pytest.raises(TaskError, match=r"ds cannot be read .*are its parquet files of one data set"):
        opened(tmp_path / "b", text)
    pq.write_table(pq.read_table(tmp_path / "b/ds/0000.parquet").slice(0, 0), tmp_path / "b/ds/0001.parquet")
    with pytest.raises(TaskError, match=r"0001.parquet holds no rows at all"):
        opened(tmp_path / "b", text)
    write_parquet(tmp_path / "a/ds/test.parquet", label=["00", "02"])
    written = labelled(tmp_path / "csv", ["file,kind", "0.webp,10.0", "1.png,9.0"])
    assert opened(tmp_path / "csv", written).labels.tolist() == [10, 9], "in the order of the numbers"
    padded = opened(tmp_path / "a", text)
    assert (padded.labels.tolist(), padded.classnames) == ([0, 2], ("0", "1", "2")), "numbers may begin with zeros"


def test_cells_that_are_no_text_are_not_scored_as_text(tmp_path):
    """Regression test: a column of bytes was scored as numbers (captions) or as "b'cat'" (class names)."""
    maps = pa.array([[("a", 1)]] * 2, pa.map_(pa.string(), pa.int64()))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"caption": [1, 2]}, "row 0 of .* holds 1, which is not text"),
        ({"caption": [[49406, 320], [49406, 530]]}, "holds 49406, which is not text"),
        ({"caption": [{"raw": "a"}, {"raw": "b"}]}, "holds {'raw': 'a'}, which is not text"),
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
    )
    for columns, message in cases:
        write_parquet(tmp_path / "ds/test.parquet", **columns)
        column = next(iter(columns))
        with pytest.raises(TaskError, match=message):
            opened(tmp_path, f"mine: {{dataset: ds, {column}: {column}}}")


def test_bytes_and_decimals_are_read_as_text_and_numbers(tmp_path):
    columns = {"kind": [b"cat", b"dog"], "number": [Decimal("1.00"), Decimal("0.00")]}
    image = pa.array([[body] for _, body in bodies(2)], pa.list_(pa.binary(), 1))
    write_parquet(tmp_path / "ds/test.parquet", caption=[b"one", b"two"], image=image, **columns)
    assert opened(tmp_path, "mine: {dataset: ds, caption: caption}").captions == (("one",), ("two",))
    assert opened(tmp_path, "mine: {dataset: ds, label: kind}").classnames == ("cat", "dog")
    assert opened(tmp_path, "mine: {dataset: ds, label: number}").classnames == ("0", "1")


def test_a_task_with_one_class_has_no_score(tmp_path, model):
    write_class_folders(tmp_path)
    for name in CLASSES[1:]:
        shutil.rmtree(tmp_path / "photos" / name)
    one_task(tmp_path, "mine: {folder: photos}")
    found = scored(model, tmp_path, tmp_path / "out")
    assert "needs at least two" in found.failures["mine"]


def test_a_task_does_not_take_the_place_of_the_summary(tmp_path, model):
    write_class_folders(tmp_path)
    (tmp_path / "tasks.yaml").write_text(
        "Summary: {folder: photos}\nsuite.lock: {folder: photos}\nmine: {folder: photos}"
    )
    for suite in (tmp_path, tmp_path / "tasks.yaml"):
        found = scored(model, suite, tmp_path / "out")
        assert set(found.failures) == {"Summary", "suite.lock"}
        assert "give the task another name" in found.failures["Summary"]
        assert set(json.loads((tmp_path / "out/summary.json").read_text())["scores"]) == {"mine"}
