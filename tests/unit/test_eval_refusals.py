"""Missing, truncated, damaged or inconsistent evaluation data is refused and named."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS, Task
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.datasets.task_data import TaskError, check_digests, decode, file_digests
from pipeline.evaluation.datasets.webdataset import open_webdataset, read_members
from pipeline.evaluation.protocols.classification import ZeroShot
from tests.evaluation_suite import (
    image_bytes,
    write_association,
    write_cache,
    write_classification,
    write_retrieval,
    write_tars,
)
from tests.shards import write_members

FMOW = TASKS["wilds/fmow"]
FLICKR = TASKS["retrieval/flickr_1k_test_image_text_retrieval"]
WINOGAVIL = TASKS["misc/winogavil"]


def compare(entry: Entry, files: dict[str, str]) -> None:
    """Compare digests with those that were recorded with the suite's data."""
    check_digests(entry.task.key, files, entry.expected["sha256"], folder=entry.folder, written="was recorded")


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def end_of_second_sample(path: Path) -> int:
    with tarfile.open(path) as tar:
        return tar.getmembers()[6].offset  # three members per sample


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard is missing": (lambda f: (f / "test/1.tar").unlink(), r"1 of 2 shards are missing \(1.tar\)"),
    "nshards.txt is missing": (lambda f: (f / "test/nshards.txt").unlink(), "Cannot read .*nshards.txt"),
    "a shard is cut within a header": (lambda f: cut(f / "test/1.tar", 1_300), "1.tar .* cut short"),
    "a shard is cut within an image": (lambda f: cut(f / "test/1.tar", 1_600), "1.tar .* cut short"),
    "a shard is cut between members": (
        lambda f: cut(f / "test/1.tar", end_of_second_sample(f / "test/1.tar")),
        "1.tar has no end-of-archive mark",
    ),
    "a shard is empty": (lambda f: (f / "test/0.tar").write_bytes(b""), "0.tar is damaged or cut short"),
    "class names are missing": (lambda f: (f / "classnames.txt").unlink(), "Cannot read .*classnames.txt"),
    "class names in UTF-16": (
        lambda f: (f / "classnames.txt").write_text("one\ntwo\n", encoding="utf-16"),
        "classnames.txt is not UTF-8, .*iconv",
    ),
    "too few class names": (
        lambda f: (f / "classnames.txt").write_text("one\ntwo\n"),
        "labels run from 0 to 4, but there are 2 class names",
    ),
    "no place in a template": (
        lambda f: (f / "zeroshot_classification_templates.txt").write_text("a photo\n"),
        "needs the place of",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_classification_data_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_classification(tmp_path, FMOW)
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(TaskError, match=message):
        ZeroShot(FMOW, open_task(Entry(FMOW, folder)))


def test_samples_with_a_missing_member_are_reported(tmp_path: Path) -> None:
    suffix, body = image_bytes(np.random.default_rng(0), 1)
    whole = [("cls", b"0"), (suffix, body), ("npy", b"")]
    cases = {"has no image": whole[:1], "has no .cls": whole[1:], "has no .npy": whole[:2]}
    for number, (message, members) in enumerate(cases.items()):
        folder = write_classification(tmp_path / str(number), FMOW)
        write_tars(folder / "test", [members], shards=1)
        with pytest.raises(TaskError, match=f"s0000000 in .*0.tar {message}"):
            open_task(Entry(FMOW, folder))


def test_sample_with_non_adjacent_members_is_refused(tmp_path: Path) -> None:
    folder = write_classification(tmp_path, TASKS["cifar10"])
    write_members(folder / "test/0.tar", [(name, b"") for name in ("a.cls", "b.cls", "a.png")])
    with pytest.raises(TaskError, match="holds sample a twice"):
        open_webdataset(folder)


def test_corrupt_images_are_reported() -> None:
    _, body = image_bytes(np.random.default_rng(0), 1)
    for blob in (body[: len(body) // 2], b"<html>", b""):
        with pytest.raises(TaskError, match=r"Corrupt image s7 in 3\.tar"):
            decode(blob, name="s7 in 3.tar")


def test_damaged_tables_are_refused(tmp_path: Path) -> None:
    folder = write_retrieval(tmp_path / "a", FLICKR, layout="parquet")
    cut(next(folder.rglob("*.parquet")), 200)
    with pytest.raises(TaskError, match="not a complete parquet file"):
        open_task(Entry(FLICKR, folder))
    folder = write_retrieval(tmp_path / "b", FLICKR, layout="save_to_disk")
    next(folder.glob("*.arrow")).unlink()
    with pytest.raises(TaskError, match="cannot be loaded from disk"):
        open_task(Entry(FLICKR, folder))
    folder = write_association(tmp_path / "c", layout="csv+zip")
    cut(folder / "images.zip", 3_000)
    with pytest.raises(TaskError, match=r"images.zip is damaged or cut short"):
        open_task(Entry(WINOGAVIL, folder))
    folder = write_association(tmp_path / "d", layout="csv+zip")
    names = "[" + ", ".join(f'""missing{k}""' for k in range(5)) + "]"
    (folder / "test.csv").write_text(f'cue,candidates,associations\nx,"{names}","[""missing0""]"\n')
    with pytest.raises(TaskError, match=r"'missing0' .* in none of its archives"):
        open_task(Entry(WINOGAVIL, folder))
    folder = write_retrieval(tmp_path / "e", FLICKR, layout="csv+zip")
    (folder / "test.csv").write_text("image_name,text\nx,y\n")
    with pytest.raises(TaskError, match="exactly one CSV with the columns image or filename, caption"):
        open_task(Entry(FLICKR, folder))


def test_data_is_checked_against_counts_and_digests_of_the_suite(tmp_path: Path) -> None:
    folder = write_classification(tmp_path, TASKS["cifar10"])
    digest = hashlib.sha256((folder / "test/0.tar").read_bytes()).hexdigest()
    facts = {"samples": 22, "classes": 6, "sha256": {"test/0.tar": digest}}
    suite_json = tmp_path / "suite.json"
    suite_json.write_text(json.dumps({"tasks": {"cifar10": facts}}))
    entry = open_suite(tmp_path).entries[0]
    assert open_task(entry).samples == 22
    compare(entry, {"test/0.tar": digest})
    with pytest.raises(TaskError, match="another SHA-256"):
        compare(entry, {"test/0.tar": "0" * 64})
    for wrong, message in (({"samples": 23}, "has 22 samples, but 23"), ({"classes": 7}, "has 6 classes, but 7")):
        suite_json.write_text(json.dumps({"tasks": {"cifar10": {**facts, **wrong}}}))
        with pytest.raises(TaskError, match=message):
            open_task(open_suite(tmp_path).entries[0])
    suite_json.write_text(json.dumps({"tasks": {"cifar10": facts, "mnist": {"samples": 3}}}))
    missing = next(entry for entry in open_suite(tmp_path).entries if entry.task.key == "mnist")
    with pytest.raises(TaskError, match="no data for mnist"):
        open_task(missing)
    suite_json.write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        open_suite(tmp_path)


def test_non_numeric_labels_are_reported(tmp_path: Path) -> None:
    suffix, body = image_bytes(np.random.default_rng(0), 1)
    folder = write_classification(tmp_path, TASKS["cifar10"])
    write_tars(folder / "test", [[("cls", b"cat"), (suffix, body)]], shards=1)
    with pytest.raises(TaskError, match="holds b'cat', not a class number"):
        open_task(Entry(Task("cifar10", "x"), folder))


def test_data_is_checked_against_the_record_of_the_fetch(tmp_path: Path) -> None:
    """The record is `evalsets.json`, as written when the evaluation sets are fetched."""
    folder = write_classification(tmp_path, TASKS["cifar10"])
    names = ("test/0.tar", "test/1.tar", "classnames.txt")
    files = {name: {"bytes": 1, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()} for name in names}
    lock = {"cifar10": {"repo": "r", "commit": "c", "samples": 22, "files": files}}
    (tmp_path / "evalsets.json").write_text(json.dumps(lock))
    entry = open_suite(tmp_path).entries[0]
    data = open_task(entry)
    found = file_digests(data.files, data.folder)
    compare(entry, found)
    with pytest.raises(TaskError, match=r"another SHA-256 .* \(classnames\.txt\)"):
        compare(entry, {**found, "classnames.txt": "0" * 64})
    lock["cifar10"]["samples"] = 21
    (tmp_path / "evalsets.json").write_text(json.dumps(lock))
    with pytest.raises(TaskError, match="has 22 samples, but 21 are expected"):
        open_task(open_suite(tmp_path).entries[0])


def test_partial_or_ambiguous_cache_is_refused(tmp_path: Path) -> None:
    version = write_cache(tmp_path)
    info = json.loads((version / "dataset_info.json").read_text())
    info["splits"]["test"]["num_examples"] = 12
    (version / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(TaskError, match=r"has 9 rows, but its dataset_info\.json says 12"):
        open_task(open_suite(tmp_path).entries[0])
    write_cache(tmp_path, digest="cd34")
    with pytest.raises(TaskError, match="must hold one finished data set, but holds 2"):
        open_task(open_suite(tmp_path).entries[0])
    shutil.rmtree(version)
    next((tmp_path / "hf_cache/downloads").rglob("thing1.jpg")).unlink()
    with pytest.raises(TaskError, match=r"Cannot read .*thing1\.jpg"):
        open_task(open_suite(tmp_path).entries[0])


def test_candidate_counts_of_winogavil_are_checked(tmp_path: Path) -> None:
    folder = write_association(tmp_path, layout="csv+zip")
    text = (folder / "test.csv").read_text().splitlines()
    stated = [f"{line},{10 if number else 'num_candidates'}" for number, line in enumerate(text)]
    (folder / "test.csv").write_text("\n".join(stated))
    with pytest.raises(TaskError, match=r"row 1 of .*test\.csv has 5 candidates, but its num_candidates says 10"):
        open_task(Entry(WINOGAVIL, folder))


def test_parts_of_two_versions_are_refused(tmp_path: Path) -> None:
    folder = write_retrieval(tmp_path, FLICKR, layout="parquet")
    part = folder / "data/test-00001-of-00002.parquet"
    part.rename(folder / "data/test-00001-of-00003.parquet")
    with pytest.raises(TaskError, match="of different versions"):
        open_task(Entry(FLICKR, folder))
    (folder / "data/test-00001-of-00003.parquet").rename(folder / "data/0002.parquet")
    (folder / "data/test-00000-of-00002.parquet").rename(folder / "data/0000.parquet")
    with pytest.raises(TaskError, match="the numbered parts 1 are missing"):
        open_task(Entry(FLICKR, folder))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_truncated_or_zeroed_tars_are_detected(seed: int) -> None:
    """A tar that is truncated or partly overwritten anywhere yields all its members or is refused."""
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    bodies = [rng.integers(0, 256 if rng.random() < 0.5 else 1, rng.integers(0, 2000)).astype("u1") for _ in range(12)]
    write_members(buffer, ((f"s{number}.bin", body.tobytes()) for number, body in enumerate(bodies)))
    whole = buffer.getvalue()
    end = whole.rstrip(b"\0") and len(whole)
    if rng.random() < 0.5:
        damaged = whole[: int(rng.integers(0, end))]
    else:
        start = int(rng.integers(0, end // 512)) * 512
        damaged = whole[:start] + bytes(min(2048, len(whole) - start)) + whole[start + 2048 :]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "0.tar"
        path.write_bytes(damaged)
        try:
            found = list(read_members(path))
        except TaskError:
            return
        if len(found) < len(bodies):
            # Zeros from a header to the very end of the file look like the end of a shorter archive.
            assert not any(damaged[found[-1].offset_data + found[-1].size :] if found else damaged)


def test_keys_that_map_to_the_same_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text("a/b: {csv: x.csv, label: y}\na--b: {csv: x.csv, label: y}\n")
    with pytest.raises(TaskError, match="would write their results to the same file"):
        open_task(open_suite(tmp_path).entries[0])
    assert (Task("scenes/count", "").stem, Task("scenes-count", "").stem) == ("scenes--count", "scenes-count")


def test_links_in_a_tar_and_impossible_records_are_refused(tmp_path: Path) -> None:
    folder = write_classification(tmp_path, TASKS["cifar10"], samples=4)
    entry = open_suite(tmp_path).entries[0]
    shard = folder / "test/0.tar"
    whole = shard.read_bytes()
    with tarfile.open(shard, "a") as tar:
        for suffix in ("cls", "jpg"):  # a whole sample of links would be invisible
            link = tarfile.TarInfo(f"s0000009.{suffix}")
            link.type, link.linkname = tarfile.LNKTYPE, f"s0000001.{suffix}"
            tar.addfile(link)
    with pytest.raises(TaskError, match=r"s0000009.cls is a link or a sparse file"):
        open_task(entry)
    shard.write_bytes(whole)
    (folder / "test/nshards.txt").write_text("99999999999\n")
    with pytest.raises(TaskError, match="says 99,999,999,999 shards, but there are 2 tars"):
        open_task(entry)
    (folder / "test/nshards.txt").write_text("2\n")
    names = folder / "classnames.txt"
    plain = open_task(entry).classnames
    names.write_bytes(b"\xef\xbb\xbf" + names.read_bytes())
    assert open_task(entry).classnames == plain, "a byte order mark is not part of the first name"
    for facts in ('{"sampels": 4}', '{"samples": "4"}', '{"sha256": null}', '{"sha256": ["x"]}'):
        (tmp_path / "suite.json").write_text(f'{{"tasks": {{"cifar10": {facts}}}}}')
        with pytest.raises(UserError, match=r"suite.json is damaged .*allowed are samples"):
            open_suite(tmp_path)
