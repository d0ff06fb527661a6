"""Distillation: the loss and its gradients are those of a plain reference, and runs learn from stored features."""

import errno
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from open_clip.loss import DistillClipLoss

from jobs.write_features import command
from pipeline.data.data_config import TEACHER
from pipeline.data.loading.loader import NoBatch
from pipeline.data.loading.stored_features import StoredFeatures
from pipeline.distributed.start import start_world
from pipeline.errors import UserError
from pipeline.model.evaluation_model import load_for_evaluation
from pipeline.objectives import build_objective, objective_names
from pipeline.objectives.distill import Teacher
from pipeline.training.recipe import load_recipe
from pipeline.training.run import setup
from pipeline.training.run_state import RunEnds
from tests.launch import run
from tests.metrics import equal, metrics, weights
from tests.shards import write_shards
from tests.towers import TINY
from tests.training import SMALL, in_this_process, train_here
from tests.unit.objectives_reference import context, relative_error, unit_features

BATCH, WEIGHT, TEACHER_TAU = 12, 0.7, 0.02
SOFTMAX = [name for name in objective_names() if name != "siglip"]


def teacher_of(batch_size):
    image, text = unit_features(batch_size, 5, seed=9)
    return Teacher(image, text, TEACHER_TAU)


def reference(image, text, taus, teacher):
    """Mean KL divergence of both sides' anchors."""
    student, guide = image @ text.T, teacher.image @ teacher.text.T / teacher.tau
    sides = zip((student, student.T), (guide, guide.T), taus, strict=True)
    divergences = [
        F.kl_div((s / tau[:, None]).log_softmax(1), t.softmax(1), reduction="batchmean") for s, t, tau in sides
    ]
    return (divergences[0] + divergences[1]) / 2


def computed(name, weight):
    """The output of a batch in float64, the gradient by the temperature, and the temperatures."""
    own = {"prototypes": 8} if name.startswith("neuclip") else {}
    objective = build_objective({"name": name, "distill": weight, **own}, context=context(BATCH))
    image, text = unit_features(BATCH)
    teacher = teacher_of(BATCH) if weight else None
    output = objective.compute(image, text, sample_ids=torch.arange(BATCH), teacher=teacher)
    pending: Any = objective._pending
    tau = objective.temperature.of_anchors(
        BATCH, None if objective.table is None else objective.table.lookup(torch.arange(BATCH)).double()
    )
    objective.commit()
    return output, (pending.tau_gradient, tau)


@pytest.mark.parametrize("name", SOFTMAX)
def test_loss_and_gradients_of_every_method_gain_those_of_the_reference(name):
    (plain, (slope, taus)), (found, (new_slope, _)) = computed(name, 0.0), computed(name, WEIGHT)
    image, text = (x.requires_grad_() for x in unit_features(BATCH))
    taus = tuple(tau.detach().clone().requires_grad_() for tau in taus)
    loss = WEIGHT * reference(image, text, taus, teacher_of(BATCH))
    loss.backward()
    assert float(found.loss - plain.loss) == pytest.approx(float(loss.detach()), rel=1e-10)
    assert float(found.metrics["distillation_loss"]) == pytest.approx(float(loss.detach()) / WEIGHT, rel=1e-10)
    assert relative_error(found.grad_image - plain.grad_image, image.grad) < 1e-10
    assert relative_error(found.grad_text - plain.grad_text, text.grad) < 1e-10
    if slope is None:
        assert new_slope is None
    elif slope.dim():  # one temperature per anchor, without the 1 / B of the mean
        assert relative_error(new_slope - slope, BATCH * torch.stack([tau.grad for tau in taus], 1)) < 1e-9
    else:
        assert float(new_slope - slope) == pytest.approx(float(taus[0].grad.sum() + taus[1].grad.sum()), rel=1e-9)


