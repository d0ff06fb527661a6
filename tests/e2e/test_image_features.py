"""A locked image tower whose outputs are stored: the same training, without decoding an image."""

import json
import shutil
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from jobs.write_features import command
from pipeline.data.data_config import CropConfig
from pipeline.data.loading.decode import ImageDecoder, crop_box
from pipeline.errors import UserError
from pipeline.model.finetuning import check_constant_image_tower
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.planning.run_plan import plan_run
from pipeline.training.recipe import load_recipe
from tests.launch import run
from tests.metrics import equal, metrics, weights
from tests.shards import write_shards
from tests.towers import TINY
from tests.training import SMALL, train_here

EPOCH, EPOCHS = 6, 3
"""Steps of an epoch, which has 48 samples, and epochs of a run."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Shards of which one image is corrupt, a run whose weights the others start from, and its tower's outputs."""
    folder = tmp_path_factory.mktemp("features")
    write_shards(folder / "shards", [20, 28], replace={7: {"jpg": b"no image", "txt": b"caption 7"}})
    (folder / "small.json").write_text(json.dumps(TINY))
    train_here(f"output={folder / 'first'}", f"data.sources={folder / 'shards'}", "samples=8",
               f"model.arch={folder / 'small.json'}")  # fmt: skip
    store(folder, "stored")
    return folder


def store(base, output, *options, data="shards"):
    given = [str(base / "first"), "--images-only", "--data", str(base / data), "--output", str(base / output)]
    done = CliRunner().invoke(command, [*given, "--workers", "0", "--device", "cpu", *options])
    assert done.exit_code == 0, done.exception


def settings(base, output, *more, stored=None):
    features = [] if stored is None else [f"data.image_features={base / stored}"]
    return [f"output={base / output}", f"data.sources={base / 'shards'}", f"samples={8 * EPOCH * EPOCHS}",
            "model.arch=pretrained", f"model.pretrained={base / 'first'}", "model.lock_image=true",
            "data.crop.scale=[1,1]", "data.crop.ratio=[1,1]", "optimizer.lr=1e-2", "data.corrupt_limit=0.1",
            "optimizer.eps=1e-3",  # with less, Adam magnifies the rounding of gradients that are 0
            *features, *more]  # fmt: skip


def orders(base, output):
    """Return order, corrupt samples and counts of every epoch."""
    return [record["data"] for record in metrics(base / output, "event") if "data" in record]


def assert_same(base, a, b, *, loss=2e-6, weight=1e-5):
    """Same samples in the same rows, same loss in every step, same weights; up to rounding."""
    assert orders(base, a) == orders(base, b)
    assert len(orders(base, a)) == EPOCHS
    ours, theirs = ([record["loss"] for record in metrics(base / name, "train")] for name in (a, b))
    assert len(ours) == EPOCH * EPOCHS
    assert ours == pytest.approx(theirs, rel=loss)
    assert max(ours) > 1.001 * min(ours), "the runs learn nothing"
    mine, others = (torch.cat([v.flatten() for _, v in sorted(weights(base / name).items())]) for name in (a, b))
    # Not each weight by itself: a key's bias has no gradient but rounding, which Adam magnifies.
    assert (mine - others).norm() < weight * others.norm()


@pytest.fixture(scope="module")
def plain(base):
    """A run without stored features."""
    train_here(*settings(base, "plain"))
    return "plain"


