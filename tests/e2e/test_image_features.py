"""A locked image tower whose outputs are stored: the same training, without running the tower twice on an image."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from jobs.train import command
from pipeline.data.data_config import CropConfig
from pipeline.data.loading.decode import crop_box
from pipeline.data.shards.manifest_format import make_manifest
from pipeline.errors import UserError
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.planning.run_plan import plan_run
from pipeline.training.recipe import load_recipe
from tests.launch import run
from tests.metrics import metrics, weights
from tests.shards import write_shards
from tests.towers import TINY
from tests.training import SMALL, train_here

EPOCH, EPOCHS = 6, 3
"""Steps of an epoch, which has 48 samples, and epochs of a run."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, one image of which is corrupt, and a run whose weights the others start from."""
    folder = tmp_path_factory.mktemp("features")
    write_shards(folder / "shards", [20, 28], replace={7: {"jpg": b"no image", "txt": b"caption 7"}})
    (folder / "small.json").write_text(json.dumps(TINY))
    train_here(f"output={folder / 'first'}", f"data.sources={folder / 'shards'}", "samples=8",
               f"model.arch={folder / 'small.json'}")  # fmt: skip
    return folder


def settings(base: Path, output: str, *more: str, cache: str | None = None) -> list[str]:
    stored = [] if cache is None else [f"model.image_features_cache={base / cache}"]
    return [f"output={base / output}", f"data.sources={base / 'shards'}", f"samples={8 * EPOCH * EPOCHS}",
            "model.arch=pretrained", f"model.pretrained={base / 'first'}", "model.lock_image=true",
            "data.crop.scale=[1,1]", "data.crop.ratio=[1,1]", "optimizer.lr=1e-2", "data.corrupt_limit=0.1",
            *stored, *more]  # fmt: skip


def losses(base: Path, output: str) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in metrics(base / output, "train")}


def shares(base: Path, output: str) -> list[float]:
    """Return for every step the share of rank 0's rows that were read."""
    return [record["image_features_read"] for record in metrics(base / output, "train")]


def orders(base: Path, output: str) -> list[Any]:
    """Return order, corrupt samples and counts of every epoch."""
    return [record["data"] for record in metrics(base / output, "event") if "data" in record]


def assert_same(base: Path, a: str, b: str) -> None:
    """Same samples in the same rows, same loss in every step, same weights; up to rounding."""
    assert orders(base, a) == orders(base, b)
    assert len(orders(base, a)) == EPOCHS
    ours, theirs = losses(base, a), losses(base, b)
    assert ours.keys() == theirs.keys() == set(range(1, EPOCH * EPOCHS + 1))
    assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=2e-6)
    assert max(ours.values()) > 1.001 * min(ours.values()), "the runs learn nothing"
    mine, others = (torch.cat([v.flatten() for _, v in sorted(weights(base / name).items())]) for name in (a, b))
    # Not each weight by itself: a key's bias has no gradient but rounding, which Adam magnifies.
    assert (mine - others).norm() < 1e-5 * others.norm()


@pytest.fixture(scope="module")
def plain(base: Path) -> str:
    """A run without stored features."""
    train_here(*settings(base, "plain"))
    return "plain"


@pytest.mark.parametrize(
    "layout",
    [["engine.deepspeed=zero1_fp32"], ["engine.deepspeed=zero1_bf16"],
     ["engine.deepspeed=zero2_fp32", "engine.micro_batch=4", "data.workers=2"]],
)  # fmt: skip
def test_the_training_is_the_same_and_the_tower_runs_in_the_first_epoch_only(base: Path, layout: list[str]) -> None:
    name = "-".join(layout).replace("/", "")
    train_here(*settings(base, f"plain-{name}", *layout))
    train_here(*settings(base, f"stored-{name}", *layout, cache=f"cache-{name}"))
    assert_same(base, f"plain-{name}", f"stored-{name}")
    read = shares(base, f"stored-{name}")
    assert sum(read[:EPOCH]) <= 1 / 8, "at most the sample that replaces the corrupt one was stored before"
    assert read[-EPOCH:] == [1.0] * EPOCH
    (file,) = (base / f"cache-{name}").glob("*/features.npy")
    stored = np.load(file)
    assert set(np.flatnonzero(stored["crc32"] == 0)) <= {7}, "the corrupt image has no features"
    assert stored["values"].dtype == ("<u2" if "zero1_bf16" in name else "<f4")
    (note,) = [r["message"] for r in metrics(base / f"stored-{name}", "event") if "Image features" in r["message"]]
    assert f"{file} (new), 48 samples x 16 x {stored['values'].itemsize} bytes" in note


def test_two_ranks_share_the_features_with_each_other_and_with_later_runs(base: Path, plain: str) -> None:
    more = ["engine.deepspeed=zero2_fp32", "data.workers=1"]
    run("jobs.train", *SMALL, *settings(base, "two", *more, cache="shared"), ranks=2)
    assert_same(base, plain, "two")
    assert shares(base, "two")[-EPOCH:] == [1.0] * EPOCH
    train_here(*settings(base, "one", cache="shared"))
    assert_same(base, plain, "one")
    assert shares(base, "one") == [1.0] * (EPOCH * EPOCHS)