def test_it_is_the_loss_of_open_clip():
    """Its gradients, by the temperature as well; its cross-entropy differs by a constant."""
    output, (slope, taus) = computed("openclip", 1.0)
    image, text = (x.requires_grad_() for x in unit_features(BATCH))
    scale, teacher = (1 / taus[0][0]).detach().requires_grad_(), teacher_of(BATCH)
    losses = DistillClipLoss()(image, text, scale, teacher.image, teacher.text, 1 / TEACHER_TAU)
    sum(losses).backward()
    assert float(output.metrics["contrastive_loss"]) == pytest.approx(float(losses[0].detach()), rel=1e-10)
    assert relative_error(output.grad_image, image.grad) < 1e-9
    assert relative_error(output.grad_text, text.grad) < 1e-9
    assert float(-slope * taus[0][0] ** 2) == pytest.approx(float(scale.grad), rel=1e-9)


def test_a_loop_of_your_own_and_large_batches(monkeypatch):
    """Blocks of two rows give the same result; `loss` has the gradient of `compute`."""
    expected, _ = computed("openclip", WEIGHT)
    monkeypatch.setattr("pipeline.objectives.pairwise.LEAST_ROWS", 2)
    monkeypatch.setattr("pipeline.objectives.pairwise.CPU_BLOCK", 1)
    objective = build_objective({"name": "openclip", "distill": WEIGHT}, context=context(BATCH))
    image, text = (x.requires_grad_() for x in unit_features(BATCH))
    objective.loss(image, text, teacher=teacher_of(BATCH)).backward()
    assert relative_error(image.grad, expected.grad_image) < 1e-12
    assert relative_error(text.grad, expected.grad_text) < 1e-12


