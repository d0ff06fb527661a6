"""A damaged task gets no score, other tasks keep theirs, and no aggregate is averaged over fewer tasks.

The damages are in `tests/evaluation_damage.py`.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from jobs.evaluate import command
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import AGGREGATES, TASKS
from pipeline.evaluation.datasets.suite import Entry, open_suite, open_task
from pipeline.evaluation.datasets.task_data import TaskError, check_digests, decode
from pipeline.evaluation.protocol import PROTOCOLS
from tests.checkpoints import save_checkpoint
from tests.evaluation_damage import (
    BREAKS,
    COCO,
    FLICKR,
    FMOW,
    FOLDERS,
    LOCKED,
    V2,
    WINOGAVIL,
    edit_rows,
    edit_tar,
    join_tars,
    without_image,
)
from tests.evaluation_suite import SAMPLES, write_association, write_cache, write_classification, write_retrieval


class Whole(NamedTuple):
    """The undamaged suite, its results and their tasks."""

    checkpoint: Path
    suite: Path
    results: Path
    keys: set[str]


def evaluate(checkpoint, suite, output):
    arguments = [str(checkpoint), "--suite", str(suite), "--output", str(output), "--device", "cpu"]
    return CliRunner().invoke(command, [*arguments, "workers=0", "micro_batch=16"], standalone_mode=False)


def write_tasks(root, *, flickr="parquet", coco="webdataset", samples=SAMPLES):
    """Write the tasks that are damaged."""
    for key in (V2, FMOW):
        write_classification(root, TASKS[key], samples=samples)
    write_retrieval(root, TASKS[FLICKR], layout=flickr, samples=samples)
    write_retrieval(root, TASKS[COCO], layout=coco, samples=samples)
    write_association(root, layout="csv+zip")
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Every aggregate of the damaged tasks is complete, except the average of all 38."""
    root = tmp_path_factory.mktemp("whole")
    checkpoint, suite, results = save_checkpoint(root / "step-00000001", 0), root / "suite", root / "results"
    for key in AGGREGATES["ImageNet & Variants"]:
        write_classification(suite, TASKS[key], samples=4)
    write_tasks(suite)
    done = evaluate(checkpoint, suite, results)
    assert done.return_value == 0, done.output
    summary = json.loads((results / "summary.json").read_text())
    complete = [name for name, mean in summary["aggregates"].items() if mean["complete"]]
    assert complete == ["ImageNet & Variants", "Retrieval", "Retrieval (DataComp)", "ImageNet dist. shifts"]
    assert set(FOLDERS) <= set(summary["scores"])
    return Whole(checkpoint, suite, results, set(summary["scores"]))


def test_damage_is_refused_when_a_task_is_opened(tmp_path):
    whole = write_tasks(tmp_path / "whole")
    for number, (key, damage, message) in enumerate(BREAKS):
        folder = tmp_path / str(number)
        shutil.copytree(whole / FOLDERS[key], folder)
        damage(folder)
        with pytest.raises(TaskError, match=message):
            PROTOCOLS[TASKS[key].protocol](TASKS[key], open_task(Entry(TASKS[key], folder)))


def test_pages_and_row_groups_of_parquet_that_are_not_what_is_stated_are_refused(tmp_path):
    """Regression test: images of later row groups would have been those of other rows."""
    task, column = TASKS[FLICKR], pa.array([{"bytes": bytes([k]) * 100, "path": None} for k in range(8)])
    table = pa.table({"image": column, "caption": [f"caption {k}" for k in range(8)]})
    path, plain = tmp_path / "test.parquet", {"compression": "none", "use_dictionary": False}
    pq.write_table(table, path, write_page_checksum=True, **plain)
    assert open_task(Entry(task, tmp_path)).samples == 8
    path.write_bytes(path.read_bytes().replace(b"caption 5", b"caption 6", 1))
    with pytest.raises(TaskError, match=r"test\.parquet is damaged .*CRC"):
        open_task(Entry(task, tmp_path))
    pq.write_table(table, path)
    body = path.read_bytes()
    for place in (place for place, byte in enumerate(body) if byte == 2 * 8):  # as numbers are written in the footer
        path.write_bytes(body[:place] + bytes([2 * 9]) + body[place + 1 :])
        with suppress(Exception):
            if pq.read_metadata(path).row_group(0).num_rows == 9:
                break
    with pytest.raises(TaskError, match="8 of the 9 rows of row group 0 can be read"):
        open_task(Entry(task, tmp_path))