def test_a_run_that_is_killed_while_it_stores_continues(base: Path, plain: str) -> None:
    place, call = "pipeline.data.loading.feature_file:FeatureStore._write", 8 * 4 + 3
    given = settings(base, "killed", "checkpoint.every=2", cache="cut")
    done = run("tests.e2e.doomed_run", place, str(call), "0", *SMALL, *given, check=False)
    assert done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
    (file,) = (base / "cut").glob("*/features.npy")
    assert np.count_nonzero(np.load(file)["crc32"]) == call - 1
    stored = np.load(file)
    torn = np.flatnonzero(stored["crc32"])[0]
    with file.open("r+b") as opened:  # as if the disk had been given half of a record
        opened.seek(file.stat().st_size - stored.nbytes + torn * stored.itemsize + stored.itemsize // 2)
        opened.write(bytes(stored.itemsize // 2))
    train_here(*given, resume="latest")
    assert_same(base, plain, "killed")
    assert 0 < shares(base, "killed")[4] <= 2 / 8, "of the step that was killed, two records were stored"
    assert shares(base, "killed")[-EPOCH:] == [1.0] * EPOCH


def test_other_weights_sizes_precisions_and_data_get_features_of_their_own(base: Path, plain: str) -> None:
    write_shards(base / "others", [48], first=100)
    train_here(f"output={base / 'second'}", f"data.sources={base / 'shards'}", "samples=8", "seed=1",
               f"model.arch={base / 'small.json'}")  # fmt: skip
    train_here(*settings(base, "kind-0", cache="kinds"))
    cases = [
        (f"model.pretrained={base / 'second'}", "image tower's weights"),
        ("model.image_size=24", "image tower's weights, architecture, image size"),
        ("engine.deepspeed=zero1_bf16", "precision"),
        (f"data.sources={base / 'others'}", "contents of the shards"),
        ("data.decoding=exact", "data.decoding"),
    ]
    for number, (changed, why) in enumerate(cases, start=1):
        train_here(*settings(base, f"kind-{number}", changed, "samples=8", cache="kinds"))
        (note,) = [r["message"] for r in metrics(base / f"kind-{number}", "event") if "Image features" in r["message"]]
        assert "(new)" in note
        assert f"(another {why})" in note
        assert shares(base, f"kind-{number}") == [0.0]
        assert len(list((base / "kinds").glob("*/features.npy"))) == number + 1
    train_here(*settings(base, "again", cache="kinds"))
    assert_same(base, plain, "again")
    assert shares(base, "again") == [1.0] * (EPOCH * EPOCHS)


def test_a_full_disk_leaves_the_training_as_it_is(base: Path, plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, count = os.pwrite, 0

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal count
        count += 1
        if count > 21:
            raise OSError(28, os.strerror(28))
        return write(descriptor, data, offset)

    monkeypatch.setattr("pipeline.data.loading.feature_file.os.pwrite", full)
    train_here(*settings(base, "full", cache="little"))
    assert_same(base, plain, "full")
    assert all(0.0 < sum(shares(base, "full")[e * EPOCH : (e + 1) * EPOCH]) < EPOCH for e in (1, 2))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("model.lock_image=false", "needs an image tower that is wholly locked"),
        ("model.unlocked_image_blocks=1", "such as visual.proj"),
        ("model.patch_dropout=0.5", r"patch_dropout (PatchDropout) drops a random share of 0.5"),
        ("data.crop.scale=[0.9,1]", "Set data.crop.scale=[1,1] data.crop.ratio=[1,1]"),
        ("data.crop.ratio=[0.75,1.3]", "Set data.crop.scale=[1,1] data.crop.ratio=[1,1]"),
    ],
)
def test_towers_and_crops_that_change_are_refused(base: Path, changed: str, message: str) -> None:
    given = settings(base, "refused", changed, cache="refused-cache")
    result = CliRunner().invoke(command, [*SMALL, *given, "--dry-run"])
    assert message in str(result.exception), result.output
    assert not (base / "refused").exists()
    assert not (base / "refused-cache").exists()


@pytest.mark.parametrize(
    ("arch", "refusal"), [("RN50", None), ("ViT-B-32", None), ("convnext_base", "such as visual.head")]
)
def test_other_families(arch: str, refusal: str | None) -> None:
    config = ModelConfig(arch=arch, lock_image=True, image_features_cache="x")
    if refusal is None:
        build_towers(config, seed=0, device="meta")
    else:
        with pytest.raises(UserError, match=refusal):
            build_towers(config, seed=0, device="meta")


def test_shards_without_hashes_are_refused(base: Path) -> None:
    folder = base / "unhashed"
    write_shards(folder, [16])
    make_manifest([("00000.tar", 16, (folder / "00000.tar").stat().st_size, "")], root=folder).save(folder)
    with pytest.raises(UserError, match="needs shards whose manifest has their hashes"):
        train_here(*settings(base, "unhashed-run", f"data.sources={folder}", "samples=8", cache="unhashed-cache"))


def test_the_plan_counts_one_pass_of_the_tower_and_the_space(base: Path) -> None:
    found = [plan_run(load_recipe(None, [*SMALL, *settings(base, "x", cache=cache)]), gpus=1) for cache in (None, "y")]
    towers = found[0].towers
    assert towers.trained == (False, True)
    samples, epoch = 8 * EPOCH * EPOCHS, 8 * EPOCH
    assert found[0].cost.flops == pytest.approx(samples * (towers.image_flops + 3 * towers.text_flops))
    assert found[1].cost.flops == pytest.approx(epoch * towers.image_flops + samples * 3 * towers.text_flops)
    assert found[0].features_bytes is None
    assert found[1].features_bytes == pytest.approx(48 * (16 * 4 + 4), abs=256)
    engine = found[0].engine[1]
    assert engine.moments == 8 * towers.trained_parameters < 8 * towers.parameters


@pytest.mark.parametrize(("height", "width"), [(20, 24), (24, 20), (30, 31), (31, 30), (7, 7), (10, 900)])
def test_the_fixed_crop_is_the_central_square(height: int, width: int) -> None:
    side = min(height, width)
    expected = ((height - side) // 2, (width - side) // 2, side, side)
    crop = CropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    assert {crop_box(height, width, crop=crop, state=i) for i in range(50)} == {expected}