def test_a_teacher_and_its_weight_need_each_other_and_a_softmax():
    image, text = unit_features(BATCH)
    with pytest.raises(UserError, match="siglip has no softmax"):
        build_objective({"name": "siglip", "distill": 1.0}, context=context(BATCH))
    for weight, teacher in ((1.0, None), (0.0, teacher_of(BATCH))):
        objective = build_objective({"name": "openclip", "distill": weight}, context=context(BATCH))
        with pytest.raises(UserError, match="need each other"):
            objective.compute(image, text, sample_ids=torch.arange(BATCH), teacher=teacher)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Shards of which one image is corrupt, other shards, and a run as the teacher with its features."""
    folder = tmp_path_factory.mktemp("distillation")
    write_shards(folder / "shards", [20, 28], replace={7: {"jpg": b"no image", "txt": b"caption 7"}})
    write_shards(folder / "other", [48], first=100)
    (folder / "small.json").write_text(json.dumps(TINY))
    train_here(f"output={folder / 'teacher'}", f"data.sources={folder / 'shards'}", "samples=8",
               f"model.arch={folder / 'small.json'}", "optimizer.lr=1e-2", "data.corrupt_limit=0.1")  # fmt: skip
    assert features(folder).exit_code == 0
    return folder


def features(base, *options, model="teacher", data="shards", output="features"):
    fixed = ["--data", str(base / data), "--workers", "0", "--batch-size", "7", "--device", "cpu"]
    return CliRunner().invoke(command, [str(base / model), *fixed, "--output", str(base / output), *options])


def settings(base, output, *more, stored="features"):
    return [f"output={base / output}", f"data.sources={base / 'shards'}", "samples=48", "data.corrupt_limit=0.1",
            f"model.arch={base / 'small.json'}", "optimizer.lr=1e-2", "objective.distill=0.5", "seed=1",
            f"data.teacher_features={base / stored}", *more]  # fmt: skip


def changed(features, copy, *, facts=None, **others):
    """Copy features with other facts, or other values beside them, in their features.json."""
    shutil.copytree(features, copy)
    tree = json.loads((copy / "features.json").read_text()) | others
    tree["facts"] |= facts or {}
    (copy / "features.json").write_text(json.dumps(tree))
    return copy


def damage(file):
    """Change what a file of features holds of sample 47, which is in the second shard, and return its bytes."""
    body = bytearray(file.read_bytes())
    body[-5] ^= 1
    file.write_bytes(body)
    return body


def values(base, run, key="loss"):
    return [record[key] for record in metrics(base / run, "train")]


def test_features_are_those_of_the_model_and_what_is_missing_is_counted_and_added(base, monkeypatch):
    stored = np.load(base / "features" / "features.npy")
    assert np.flatnonzero(stored["crc32"] == 0).tolist() == [7]
    tree = json.loads((base / "features" / "features.json").read_text())
    assert (tree["samples"], tree["stored"], list(tree["problems"].values())) == (48, 47, [1])
    teacher = load_for_evaluation(str(base / "teacher"))
    text = teacher.encode_text(teacher.tokenize(["caption 30"]))[0]
    assert np.abs(stored["values"][30, teacher.dim :] - text.numpy()).max() < 1e-3
    assert np.linalg.norm(stored["values"][30].astype(np.float32)) == pytest.approx(2**0.5, abs=1e-3)

    shutil.copytree(base / "features", base / "damaged")
    file = base / "damaged" / "features.npy"
    damage(file)
    shutil.copytree(base / "damaged", base / "quiet")
    assert "shards of this rank" not in features(base, output="quiet").output  # one line in half a minute
    monkeypatch.setattr("jobs.score.PROGRESS_SECONDS", 0)
    result = features(base, output="damaged")
    assert "0 of 2 shards" in result.output
    assert "1 of 2 shards" not in result.output.splitlines()[0]  # the first has a corrupt image, and is tried again
    assert file.read_bytes() == (base / "features" / "features.npy").read_bytes()


def test_features_of_something_else_are_refused(base):
    for given, message in [
        (("--caption", "json:captoins"), "--caption = 'json:captoins' is in none of the first samples"),
        (("--data", str(base / "shards")), "a folder twice"),
    ]:
        assert message in str(features(base, *given, output="useless").exception)
    assert not (base / "useless").exists()
    assert "holds features with another data" in str(features(base, data="other").exception)
    assert "another caption (txt, now json:url)" in str(features(base, "--caption", "json:url").exception)
    assert features(base, data="other", output="of-other").exit_code == 0
    facts = json.loads((base / "features" / "features.json").read_text())["facts"]
    (shutil.copytree(base / "features", base / "begun") / "features.json").write_text(json.dumps({"facts": facts}))
    for stored, more, message in [
        ("of-other", (), "of other data than this run"),
        ("features", ("data.caption=json:url",), "of other captions than this run"),
        ("nowhere", (), "no features of `neuclip features`"),
        ("features", ("objective.distill=0",), "needs a weight above 0 and the folder"),
        ("begun", (), "not complete: run `neuclip features` again"),
    ]:
        with pytest.raises(UserError, match=message):
            train_here(*settings(base, "refused", *more, stored=stored))
    assert not (base / "refused").exists()


def test_a_damaged_record_ends_the_run_with_the_samples_number(base, monkeypatch):
    shutil.copytree(base / "features", base / "torn")
    body = damage(base / "torn" / "features.npy")
    with pytest.raises(UserError, match=r"2 of the 48 features checked are .* \(that of sample 47, .* 1 of all 48"):
        train_here(*settings(base, "refused", stored="torn"))
    assert not (base / "refused").exists()
    monkeypatch.setattr("pipeline.data.loading.stored_features.LOOKED_AT", 1)  # as in a large dataset
    with pytest.raises(UserError, match="has no features of sample 47, or damaged ones"):
        train_here(*settings(base, "torn-run", stored="torn"))
    logged = [record.get("message", "") for record in metrics(base / "torn-run", "event")]
    assert "Stored features are missing: the run stops without that step." in logged
    steps = len(metrics(base / "torn-run", "train"))
    assert 0 < steps < 6
    assert (base / "torn-run" / "checkpoints" / f"step-{steps:08d}").is_dir(), "no step is lost"
    body[len(body) // 2 :] = bytes(len(body) - len(body) // 2)
    (base / "torn" / "features.npy").write_bytes(body)
    with pytest.raises(UserError, match=r"no features of sample \d+, or damaged ones") as first:
        train_here(*settings(base, "torn-at-once", stored="torn"), "batch_size=48", "samples=48")
    assert "saved up to step" not in str(first.value), "no step was taken"
    assert features(base, output="torn").exit_code == 0
    train_here(*settings(base, "torn-run", stored="torn"), resume="latest")
    train_here(*settings(base, "not-torn", stored="features"))
    assert equal(weights(base / "torn-run"), weights(base / "not-torn"))
    assert any("1 of 48 samples have no features: the run ends if it reaches one" in message for message in logged)


def test_a_file_that_cannot_be_written_or_read_ends_the_command_with_its_name(base, monkeypatch):
    write = os.pwrite

    def full(descriptor, data, offset):
        if offset > 2000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    def too_large(descriptor, size):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        result = features(base, output="full")
        patched.setattr(os, "ftruncate", too_large)
        found = str(features(base, output="large").exception)
    assert "could not be stored" in str(result.exception)
    assert "2 of 2 shards" not in result.output
    assert "stored" not in json.loads((base / "full" / "features.json").read_text())
    assert re.search(r"features\.npy, of 0\.0 MB, cannot be created or opened: File too large", found)
    shutil.copytree(base / "features", base / "begun-wrong")
    for text in ("[]", "null", '{"facts": 3}', "{"):
        (base / "begun-wrong" / "features.json").write_text(text)
        assert "features.json is damaged: give another --output" in str(features(base, output="begun-wrong").exception)
    (base / "begun-wrong" / "features.json").write_text('{"facts": {"tau": "x"}}')
    assert "holds features with another model (None, now " in str(features(base, output="begun-wrong").exception)


@pytest.fixture(scope="module")
def other_features(base):
    """Those of another teacher of the same architecture."""
    train_here(f"output={base / 'teacher-2'}", f"data.sources={base / 'shards'}", "samples=8", "seed=5",
               f"model.arch={base / 'small.json'}", "data.corrupt_limit=0.1")  # fmt: skip
    assert features(base, model="teacher-2", output="features-2").exit_code == 0
    return base / "features-2"


def test_features_and_facts_of_two_models_are_refused_and_written_again(base, other_features):
    mixed = shutil.copytree(base / "features", base / "mixed")
    shutil.copy(other_features / "features.npy", mixed)
    with pytest.raises(UserError, match=r"48 of the 48 features checked are missing, damaged or of another model"):
        train_here(*settings(base, "refused", stored="mixed"))
    assert features(base, output="mixed").exit_code == 0
    assert (mixed / "features.npy").read_bytes() == (base / "features" / "features.npy").read_bytes()
    body = (base / "features" / "features.npy").read_bytes()
    (mixed / "features.npy").write_bytes(body.replace(b"(32,)", b"(16,)"))
    with pytest.raises(UserError, match=r"features\.npy does not hold 48 records of 32 <f2"):
        train_here(*settings(base, "refused", stored="mixed"))


def test_shards_that_are_away_or_altered_give_no_features_and_lose_none(base):
    """Regression test: another dataset's shard gave features, which stayed when the shard was restored; of a shard that
    was away, -26 samples were lost, because the disk was full."""
    shutil.copytree(base / "shards", base / "altered")
    shard = base / "altered" / "00001.tar"
    original, gone = shard.read_bytes(), "28 samples are in shards that cannot be read (shard cannot be read: "
    other = (base / "other" / "00000.tar").read_bytes()
    for content, message in ((None, gone), (other, f"{gone}its bytes are not"), (original[:-1] + b"x", gone)):
        shard.unlink() if content is None else shard.write_bytes(content)
        assert message in str(features(base, data="altered", output="of-altered").exception)
        with pytest.raises(UserError, match="not complete"):
            StoredFeatures(base / "of-altered", setting=TEACHER)
    shard.write_bytes(original)
    shutil.copytree(base / "teacher", base / "moved-teacher")  # a job continues with a teacher that was moved
    assert features(base, model="moved-teacher", data="altered", output="of-altered").exit_code == 0
    assert (base / "of-altered" / "features.npy").read_bytes() == (base / "features" / "features.npy").read_bytes()
    records = np.load(base / "of-altered" / "features.npy")
    records["crc32"][30:32] = 0
    np.save(base / "of-altered" / "features.npy", records)
    shard.unlink()
    found = str(features(base, data="altered", output="of-altered").exception)
    assert "2 samples are in shards that cannot be read" in found


def test_facts_that_are_impossible_or_of_other_records_are_refused(base, tmp_path, monkeypatch):
    wrong = {"tau": math.nan, "bias": math.inf, "dim": 2.5, "data": "x", "crops": 3}
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (base / "features", {"facts": {name: value}}, rf"\(in features\.json, {name} is wrong: ")
        for name, value in wrong.items()
    ]
    says = r"features\.json says that {} of 48 samples have features"
    refused += [(base / "features", {"stored": stored}, says.format(stored)) for stored in (99, -1, 46.5)]
    damaged = "48 of the 48 features checked are missing, damaged or of another"
    others = ({"model": "x"}, {"data": ["x"]}, {"caption": "json:url"})
    refused += [(base / "features", {"facts": other}, damaged) for other in others]
    for number, (stored, given, message) in enumerate(refused):
        with pytest.raises(UserError, match=message):
            StoredFeatures(changed(stored, tmp_path / str(number), **given), setting=TEACHER)
    teacher = StoredFeatures(base / "features", setting=TEACHER)
    nan = b"\x00\x7e" * (len(teacher.file.read(4)) // 2)
    monkeypatch.setattr(teacher.file, "read", lambda sample_id: nan)
    with pytest.raises(UserError, match="has no features of sample 5, or damaged ones"):
        teacher.read(torch.tensor([5]))


def test_a_run_goes_on_with_the_teacher_with_which_it_began(base, other_features):
    began = settings(base, "taught", "checkpoint.every=3")
    train_here(*began)
    shutil.rmtree(max((base / "taught" / "checkpoints").glob("step-*")))
    before = {path: path.read_bytes() for path in (base / "taught").rglob("*") if path.is_file()}
    with pytest.raises(
        UserError, match=r"other features than data\.teacher_features names: model was \w{64}, now \w{64}"
    ):
        train_here(*settings(base, "taught", "checkpoint.every=3", stored="features-2"), resume="latest")
    assert {path: path.read_bytes() for path in (base / "taught").rglob("*") if path.is_file()} == before
    shutil.copytree(base / "features", base / "moved")
    off = ("objective.distill=0", "data.teacher_features=null")
    train_here(*settings(base, "taught", "checkpoint.every=3", "samples=32", *off), resume="latest")
    with pytest.raises(UserError, match="other features than data"):
        train_here(*settings(base, "taught", "checkpoint.every=3", stored="features-2"), resume="latest")
    train_here(*settings(base, "taught", "checkpoint.every=3", stored="moved"), resume="latest")


def test_a_step_without_a_batch_needs_no_features(base):
    """The ids of the batch that stands in may be those of samples without features, such as 7."""
    run = load_recipe(None, [*SMALL, *settings(base, "standing-in")])
    Path(run.output).mkdir()
    with in_this_process(), start_world(device="cpu") as world, setup(run, world=world, resume=None) as trainer:
        trainer.state.step = 4
        with pytest.raises(RunEnds, match="Stopped after step 4 by a signal") as ended:
            trainer.train_step(trainer.state.loader.stand_in(), problem=NoBatch())
        assert (ended.value.code, ended.value.save) == (75, True)


@pytest.mark.slow
def test_runs_distill_the_same_with_micro_batches_and_on_two_ranks(base):
    train_here(*settings(base, "whole"))
    distilled = values(base, "whole", "distillation_loss")
    assert np.mean(distilled[-2:]) < np.mean(distilled[:2])
    assert any("Teacher: " in record.get("message", "") for record in metrics(base / "whole", "event"))
    train_here(*settings(base, "micro", "engine.micro_batch=4"))
    assert values(base, "micro") == pytest.approx(values(base, "whole"), rel=1e-4)
    run("jobs.train", *SMALL, *settings(base, "ranks"), ranks=2)
    assert values(base, "ranks") == pytest.approx(values(base, "whole"), rel=1e-4)