def check_scores(done, results, broken, keys):
    """The broken tasks have no score, the others keep theirs, and no aggregate over the broken ones is complete."""
    assert (done.exception, done.return_value) == (None, 1)
    summary = json.loads((results / "summary.json").read_text())
    assert set(summary["failures"]) == broken
    assert set(summary["scores"]) == keys - broken
    for path in (results / f"{TASKS[key].stem}.json" for key in broken):
        assert not path.exists()
        assert path.with_suffix(".json.stale").exists(), "renamed, not deleted"
    over_them = [mean for name, mean in summary["aggregates"].items() if broken & set(AGGREGATES[name])]
    assert over_them
    assert not any(mean["complete"] or mean["score"] is not None for mean in over_them)


def test_damaged_tasks_are_not_scored_and_failures_are_bit_identical(whole, tmp_path):
    """Stale scores are there: those of the whole suite. Images are decoded last."""
    suite, seen = tmp_path / "suite", []
    shutil.copytree(whole.suite, suite)
    join_tars(suite / FOLDERS[V2])
    without_image(suite / FOLDERS[WINOGAVIL])
    edit_tar(suite / FOLDERS[FMOW], {"s0000003.npy": bytes(99)})
    edit_rows(suite / FOLDERS[FLICKR], lambda rows: rows[3].update(caption=[]))
    edit_tar(suite / FOLDERS[COCO], {"s0000002.txt": b"one\n\nlast"})
    with zipfile.ZipFile(suite / "winogavil/images.zip", "a") as archive:
        archive.writestr("images/x.jpg", b"no image")
    for number in range(2):
        results = tmp_path / str(number)
        shutil.copytree(whole.results, results)
        (results / "suite.lock.json").unlink()
        check_scores(evaluate(whole.checkpoint, suite, results), results, set(FOLDERS), whole.keys)
        seen.append((results / "summary.json").read_bytes())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("number", range(len(LOCKED)))
def test_data_other_than_the_locks_is_not_scored(number, whole, tmp_path):
    key, damage, message = LOCKED[number]
    suite, results = tmp_path / "suite", tmp_path / "results"
    shutil.copytree(whole.suite, suite)
    shutil.copytree(whole.results, results)
    damage(suite / FOLDERS[key])
    done = evaluate(whole.checkpoint, suite, results)
    check_scores(done, results, {key}, whole.keys)
    assert re.search(message, done.output)


def test_data_is_checked_against_what_was_recorded_with_the_suite_or_when_it_was_fetched(tmp_path):
    folder = write_classification(tmp_path, TASKS["cifar10"])
    digest = hashlib.sha256((folder / "test/0.tar").read_bytes()).hexdigest()
    facts = {"samples": 22, "classes": 6, "sha256": {"test/0.tar": digest}}
    suite_json = tmp_path / "suite.json"
    suite_json.write_text(json.dumps({"tasks": {"cifar10": facts}}))
    entry = open_suite(tmp_path).entries[0]
    assert open_task(entry).samples == 22
    check_digests("cifar10", {"test/0.tar": digest}, entry.expected["sha256"], folder=folder)
    with pytest.raises(TaskError, match=r"another SHA-256 .* \(test/0\.tar\)"):
        check_digests("cifar10", {"test/0.tar": "0" * 64}, entry.expected["sha256"], folder=folder)
    for wrong, message in (({"samples": 23}, "has 22 samples, but 23"), ({"classes": 7}, "has 6 classes, but 7")):
        suite_json.write_text(json.dumps({"tasks": {"cifar10": {**facts, **wrong}}}))
        with pytest.raises(TaskError, match=message):
            open_task(open_suite(tmp_path).entries[0])
    suite_json.write_text(json.dumps({"tasks": {"cifar10": facts, "mnist": {"samples": 3}}}))
    missing = next(entry for entry in open_suite(tmp_path).entries if entry.task.key == "mnist")
    with pytest.raises(TaskError, match="no data for mnist"):
        open_task(missing)
    for wrong in ('{"sampels": 4}', '{"samples": "4"}', '{"sha256": null}', '{"sha256": ["x"]}', "{"):
        suite_json.write_text(f'{{"tasks": {{"cifar10": {wrong}}}}}')
        with pytest.raises(UserError, match=r"suite.json is damaged"):
            open_suite(tmp_path)
    suite_json.unlink()
    fetched = {"repo": "r", "commit": "c", "samples": 21, "files": {"test/0.tar": {"bytes": 1, "sha256": digest}}}
    (tmp_path / "evalsets.json").write_text(json.dumps({"cifar10": fetched}))
    entry = open_suite(tmp_path).entries[0]
    assert entry.expected == {"samples": 21, "sha256": {"test/0.tar": digest}}
    with pytest.raises(TaskError, match="has 22 samples, but 21 are expected"):
        open_task(entry)


