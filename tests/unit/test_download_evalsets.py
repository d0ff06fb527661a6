"""Evaluation sets are fetched completely or reported as failed; a local server stands in for the hub."""

import hashlib
import io
import json
import zipfile
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from data_prep import evaluation_sets
from data_prep.evaluation_sets import HUB_SETS, HubSet, fetch_evalsets
from jobs.evalsets import command
from pipeline.errors import UserError
from pipeline.evaluation.datasets.datacomp import TASKS, Task
from tests.evaluation_suite import write_classification
from tests.hub import COMMIT, Hub, use_hub
from tests.shards import write_members
from tests.web import serve

TINY = {
    "cifar10": HubSet(Task("cifar10", "CIFAR-10", samples=5, classes=2), "djghosh/wds_cifar10_test"),
    "retrieval/flickr": HubSet(
        Task("retrieval/flickr", "Flickr", protocol="retrieval", samples=3),
        "nlphuji/flickr",
        patterns=("*.parquet",),
        revision="refs/convert/parquet",
    ),
    "misc/winogavil": HubSet(
        Task("misc/winogavil", "WinoGAViL", protocol="association", samples=2),
        "nlphuji/winogavil",
        patterns=("*.csv", "*.zip"),
    ),
}


def tar_of(samples):
    buffer = io.BytesIO()
    bodies = {"cls": b"1", "webp": b"RIFF" + bytes(400)}
    write_members(buffer, ((f"s{k:07d}.{suffix}", body) for k in samples for suffix, body in bodies.items()))
    return buffer.getvalue()


def parquet_of(rows):
    columns = {"image": [{"bytes": b"RIFF%d" % k} for k in range(rows)], "caption": [["a", "b"]] * rows}
    pq.write_table(pa.table(columns), buffer := io.BytesIO())
    return buffer.getvalue()


def zip_of(*names):
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(f"images/{name}.jpg", name)
    return buffer.getvalue()


INSTANCES = b"""cue,candidates,associations
a,"[""x"", ""y"", ""z"", ""v"", ""w""]","[""x""]"
b,"[""y"", ""x"", ""z"", ""v"", ""w""]","[""x"", ""y""]"
"""
FILES = {
    "djghosh/wds_cifar10_test": {
        "README.md": b"not wanted",
        "classnames.txt": b"cat\n\n",
        "zeroshot_classification_templates.txt": b"a {c}\n",
        "test/nshards.txt": b"2\n",
        "test/0.tar": tar_of(range(3)),
        "test/1.tar": tar_of(range(3, 5)),
    },
    "nlphuji/flickr": {"TEST/test/0000.parquet": parquet_of(3)},
    "nlphuji/winogavil": {"winogavil_dataset.csv": INSTANCES, "images.zip": zip_of(*"xyzvw")},
}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(evaluation_sets, "HUB_SETS", TINY)
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    with serve() as site:
        use_hub(monkeypatch, site.base)
        yield Hub(site, FILES)


def test_sets_come_from_the_hub_verified_and_pinned(hub, tmp_path):
    samples, problems = fetch_evalsets(tmp_path)
    assert problems == {}
    assert samples == {"cifar10": 5, "retrieval/flickr": 3, "misc/winogavil": 2}
    lock = json.loads((tmp_path / "evalsets.json").read_text())
    assert lock["cifar10"]["commit"] == COMMIT
    assert lock["cifar10"]["files"]["test/0.tar"]["sha256"] == hashlib.sha256(tar_of(range(3))).hexdigest()
    assert "README.md" not in lock["cifar10"]["files"]
    result = CliRunner().invoke(command, [str(tmp_path), "--check"], standalone_mode=False)
    assert (result.return_value, "3 sets verified, 10 samples; 0 not usable" in result.output) == (0, True)

    damaged = tmp_path / "wds_cifar10_test/test/1.tar"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert "test/1.tar differ" in fetch_evalsets(tmp_path, offline=True)[1]["cifar10"]
    hub.asked.clear()
    assert fetch_evalsets(tmp_path)[1] == {}
    assert hub.downloads() == ["test/1.tar"], "only the damaged file is fetched again"
    assert not any("/revision/" in path for path in hub.asked), "the commit of the first download is kept"
    assert fetch_evalsets(tmp_path, offline=True)[1] == {}


