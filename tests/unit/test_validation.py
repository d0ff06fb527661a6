"""The validation loss: its value, its pairs, the same bits on any number of ranks, early stopping."""

import math
import re
from collections import Counter

import pytest
import torch
from click.testing import CliRunner
from open_clip.loss import ClipLoss
from safetensors.torch import load_file
from torch.nn import functional as F

from jobs.export import command as export
from pipeline.checkpoint.layout import best_checkpoint
from pipeline.data.data_config import DataConfig, Source
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model import evaluation_model
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.run_files import finished_checkpoints
from pipeline.training import periodic_tests
from pipeline.training.periodic_tests import HeldOutPairs, validation_scores
from pipeline.training.recipe import ValidationConfig, load_recipe
from pipeline.training.run_state import ValidationHistory
from tests.metrics import equal, metrics
from tests.shards import sample, write_shards
from tests.thread_world import on_ranks
from tests.towers import write_tiny
from tests.training import SMALL, train_here


@pytest.fixture(scope="module", autouse=True)
def several_batches():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(periodic_tests, "BATCH_SIZE", 4)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Training shards, held-out shards with two unusable pairs, and the run `plain` of 6 steps."""
    folder = tmp_path_factory.mktemp("validation")
    write_tiny(folder)
    write_shards(folder / "train", [30, 20])
    broken = {3: {**sample(103), "jpg": b"no image"}, 12: {"jpg": sample(112)["jpg"]}}
    write_shards(folder / "held", [10, 30], first=100, replace=broken)
    train_here(*settings(folder), f"output={folder / 'plain'}")
    return folder


def settings(base):
    return [f"model.arch={base / 'tiny-towers.json'}", f"data.sources={base / 'train'}", "samples=48",
            f"validation.sources={base / 'held'}", "validation.every=2"]  # fmt: skip


def pairs(base, world, **changes):
    config = ValidationConfig(sources=(Source(manifest=str(base / "held")),), **changes)
    return HeldOutPairs(config, DataConfig(sources=(Source(manifest=str(base / "train")),)), world)


def test_the_loss_is_open_clips_and_independent_of_blocks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    image, text = (F.normalize(torch.randn(30, 8, generator=generator), dim=1) for _ in range(2))
    expected = float(ClipLoss()(image, text, torch.tensor(1 / 0.05)))
    found = validation_scores(image, text, tau=0.05)
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    similarity = image @ text.T
    assert found["image_to_text_r1"] == pytest.approx(float((similarity.argmax(1) == torch.arange(30)).float().mean()))
    assert found["text_to_image_r1"] == pytest.approx(float((similarity.argmax(0) == torch.arange(30)).float().mean()))
    monkeypatch.setattr(periodic_tests, "ROWS", 7)
    blockwise = validation_scores(image, text, tau=0.05)
    assert blockwise == pytest.approx(found, rel=1e-9)

    def scores(world):
        found, times = validation_scores(image, text, tau=0.05, world=world), world.traffic["progress"]
        assert times >= 5 // world.size, "a heartbeat would take a long loss for a hang"
        return found

    monkeypatch.setattr(World, "progress", lambda world: world.traffic.update(progress=1))
    for size in (1, 2, 3, 7):
        assert on_ranks(size, scores) == [blockwise] * size


def test_features_are_bit_identical_on_any_number_of_ranks(base):
    model = load_for_evaluation(str(base / "plain"))
    runs = [on_ranks(size, lambda world: pairs(base, world).features(model)) for size in (1, 2, 3)]
    image, text = runs[0][0]
    assert image.shape == text.shape == (38, 16)
    for ranks in runs:
        assert all(torch.equal(a, image) and torch.equal(b, text) for a, b in ranks)


def test_chosen_pairs_are_the_first_of_each_shard_and_unusable_ones_are_counted(base):
    def found(world):
        held = pairs(base, world, samples=20)
        model = load_for_evaluation(str(base / "plain"))
        held.features(model)
        captions = [caption for batch in held._batches for _, caption in batch]
        return captions, sum(world.gather_objects(held.dropped), Counter())

    ((captions, dropped),) = on_ranks(1, found)
    assert captions == [f"caption {100 + i}" for i in (0, 1, 2, 4, *range(10, 12), *range(13, 25))]
    assert dropped == {"image cannot be decoded": 1, "caption is missing": 1}
    parts = on_ranks(2, found)
    assert parts[0][0] + parts[1][0] == captions
    assert parts[0][1] == parts[1][1] == dropped


def test_unusable_settings_are_rejected(base):
    with pytest.raises(UserError, match="has shards that are trained on"):
        train_here(*settings(base), f"validation.sources={base / 'train'}", f"output={base / 'no'}")
    with pytest.raises(UserError, match=r"validation\.patience needs held-out pairs"):
        load_recipe(None, [*SMALL, *settings(base), "validation.sources=[]", "validation.patience=2", "output=x"])
    with pytest.raises(UserError, match=r"validation\.sources take no weight"):
        load_recipe(None, [*SMALL, *settings(base), f"validation.sources=[{{manifest: {base / 'held'}, weight: 2}}]",
                           "output=x"])  # fmt: skip
    write_shards(base / "broken", [3], first=200, replace={i: {**sample(200 + i), "jpg": b"no"} for i in range(3)})
    with pytest.raises(UserError, match="have 0 usable pairs, 3 dropped: image cannot be decoded"):
        train_here(*settings(base), f"validation.sources={base / 'broken'}", f"output={base / 'no-pairs'}")


def test_a_validation_does_not_hash_the_weights(base, monkeypatch):
    monkeypatch.setattr(evaluation_model, "weights_digest", lambda state: pytest.fail("the weights were hashed"))
    model = load_for_evaluation(str(base / "plain"))
    ((image, _),) = on_ranks(1, lambda world: pairs(base, world, samples=4).features(model))
    assert image.shape == (3, 16), "one of the four cannot be used"


def test_a_run_logs_the_loss_of_its_weights_and_keeps_the_best_checkpoint(base):
    logged = metrics(base / "plain", "validation")
    assert [record["step"] for record in logged] == [2, 4, 6]
    assert logged[-1]["pairs"] == 38
    best = min(logged, key=lambda record: record["loss"])["step"]
    path = best_checkpoint(base / "plain")
    assert path.name == f"step-{best:08d}"
    model = load_for_evaluation(str(finished_checkpoints(base / "plain")[-1]))
    ((image, text),) = on_ranks(1, lambda world: pairs(base, world).features(model))
    assert validation_scores(image, text, tau=0.07)["loss"] == pytest.approx(logged[-1]["loss"], rel=1e-8)


def test_patience_ends_the_run_and_survives_a_resume(base, monkeypatch):
    scores = validation_scores
    monkeypatch.setattr(
        periodic_tests, "validation_scores", lambda *given, **how: {**scores(*given, **how), "loss": 3.0}
    )
    run = base / "patient"
    given = [*settings(base), f"output={run}", "checkpoint.keep_last=1", "checkpoint.every=1"]
    train_here(*given, "validation.patience=2", "samples=24")  # interrupted after the first validation
    train_here(*given, "validation.patience=2", "samples=80", resume="latest")
    messages = [record["message"] for record in metrics(run, "event")]
    assert [record["step"] for record in metrics(run, "validation")] == [2, 3, 4]
    stopped = r"Stopped early: 2 validations in a row without a lower loss than \S+ at step 2 "
    assert any(re.match(stopped, message) for message in messages)
    best, resumed, last = (f"step-{step:08d}" for step in (2, 3, 4))
    assert {path.name for path in finished_checkpoints(run)} == {best, resumed, last}
    train_here(*given, "validation.patience=2", "samples=80", resume="latest")
    assert len(metrics(run, "validation")) == 3
    train_here(*given, "validation.patience=null", "samples=80", resume="latest")
    assert metrics(run, "validation")[-1]["step"] == 10


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((3.0, 3.0, 2.8, 2.9), ValidationHistory(best_loss=2.8, best_step=2, since_best=1, step=3)),
        ((math.nan, 2.0, 1.0), ValidationHistory(best_loss=1.0, best_step=2, since_best=0, step=2)),
        ((math.nan,), ValidationHistory(since_best=1)),
    ],
)
def test_history_counts_validations_since_the_best(losses, expected):
    history = ValidationHistory()
    for step, loss in enumerate(losses):
        history.add(loss, step=step)
    assert history == expected
    assert history.ends_run(1) == bool(expected.since_best)
    assert not history.ends_run(None)
    wanted = "a finite loss" if expected.best_loss is None else f"a lower loss than {expected.best_loss:.4f} at step 2"
    assert f"{expected.since_best} validations in a row without {wanted}" in history.describe_end()


def test_the_average_is_saved_resumed_to_the_same_bits_validated_and_exported(base):
    given = [*settings(base), "ema.decay=0.9"]
    train_here(*given, f"output={base / 'ema'}", "checkpoint.every=3")
    train_here(*given, f"output={base / 'half'}", resume=str(base / "ema" / "checkpoints" / "step-00000003"))
    ends = [base / run / "checkpoints" / "step-00000006" for run in ("ema", "half", "plain")]
    averages = [load_file(end / "ema" / "open_clip_model.safetensors") for end in ends[:2]]
    weights = [load_file(end / "open_clip_model.safetensors") for end in ends]
    assert equal(averages[0], averages[1])
    assert equal(weights[0], weights[2]), "the average changes no training"
    assert not torch.equal(averages[0]["visual.proj"], weights[0]["visual.proj"])
    model = load_for_evaluation(str(ends[0] / "ema"))
    ((image, text),) = on_ranks(1, lambda world: pairs(base, world).features(model))
    logged = metrics(base / "ema", "validation")[-1]["loss"]
    assert validation_scores(image, text, tau=0.07)["loss"] == pytest.approx(logged, rel=1e-8)
    assert logged != metrics(base / "plain", "validation")[-1]["loss"]
    printed = CliRunner().invoke(export, [str(base / "ema"), "--output", str(base / "out"), "--ema", "--best"]).output
    assert "Step 6 exported" in printed
    exported = load_file(base / "out" / "open_clip_model.safetensors")
    assert equal(averages[0], exported)
    assert "exponential moving average of the trained ones (decay 0.9)" in (base / "out" / "README.md").read_text()
    refused = CliRunner().invoke(export, [str(base / "plain"), "--output", str(base / "no-out"), "--ema"])
    assert "has no average of the weights" in str(refused.exception)