def test_partial_or_ambiguous_cache_is_refused(tmp_path):
    version = write_cache(tmp_path)
    info = json.loads((version / "dataset_info.json").read_text())
    info["splits"]["test"]["num_examples"] = 12
    (version / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(TaskError, match=r"has 9 rows, but its dataset_info\.json says .*12"):
        open_task(open_suite(tmp_path).entries[0])
    write_cache(tmp_path, digest="cd34")
    with pytest.raises(TaskError, match="must hold one finished data set, but holds 2"):
        open_task(open_suite(tmp_path).entries[0])
    shutil.rmtree(version)
    next((tmp_path / "hf_cache/downloads").rglob("thing1.jpg")).unlink()
    with pytest.raises(TaskError, match=r"Cannot read .*thing1\.jpg"):
        open_task(open_suite(tmp_path).entries[0])


def mutated(body, rng):
    """Overwrite, zero, flip, cut, repeat or remove a part."""
    start = rng.randrange(max(1, len(body)))
    end = min(len(body), start + rng.choice((1, 2, 8, 64, 512, 4096)))
    before, part, after = body[:start], body[start:end], body[end:]
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in part[:1])
    changes = (rng.randbytes(len(part)) + after, bytes(len(part)) + after, flipped + part[1:] + after)
    return before + rng.choice((*changes, b"", part + body[start:], after))


def read_all(suite):
    """What every task holds after reading all of it, or its error."""
    contents: dict[str, object] = {}
    for entry in open_suite(suite).entries:
        try:
            data = open_task(entry)
            PROTOCOLS[entry.task.protocol](entry.task, data)
            for index in range(len(data.images)):
                decode(data.images.read(index), name=data.images.name(index))
            # A changed pixel can make two of WinoGAViL's images of one, so images are not counted.
            contents[entry.task.key] = {what: count for what, count in data.counts.items() if what != "images"}
        except UserError as error:
            contents[entry.task.key] = str(error)
    return contents


@pytest.mark.filterwarnings("ignore")
def test_random_damage_raises_only_documented_errors_and_loses_no_sample(tmp_path):
    suite, rounds, rng = write_tasks(tmp_path, flickr="save_to_disk", coco="parquet", samples=6), 100, random.Random(5)
    whole, refused = read_all(suite), 0
    assert all(isinstance(counts, dict) for counts in whole.values()), whole
    files = sorted(path for path in suite.rglob("*") if path.is_file())
    for number in range(rounds):
        path = files[number % len(files)]
        body = path.read_bytes()
        path.write_bytes(mutated(body, rng))
        try:
            found = read_all(suite)
        except UserError:
            found = {}
        path.write_bytes(body)
        refused += any(isinstance(value, str) for value in found.values())
        partial = {key: value for key, value in found.items() if isinstance(value, dict) and value != whole[key]}
        assert not partial or path.suffix in (".csv", ".txt", ".json"), (number, path, partial)
    assert refused > rounds // 4