def test_a_damaged_record_is_named(hub, tmp_path):
    """Regression test: it was reported as a fault of the program."""
    for text in ("{", "[1]", '{"cifar10": 3}', '{"cifar10": {"files": {}}}', '{"cifar10": null}', "\0"):
        (tmp_path / "evalsets.json").write_text(text)
        with pytest.raises(UserError, match=r"evalsets\.json is damaged .* run `neuclip evalsets"):
            fetch_evalsets(tmp_path)


def test_sets_that_another_process_fetches_meanwhile_stay_recorded(hub, tmp_path):
    other = ("misc/winogavil",)

    def start_another(note):
        if note.startswith("cifar10"):
            fetch_evalsets(tmp_path, other)

    fetch_evalsets(tmp_path, ("cifar10", "retrieval/flickr"), on_note=start_another)
    assert set(json.loads((tmp_path / "evalsets.json").read_text())) == set(TINY)
    assert fetch_evalsets(tmp_path, offline=True)[1] == {}


def test_wrong_bytes_missing_shards_and_missing_sets_are_reported(hub, tmp_path):
    repo, noted = "djghosh/wds_cifar10_test", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        use_hub(patch, "http://127.0.0.1:9")
        _, problems = fetch_evalsets(tmp_path, on_note=noted.append)
    assert set(problems) == set(TINY)
    assert all("cannot be fetched: " in problem for problem in problems.values())
    assert len(noted) == len(TINY)
    hub.files[repo]["test/0.tar"] = tar_of(range(1, 4))
    hub.stated["nlphuji/flickr"] = hub.files["nlphuji/flickr"] = {"TEST/test/0000.parquet": parquet_of(2)}
    del hub.files["nlphuji/winogavil"]
    samples, problems = fetch_evalsets(tmp_path)
    assert samples == {}
    assert f"test/0.tar of {repo} arrived with a wrong digest" in problems["cifar10"]
    assert "has 2 samples, but 3 are expected" in problems["retrieval/flickr"]
    assert "nlphuji/winogavil cannot be fetched" in problems["misc/winogavil"]
    hub.files[repo] = hub.stated[repo] = {**FILES[repo], "classnames.txt": b"cat\n"}
    _, problems = fetch_evalsets(tmp_path / "other", ["cifar10"])
    assert "has 1 classes, but 2 are expected" in problems["cifar10"]


def test_every_task_has_a_hub_repository_and_unknown_names_are_refused(tmp_path):
    assert tuple(HUB_SETS) == tuple(TASKS)
    assert len({hub_set.repo for hub_set in HUB_SETS.values()}) == 38
    with pytest.raises(UserError, match="The nearest is vtab/pets"):
        fetch_evalsets(tmp_path, ["vtab/pet"])


def test_locking_a_custom_suite(tmp_path):
    """`--lock` records the data of a suite; data that was recorded before must be unchanged."""
    folder = write_classification(tmp_path, replace(TASKS["cifar10"], key="mine"), samples=8)
    result = CliRunner().invoke(command, [str(tmp_path), "--lock"], standalone_mode=False)
    assert result.return_value == 0
    assert "mine: 8 samples recorded" in result.output
    facts = json.loads((tmp_path / "suite.json").read_text())["tasks"]["mine"]
    assert (facts["samples"], facts["classes"]) == (8, 6)
    assert "classnames.txt" in facts["sha256"]
    (folder / "classnames.txt").write_text((folder / "classnames.txt").read_text().replace("crane", "cranes"))
    result = CliRunner().invoke(command, [str(tmp_path), "--lock"], standalone_mode=False)
    assert result.return_value == 1
    assert "another SHA-256 than was recorded with the data (classnames.txt)" in result.output
    assert json.loads((tmp_path / "suite.json").read_text())["tasks"]["mine"] == facts
    with pytest.raises(UserError, match="without the other options"):
        command.main([str(tmp_path), "--lock", "--check"], standalone_mode=False)
