"""The training job as a user starts it: any world size, stopped and resumed, on another layout, in stages."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.objectives import objective_names
from pipeline.training import hooks
from pipeline.training.recipe import load_recipe
from pipeline.training.step import lr_scale
from tests.launch import run
from tests.metrics import equal, metrics, weights
from tests.training import SMALL, prepare, settings_in, train_here

STEPS, BATCH = 12, 8


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("train"), [20, 30, 15])


def settings(base, output, *more):
    given = [*SMALL, f"samples={STEPS * BATCH}", "schedule.warmup_steps=3", "checkpoint.every=6"]
    given += ["telemetry.progress=auto", "objective.name=neuclip", "objective.prototypes=16"]
    return settings_in(base, output, *given, "objective.restart_every=5", "objective.inner_steps=3", *more)


def records(run_folder):
    return {record["step"]: record for record in metrics(run_folder, "train")}


@pytest.fixture(scope="module")
def two_ranks(base):
    """An uninterrupted run on two ranks."""
    run("jobs.train", *settings(base, "two"), ranks=2)
    return base / "two"


@pytest.fixture(scope="module")
def one_rank(base):
    """The same run on one rank."""
    train_here(*settings(base, "one"))
    return base / "one"


@pytest.mark.slow
def test_one_rank_equals_two(one_rank, two_ranks):
    alone, together = records(one_rank), records(two_ranks)
    assert list(alone) == list(together) == list(range(1, STEPS + 1))
    for step, record in alone.items():
        for key in ("loss", "tau", "normalizer_gap", "lr", "samples", "epoch", "text_tokens"):
            assert record[key] == pytest.approx(together[step][key], rel=1e-5, abs=1e-6), (step, key)
    for name, value in weights(one_rank).items():
        torch.testing.assert_close(value, weights(two_ranks)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "ranks"), [("zero2_fp32", 0), ("zero3_fp32", 2)])
def test_resuming_on_another_stage_and_number_of_ranks(base, two_ranks, one_rank, stage, ranks):
    """From ZeRO-1 x 2 to one rank, and from ZeRO-1 x 1 to two."""
    resumed = base / f"other-{stage}-{ranks}"
    shutil.copytree(one_rank if ranks else two_ranks, resumed)
    shutil.rmtree(resumed / "checkpoints" / f"step-{STEPS:08d}")
    run("jobs.train", *settings(base, resumed.name, f"engine.deepspeed={stage}"), "--resume", "latest", ranks=ranks)
    for name, value in weights(resumed).items():
        torch.testing.assert_close(value, weights(one_rank)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_every_objective_trains_and_resumes_bit_identically(base):
    for name in objective_names():
        # With default settings: some settings, such as prototypes and inner updates, exist only for some methods.
        kept = [s for s in settings(base, name, "samples=48", "checkpoint.every=3") if not s.startswith("objective.")]
        last = base / name / "checkpoints" / "step-00000006"
        found = []
        for resume in (None, "latest"):
            train_here(*kept, f"objective.name={name}", resume=resume)
            found.append([load_file(last / f"{file}.safetensors") for file in ("objective", "open_clip_model")])
            shutil.rmtree(last)
        assert all(equal(*states) for states in zip(*found, strict=True)), name


@pytest.mark.slow
def test_activation_checkpointing_is_bit_identical(base):
    common = ("engine.deepspeed=zero1_bf16", "model.patch_dropout=0.5", "engine.micro_batch=4")
    for name, wanted in (("kept", "false"), ("again", "true")):
        train_here(*settings(base, name, *common, f"model.grad_checkpointing={wanted}"))
    assert equal(weights(base / "again"), weights(base / "kept"))


@pytest.mark.slow
def test_histograms_and_utilization_can_be_read_back(base, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(hooks, "DISTRIBUTIONS_EVERY", 4)
    wanted = ("tensorboard=true", "peak_tflops=1e-3")
    padded = "model.text_batching=padded"  # so that every step computes as many tokens
    train_here(
        *settings(base, "observed", "objective.name=neuclip"), padded, *(f"telemetry.{setting}" for setting in wanted)
    )
    board = EventAccumulator(str(base / "observed" / "tensorboard"))
    board.Reload()
    tags = board.Tags()
    names = {"log_normalizer_of_image", "log_batch_normalizer_of_text", "prototype_norm_for_text",
             "gradient_of_image_feature", "similarity_of_pair"}  # fmt: skip
    assert {f"distribution/{name}" for name in names} <= set(tags["histograms"])
    quantiles = {line["step"]: line for line in metrics(base / "observed", "distribution")}
    assert list(quantiles) == [4, 8, 12]
    for event in board.Histograms("distribution/prototype_norm_for_text"):
        histogram, quoted = event.histogram_value, quantiles[event.step]["prototype_norm_for_text"]
        assert histogram.num == 16
        assert [histogram.min, histogram.max] == pytest.approx([quoted[0], quoted[-1]], rel=1e-5)
    assert {"train/lr", "train/tau_lr", "train/npn_lr"} <= set(tags["scalars"])
    shares = records(base / "observed")[STEPS]
    assert 0 < shares["time_npn"] < shares["time_objective"] < 1
    rates = [record["mfu"] / record["samples_per_second"] for record in records(base / "observed").values()]
    assert rates == pytest.approx([rates[0]] * STEPS, rel=1e-6)
    assert {event.step for event in board.Scalars("train/mfu")} == set(range(1, STEPS + 1))


@pytest.mark.slow
def test_evaluation_during_training_gives_the_scores_of_the_checkpoint(base):
    from data_prep.scenes.scene import ScenesConfig
    from data_prep.scenes.scene_suite import write_suite
    from pipeline.evaluation import evaluate
    from pipeline.evaluation.datasets.suite import open_suite

    write_suite(ScenesConfig(pairs=50, held_out=24, retrieval_pairs=10, image_size=32), base / "suite")
    tasks = {entry.task.key for entry in open_suite(base / "suite").entries}
    damaged = base / "suite/wds_damaged_test/test"
    damaged.mkdir(parents=True)
    (damaged / "nshards.txt").write_text("3\n")
    arguments = settings(base, "watched", f"evaluation.suite={base / 'suite'}", "evaluation.every=6")
    printed = run("jobs.train", *arguments, ranks=2).stdout
    failed = [line for line in metrics(base / "watched", "event") if "failures" in line]
    assert [(line["step"], list(line["failures"]), line["level"]) for line in failed] == [
        (6, ["damaged"], "warning"),
        (12, ["damaged"], "warning"),
    ]
    assert "Evaluation at step 12: 1 tasks failed. damaged: " in printed
    *_, model, report, following = printed.splitlines()
    assert model.endswith("watched/checkpoints/step-00000012")
    assert report.endswith(f"neuclip report {base / 'watched'}")
    assert following.endswith(f"neuclip evaluate {base / 'watched/checkpoints/step-00000012'} --suite FOLDER")
    scores = {record["step"]: record for record in metrics(base / "watched", "evaluation")}
    assert list(scores) == [6, 12]
    assert tasks <= scores[12].keys()
    # A separate evaluation of the checkpoint finds all results already computed.
    (again,) = evaluate(str(base / "watched" / "checkpoints" / f"step-{STEPS:08d}"), suite=base / "suite")
    assert set(again.reused) == tasks
    assert {task: result.score for task, result in again.results.items()} == {
        task: pytest.approx(scores[12][task], rel=1e-8) for task in tasks
    }


FIRST = 5
STAGES = "schedule.stages=[{until: 0.42, image_size: 16, text_tokens: 4, patch_dropout: 0.5, lr_scale: 0.5}]"


def staged(base, name, *more):
    train_here(
        *settings(base, name, "model.image_size=32", STAGES, "telemetry.peak_tflops=0.001", *more), resume="latest"
    )


@pytest.fixture(scope="module")
def whole(base):
    staged(base, "whole", "checkpoint.every=1", "checkpoint.keep_last=100")
    return base / "whole"


def lr(step):
    """Return the learning rate of update `step` (from 1): the run's schedule, halved in the first stage."""
    run = load_recipe(None, settings(Path(), "x"))
    share = lr_scale(run.schedule, step=step - 1, total_steps=STEPS)
    return run.optimizer.lr * share * (0.5 if step <= FIRST else 1.0)


