"""Every layout of evaluation data yields the same data, and suites and their tasks are found."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS
from pipeline.evaluation.datasets.open_tables import find_table
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.datasets.tables import as_list
from pipeline.evaluation.datasets.task_data import TaskError, file_digests
from pipeline.evaluation.datasets.webdataset import open_webdataset
from tests.evaluation_suite import CLEVR as CLEVR_NAMES
from tests.evaluation_suite import (
    association_rows,
    retrieval_rows,
    write_association,
    write_cache,
    write_classification,
    write_retrieval,
)

FMOW, CLEVR = TASKS["wilds/fmow"], TASKS["vtab/clevr_closest_object_distance"]
FLICKR = TASKS["retrieval/flickr_1k_test_image_text_retrieval"]
WINOGAVIL = TASKS["misc/winogavil"]


@pytest.mark.parametrize("layout", ["webdataset", "save_to_disk", "parquet"])
def test_retrieval_is_the_same_in_every_layout(tmp_path, layout):
    write_retrieval(tmp_path, FLICKR, layout=layout)
    suite = open_suite(tmp_path)
    assert [entry.task.key for entry in suite.entries] == [FLICKR.key]
    data = open_task(suite.entries[0])
    rows = retrieval_rows(FLICKR)
    assert data.layout == layout
    assert data.captions == tuple(tuple(row["caption"]) for row in rows)
    assert [data.images.read(k) for k in range(len(data.images))] == [row["image"] for row in rows]


@pytest.mark.parametrize("layout", ["save_to_disk", "parquet", "csv+zip", "cache", "embedded cache"])
def test_winogavil_is_the_same_in_every_layout_and_images_are_read_once(tmp_path, layout):
    """`hf_cache/nlphuji___winogavil/.../winogavil-test.arrow` is read even after the whole folder was moved."""
    if "cache" in layout:
        write_cache(tmp_path / "there", embedded=layout != "cache")
    else:
        write_association(tmp_path / "there", layout=layout)
    shutil.move(tmp_path / "there", tmp_path / "here")
    data = open_task(open_suite(tmp_path / "here").entries[0])
    rows = association_rows()
    assert [instance.cue for instance in data.instances] == [row["cue"] for row in rows]
    assert "null" in [instance.cue for instance in data.instances]  # a cue, not a missing value
    for instance, row in zip(data.instances, rows, strict=True):
        assert [data.images.read(k) for k in instance.candidates] == [body for _, body in row["candidate_images"]]
        assert list(instance.associated) == [name in row["associations"] for name in row["candidates"]]
    assert len(data.images) == len({body for row in rows for _, body in row["candidate_images"]})
    assert data.samples == len(rows)
    digests = file_digests(data.files, data.folder)
    assert any(name.endswith("thing1.jpg") for name in digests) == (layout == "cache"), "images outside of the table"


def test_a_blank_class_is_kept_or_dropped(tmp_path):
    folder = write_classification(tmp_path, CLEVR)
    names = folder / "classnames.txt"
    names.write_bytes(b"\xef\xbb\xbf" + names.read_bytes())  # a byte order mark is not part of the first name
    kept, dropped = open_webdataset(folder, CLEVR), open_webdataset(folder, CLEVR, blank_class="drop")
    assert kept.classnames == CLEVR_NAMES
    assert dropped.classnames == tuple(filter(None, CLEVR_NAMES))


def test_extra_metadata_column_is_allowed_and_a_missing_one_is_refused(tmp_path):
    folder = write_classification(tmp_path, FMOW)
    assert open_task(Entry(FMOW, folder)).metadata.shape == (22, 4)
    with pytest.raises(TaskError, match="needs 5 columns"):
        open_webdataset(folder, replace(FMOW, fields=(*FMOW.fields, "a", "b")))


def test_official_suite_has_38_tasks_with_expected_counts(tmp_path):
    write_classification(tmp_path / "datacomp", TASKS["cifar10"])
    suite = open_suite("datacomp", data=tmp_path)
    assert len(suite.entries) == 38
    cifar, mnist = (next(e for e in suite.entries if e.task.key == key) for key in ("cifar10", "mnist"))
    with pytest.raises(TaskError, match="has 22 samples, but 10,000 are expected"):
        open_task(cifar)
    with pytest.raises(TaskError, match="no data for mnist: no folder such as wds_mnist_test exists"):
        open_task(mnist)


def test_suites_are_found_and_mistakes_are_reported(tmp_path):
    (tmp_path / "empty").mkdir()
    own = write_classification(tmp_path, TASKS["cifar10"])
    shutil.move(own, tmp_path / "wds_my-own_test")
    write_association(tmp_path / "misc", layout="csv+zip")
    suite = open_suite(tmp_path)
    assert {entry.task.key for entry in suite.entries} == {"my-own", "misc/winogavil"}
    assert suite.only(["misc-winogavil"]).entries[0].task == WINOGAVIL
    with pytest.raises(UserError, match="The nearest is my-own"):
        suite.only(["my-onw"])
    with pytest.raises(UserError, match="no suite 'nowhere'"):
        open_suite("nowhere")
    with pytest.raises(UserError, match="holds no evaluation task"):
        open_suite(tmp_path / "empty")


def test_lists_are_read_in_every_stored_form():
    for text in ('["a", "b c"]', "['a', 'b c']", ["a", "b c"], np.array(["a", "b c"])):
        assert as_list(text, where="row 1") == ["a", "b c"]
    assert as_list("[new] mug", where="row 1") == ["[new] mug"]


def test_folders_are_found_under_common_names(tmp_path):
    made, names = write_association(tmp_path / "made", layout="parquet"), ("misc/winogavil", "misc-winogavil")
    for name in (*names, "winogavil", "wds_misc-winogavil_test", "nlphuji___winogavil", "a/winogavil"):
        shutil.copytree(made, tmp_path / "suite" / name)
        assert [entry.task.key for entry in open_suite(tmp_path / "suite").entries] == ["misc/winogavil"]
        shutil.rmtree(tmp_path / "suite")


def test_a_memory_mapped_table_that_is_overwritten_is_refused(tmp_path):
    """Regression test: the process ended with a segmentation fault."""
    folder = write_retrieval(tmp_path, FLICKR, layout="save_to_disk")
    data, table = open_task(Entry(FLICKR, folder)), find_table(folder)
    arrow = next(folder.glob("*.arrow"))
    with arrow.open("r+b") as file:
        file.write(b"\x7f" * arrow.stat().st_size)
    for read in (lambda: data.images.read(3), lambda: [*table.values("caption")], lambda: [*table.values("image")]):
        with pytest.raises(TaskError, match=r"\.arrow is damaged .*fetch the data set again"):
            read()