def test_the_training_is_the_same_and_no_image_is_decoded(base, plain, monkeypatch):
    records = np.load(base / "stored" / "features.npy")
    assert np.flatnonzero(records["crc32"] == 0).tolist() == [7], "the corrupt image has no features"
    assert records["values"].shape == (48, 16)
    bf16 = "engine.deepspeed=zero1_bf16"
    train_here(*settings(base, "plain-bf16", bf16))
    train_here(*settings(base, "stored-bf16", bf16, stored="stored"))
    assert_same(base, "plain-bf16", "stored-bf16", loss=0.03, weight=0.1)  # rounding of bf16
    micro = ("engine.deepspeed=zero2_fp32", "engine.micro_batch=4", "data.workers=2")
    train_here(*settings(base, "stored-micro", *micro, stored="stored"))
    assert_same(base, plain, "stored-micro")
    run("jobs.train", *SMALL, *settings(base, "two", "engine.deepspeed=zero2_fp32", stored="stored"), ranks=2)
    assert_same(base, plain, "two")
    decode, decoded = ImageDecoder.__call__, []
    monkeypatch.setattr(ImageDecoder, "__call__", lambda self, data, *, state: decoded.append(data) or decode(
        self, data, state=state))  # fmt: skip
    train_here(*settings(base, "whole", "checkpoint.every=4", stored="stored"))
    assert_same(base, plain, "whole")
    assert set(decoded) == {b"no image"}
    uninterrupted = weights(base / "whole")
    for step in sorted((base / "whole" / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(step)
    train_here(*settings(base, "whole", "checkpoint.every=4", stored="stored"), resume="latest")
    assert equal(weights(base / "whole"), uninterrupted)


def test_what_does_not_fit_the_run_is_refused(base):
    write_shards(base / "others", [48], first=100)
    train_here(f"output={base / 'second'}", f"data.sources={base / 'shards'}", "samples=8", "seed=1",
               f"model.arch={base / 'small.json'}")  # fmt: skip
    given = [str(base / "first"), "--data", str(base / "shards"), "--output", str(base / "teacher")]
    assert CliRunner().invoke(command, [*given, "--workers", "0", "--device", "cpu"]).exit_code == 0
    cases = [
        ([f"model.pretrained={base / 'second'}"], "another image tower than this run locks (other weights)"),
        (["model.image_size=24"], "(other weights, other architecture, other image size)"),
        (["data.decoding=exact"], "(other data.decoding)"),
        ([f"data.sources={base / 'others'}"], "are of other data than this run"),
        (["data.crop.scale=[0.9,1]"], "are of the central square of each image: set data.crop.scale=[1,1]"),
        (["model.lock_image=false"], "set model.lock_image=true"),
        (["model.unlocked_image_blocks=1"], "model.unlocked_image_blocks=0"),
        (["model.patch_dropout=0.5"], "(PatchDropout) drops a random share of 0.5"),
        ([f"data.image_features={base / 'teacher'}"], "these are a teacher's features"),
        ([f"data.image_features={base / 'nowhere'}"], "features MODEL --images-only --data DATA --output"),
    ]
    for changes, message in cases:
        with pytest.raises(UserError) as refused:
            train_here(*settings(base, "refused", *changes, stored="stored" if "image_f" not in changes[0] else None))
        assert message in str(refused.value)
        assert not (base / "refused").exists()
    with pytest.raises(UserError, match="these are the outputs of an image tower"):
        train_here(*settings(base, "refused", "objective.distill=1", f"data.teacher_features={base / 'stored'}"))
    result = CliRunner().invoke(command, [*given, "--images-only", "--caption", "json:url"])
    assert "--caption has no effect with --images-only" in str(result.exception)


def test_features_that_are_missing_end_the_run_before_any_work_is_lost(base, monkeypatch):
    monkeypatch.setattr("pipeline.data.loading.stored_features.LOOKED_AT", 1)  # as in a large dataset
    folder = shutil.copytree(base / "stored", base / "torn")
    records = np.load(folder / "features.npy")
    records["crc32"][30] ^= 1
    np.save(folder / "features.npy", records)
    with pytest.raises(UserError, match="torn has no features of sample 30, or damaged ones: run `neuclip features`"):
        train_here(*settings(base, "torn-run", stored="torn"))
    steps = len(metrics(base / "torn-run", "train"))
    assert (base / "torn-run" / "checkpoints" / f"step-{steps:08d}").is_dir() or steps == 0
    store(base, "torn")
    assert (folder / "features.npy").read_bytes() == (base / "stored" / "features.npy").read_bytes()


def test_towers_of_other_families():
    for arch in ("RN50", "ViT-B-32", "convnext_base"):
        towers = build_towers(ModelConfig(arch=arch, lock_image=True), seed=0, device="meta")[0]
        trained = (
            pytest.raises(UserError, match=r"visual\.head.* is trained") if arch == "convnext_base" else nullcontext()
        )
        with trained:
            check_constant_image_tower(towers.clip.visual)


def test_the_plan_counts_no_pass_of_the_tower(base):
    found = [plan_run(load_recipe(None, [*SMALL, *settings(base, "x", stored=name)]), gpus=1) for name in (None, "y")]
    towers, samples = found[0].towers, 8 * EPOCH * EPOCHS
    assert towers.trained == (False, True)
    assert found[0].flops == pytest.approx(samples * (towers.image_flops + 3 * towers.text_flops))
    assert found[1].flops == pytest.approx(samples * 3 * towers.text_flops)
    assert any("y is not there yet: `neuclip features MODEL --images-only --data DATA" in n for n in found[1].notes)
    assert found[0].memory[1]["moments"] == 8 * towers.trained_parameters < 8 * towers.parameters


def test_the_fixed_crop_is_the_central_square():
    crop = CropConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    for height, width in ((20, 24), (24, 20), (30, 31), (31, 30), (7, 7), (10, 900)):
        side = min(height, width)
        expected = ((height - side) // 2, (width - side) // 2, side, side)
        assert {crop_box(height, width, crop=crop, state=i) for i in range(50)} == {expected}