def order_hashes(folder):
    return [record["data"]["order_hash"] for record in metrics(folder) if "data" in record]


@pytest.mark.slow
def test_image_and_text_sizes_grow_and_the_order_is_unchanged(whole, one_rank):
    rows = records(whole)
    assert sorted(rows) == list(range(1, STEPS + 1))
    flops = {step: row["mfu"] / row["samples_per_second"] for step, row in rows.items()}
    early = [value for step, value in flops.items() if step <= FIRST]
    late = [value for step, value in flops.items() if step > FIRST]
    assert max(early) < 0.5 * min(late)  # a quarter of the patches, of which half are dropped
    assert [row["lr"] for row in rows.values()] == pytest.approx([lr(step) for step in rows])
    boundary, last = weights(whole, FIRST), weights(whole)
    assert boundary["visual.positional_embedding"].shape[0] == 5
    assert last["visual.positional_embedding"].shape[0] == 17
    assert order_hashes(whole) == order_hashes(one_rank)
    assert len(order_hashes(whole)) == STEPS * BATCH // 64


@pytest.mark.slow
@pytest.mark.parametrize("stop", [FIRST - 2, FIRST])
def test_interrupted_runs_end_with_the_same_weights(stop, whole, base):
    name = f"stopped-{stop}"
    shutil.copytree(whole, base / name)
    folder = base / name / "checkpoints"
    for path in folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) > stop:
            shutil.rmtree(path)
    (folder / "latest").write_text(f"step-{stop:08d}\n")
    staged(base, name, "checkpoint.every=1", "checkpoint.keep_last=100")
    assert equal(weights(base / name), weights(whole))
    told = [record["message"] for record in metrics(base / name, "event")]
    assert any(message.startswith("Resumed from") for message in told)
    assert not any("Settings that differ" in message for message in told), "stages are no changes of settings"


@pytest.mark.slow
def test_a_compiled_run_with_every_saving_equals_one_without_compilation_and_resumes(base):
    """Towers and normalizer network; stages, patch dropout, checkpointed activations, GradCache, gradient probe."""
    savings = ("model.patch_dropout=0.25", "model.grad_checkpointing=true", "engine.micro_batch=4")
    staged(base, "eager", *savings)
    compiled = (*savings, "model.compile=true", "objective.npn_compile=true")
    staged(base, "compiled", *compiled)
    found, expected = records(base / "compiled"), records(base / "eager")
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    assert "Gradient probe" in (base / "compiled" / "metrics.jsonl").read_text()
    for step, record in expected.items():
        for key in ("loss", "tau", "normalizer_gap"):
            assert found[step][key] == pytest.approx(record[key], rel=1e-5, abs=1e-6), (step, key)
    for step in (FIRST, STEPS):
        wanted = weights(base / "eager", step)
        for name, value in weights(base / "compiled", step).items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)
    once = weights(base / "compiled")
    shutil.rmtree(base / "compiled" / "checkpoints" / f"step-{STEPS:08d}")
    staged(base, "compiled", *compiled)
    assert equal(weights(base / "compiled"), once)
