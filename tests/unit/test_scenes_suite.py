"""The held-out suite: layout, balance, and no overlap with the training data."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from data_prep.scenes.render import jpeg
from data_prep.scenes.scene import HELD_OUT_START, ScenesConfig, describe
from data_prep.scenes.scene_suite import ATTRIBUTES, write_suite

CONFIG = ScenesConfig(pairs=2_000, image_size=32, held_out=90, retrieval_pairs=1_010)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    tasks = write_suite(CONFIG, folder)
    assert tasks == [*(f"scenes/{name}" for name in ATTRIBUTES), "scenes/retrieval"]
    return folder


def _members(folder: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for shard in range(int((folder / "test" / "nshards.txt").read_text())):
        with tarfile.open(folder / "test" / f"{shard}.tar") as tar:
            found.update({member.name: tar.extractfile(member).read() for member in tar})
    return found


@pytest.mark.parametrize("name", list(ATTRIBUTES))
def test_zero_shot_sets(suite: Path, name: str) -> None:
    folder = suite / f"wds_scenes-{name}_test"
    classes = (folder / "classnames.txt").read_text().splitlines()
    templates = (folder / "zeroshot_classification_templates.txt").read_text().splitlines()
    assert len(classes) == len(set(classes)) == len(ATTRIBUTES[name].classes)
    assert all("{c}" in template for template in templates)
    members = _members(folder)
    labels = Counter(int(body) for key, body in members.items() if key.endswith(".cls"))
    assert sum(labels.values()) == 90
    assert max(labels.values()) - min(labels.values()) <= 1
    assert sorted(labels) == list(range(len(classes)))
    assert sorted(members)[:2] == ["s0000000.cls", "s0000000.jpg"]
    assert Image.open(io.BytesIO(members["s0000000.jpg"])).size == (32, 32)


def test_labels_match_the_images(suite: Path) -> None:
    """Look up each image's index by its bytes, and check the label against the description."""
    members = _members(suite / "wds_scenes-colour_test")
    by_bytes = {jpeg(CONFIG, index): index for index in range(HELD_OUT_START, HELD_OUT_START + 400)}
    attribute = ATTRIBUTES["colour"]
    found = 0
    for key, body in members.items():
        if key.endswith(".jpg") and body in by_bytes:
            scene = describe(CONFIG, by_bytes[body])
            assert attribute.classes[int(members[key.replace(".jpg", ".cls")])] == scene.item.colour
            found += 1
    assert found > 60


def test_held_out_descriptions_do_not_occur_in_training(suite: Path) -> None:
    training = {describe(CONFIG, index) for index in range(CONFIG.pairs)}
    by_bytes = {jpeg(CONFIG, index): index for index in range(HELD_OUT_START, HELD_OUT_START + 1_600)}
    images = [body for key, body in _members(suite / "wds_scenes-retrieval_test").items() if key.endswith(".jpg")]
    scenes = [describe(CONFIG, by_bytes[body]) for body in images if body in by_bytes]
    assert len(scenes) > 900
    assert len(set(scenes)) == len(scenes)
    assert not training & set(scenes)
    facts = json.loads((suite / "suite.json").read_text())["tasks"]
    assert facts["scenes/retrieval"]["excluded"]["in_training"] > 0
    assert facts["scenes/colour"]["chance"] == 1 / 12
    shard = suite / "wds_scenes-colour_test" / "test" / "0.tar"
    assert facts["scenes/colour"]["sha256"] == {"test/0.tar": hashlib.sha256(shard.read_bytes()).hexdigest()}


def test_retrieval_set(suite: Path) -> None:
    folder = suite / "wds_scenes-retrieval_test"
    assert (folder / "dataset_type.txt").read_text().strip() == "retrieval"
    members = _members(folder)
    captions = [body.decode() for key, body in members.items() if key.endswith(".txt")]
    assert len(captions) == len(set(captions)) == 1_010
    assert (folder / "test" / "nshards.txt").read_text().strip() == "2"
    assert "s0001000.jpg" in members, "keys continue across shards"


def test_the_same_config_gives_the_same_bytes(suite: Path, tmp_path: Path) -> None:
    write_suite(CONFIG, tmp_path)

    def digests(folder: Path) -> dict[str, str]:
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    assert digests(suite) == digests(tmp_path)
