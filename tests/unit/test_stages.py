"""Stages of a run: settings, resized position embeddings, shortened texts, their cost, and signals between two."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from open_clip.model import resize_pos_embed

from pipeline.checkpoint.writer import CheckpointWriter
from pipeline.distributed.signals import EXIT_PREEMPTED
from pipeline.errors import UserError
from pipeline.model.model_folder import resized, resized_state
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.model.trimming import TextTrimming
from pipeline.planning.run_plan import plan_run
from pipeline.training import run as run_module
from pipeline.training.build import check_stages
from pipeline.training.periodic_tests import PeriodicTests
from pipeline.training.recipe import load_recipe, stage_at, stages_of
from pipeline.training.run import train
from tests.metrics import equal, metrics, weights
from tests.own_tasks import write_class_folders
from tests.shards import write_shards
from tests.towers import TINY
from tests.training import SMALL, in_this_process, prepare, settings_in, train_here
from tests.unit.test_attention import write_kind

RECIPES = Path(__file__).parents[2] / "jobs" / "recipes"
DATA = ("output=x", "data.sources=x", "samples=1000", "batch_size=10", "schedule.warmup_steps=0", "data.streams=10")


def recipe(*stages, arch="scenes-vit-tiny", more=()):
    return load_recipe(None, [*DATA, f"model.arch={arch}", f"schedule.stages=[{', '.join(stages)}]", *more])


def test_position_embeddings_are_resized_as_in_open_clip(tmp_path):
    small, _ = build_towers(ModelConfig(arch=write_kind(tmp_path, "CLIP"), image_size=16), seed=0)
    large, _ = build_towers(ModelConfig(arch=write_kind(tmp_path, "CLIP"), image_size=48), seed=0)
    expected = dict(small.clip.state_dict())
    resize_pos_embed(expected, large.clip)
    shapes = {name: value.shape for name, value in large.clip.state_dict().items()}
    found = resized_state(small.clip.state_dict(), shapes=shapes)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    large.clip.load_state_dict(found)


def test_second_moments_stay_positive_and_other_parameters_keep_their_shape():
    name = "visual.positional_embedding"
    value = torch.zeros(1 + 25, 3)
    value[1 + 12] = 1.0
    shapes = {name: torch.Size([1 + 121, 3])}
    moments = resized_state({(name, "exp_avg"): value, (name, "exp_avg_sq"): value}, shapes=shapes)
    assert moments[name, "exp_avg"].min() < 0
    assert moments[name, "exp_avg_sq"].min() >= 0
    assert moments[name, "exp_avg_sq"].shape == (122, 3)
    for other, old, new in (("visual.trunk.pos_embed", (1, 17, 8), (1, 26, 8)), (name, (17, 8), (25, 8)),
                           ("positional_embedding", (17, 8), (26, 8)), ("visual.proj", (17, 8), (26, 8))):  # fmt: skip
        with pytest.raises(UserError, match=f"The parameter {other} is"):
            resized(other, torch.zeros(old), shape=torch.Size(new))


def test_stage_settings_override_the_model_settings():
    run = recipe("{until: 0.25, image_size: 16, text_tokens: 8}", "{until: 0.5, patch_dropout: 0.0, lr_scale: 0.5}",
                 more=("model.patch_dropout=0.3",))  # fmt: skip
    assert [(stage.first, stage.end, stage.run) for stage in stages_of(recipe())] == [(0, 100, recipe())]
    found = [(s.first, s.end, s.run.model.image_size, s.run.model.text_tokens, s.run.model.patch_dropout)
             for s in stages_of(run)]  # fmt: skip
    assert found == [(0, 25, 16, 8, 0.3), (25, 50, None, None, 0.0), (50, 100, None, None, 0.3)]
    assert [stage_at(run, step).number for step in (0, 24, 25, 49, 50, 99, 100)] == [0, 0, 1, 1, 2, 2, 2]


def test_stages_without_steps_or_unsupported_by_the_architecture_are_rejected(tmp_path):
    for until in ((0.5, 0.5), (0.5, 0.2), (0.001,), (0.999,)):
        with pytest.raises(UserError, match="every stage needs a step"):
            recipe(*(f"{{until: {share}}}" for share in until))
    with pytest.raises(UserError, match=r"model\.text_tokens=4: The text tower is not"):
        check_stages(recipe("{until: 0.5, text_tokens: 4}", arch=write_kind(tmp_path, "bidirectional")))
    vision = {"timm_model_name": "vit_tiny_patch16_224", "timm_model_pretrained": False, "timm_pool": "",
              "image_size": 224}  # fmt: skip
    (tmp_path / "timm.json").write_text(json.dumps({**TINY, "vision_cfg": vision}))
    with pytest.raises(UserError, match="Only position embeddings of open_clip's own vision towers"):
        check_stages(recipe("{until: 0.42, image_size: 16}", arch=str(tmp_path / "timm.json")))


def test_long_texts_keep_their_end_token():
    text = torch.tensor([[5, 1, 2, 3, 4, 9, 0, 0], [5, 1, 9, 0, 0, 0, 0, 0], [5, 1, 2, 9, 0, 0, 0, 0]])
    expected = [[5, 1, 2, 9, 0, 0, 0, 0], [5, 1, 9, 0, 0, 0, 0, 0], [5, 1, 2, 9, 0, 0, 0, 0]]
    for eos_id in (None, 9):
        trimming = TextTrimming(eos_id, longest=4)
        short, lengths = trimming.cut(text)
        assert short.tolist() == expected
        assert lengths.tolist() == [4, 3, 4]
        assert trimming.cut(short)[1].tolist() == [4, 3, 4]
    assert TextTrimming(9, longest=8).cut(text)[0] is text


def test_a_plan_sums_over_its_stages():
    whole = plan_run(recipe(), gpus=1, dataset_size=100_000)
    staged = plan_run(recipe("{until: 0.4, image_size: 32, text_tokens: 8}"), gpus=1, dataset_size=100_000)
    assert len(staged.stages) == 2
    first, second = (flops for _, flops in staged.stages)
    assert staged.flops == first + second
    assert second == pytest.approx(0.6 * whole.flops)
    assert first < 0.5 * 0.4 * whole.flops
    assert staged.memory == whole.memory


@pytest.mark.parametrize("name", ["cc12m", "dfn192m", "dfn1b"])
def test_fast_recipes_are_their_base_recipe_with_stages(name):
    base, fast = (load_recipe(RECIPES / f"{n}.yaml", ["output=x"]) for n in (name, f"{name}-fast"))
    assert fast.schedule.stages
    assert load_recipe(RECIPES / f"{name}-fast.yaml", ["output=x", "schedule.stages=[]"]) == base
    slow, quick = (plan_run(run, gpus=8, dataset_size=100_000).flops for run in (base, fast))
    ratio = slow / quick
    assert f"{ratio:.1f} times less" in (RECIPES / f"{name}-fast.yaml").read_text()


def test_recipes_that_extend_each_other_are_rejected(tmp_path):
    for one, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{one}.yaml").write_text(f"extends: {other}\n")
    with pytest.raises(UserError, match="extends itself"):
        load_recipe(tmp_path / "a.yaml", DATA)


STEPS, BORDER = 6, 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = prepare(tmp_path_factory.mktemp("stops"), image_size=32)
    write_shards(folder / "held-out", [24])
    write_class_folders(folder)
    (folder / "tasks.yaml").write_text("folders: {folder: photos}\n")
    return folder


def settings(base, name):
    tests = [f"validation.sources={base / 'held-out'}", f"evaluation.suite={base / 'tasks.yaml'}"]
    tests += ["validation.every=3", "evaluation.every=3", "evaluation.workers=0", f"samples={8 * STEPS}"]
    return settings_in(base, name, *tests, "schedule.stages=[{until: 0.5, image_size: 16}]", "checkpoint.every=100")


@pytest.fixture(scope="module")
def whole(base):
    train_here(*settings(base, "whole"))
    return base / "whole"


@pytest.mark.parametrize(
    ("owner", "name"),
    [(PeriodicTests, "validate"), (CheckpointWriter, "finish"), (run_module, "check_stages")],  # of the next stage
)
def test_a_signal_after_the_last_step_of_a_stage_stops_the_run(owner, name, base, whole, monkeypatch, caplog):
    output = f"stopped-{owner.__name__}-{name}"
    plain, sent = getattr(owner, name), []

    def stop_and_go_on(*arguments, **named):
        trained = (base / output / "metrics.jsonl").exists() and len(metrics(base / output, "train"))
        if not sent and trained == BORDER:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return plain(*arguments, **named)

    monkeypatch.setattr(owner, name, stop_and_go_on)
    with in_this_process():
        assert train(load_recipe(None, [*SMALL, *settings(base, output)]), resume="latest") == EXIT_PREEMPTED
    monkeypatch.undo()
    said = f"--resume latest found no checkpoint in {base / output / 'checkpoints'}: the run starts anew."
    assert said in (base / output / "metrics.jsonl").read_text()
    assert [record["step"] for record in metrics(base / output, "train")] == [1, 2, 3]
    train_here(*settings(base, output), resume="latest")
    assert "decoded differently" not in caplog.text  # a stage may have another image size
    assert equal(weights(base / output, STEPS), weights(whole, STEPS))
    for kind in ("train", "validation", "evaluation"):
        found, expected = ([record["step"] for record in metrics(f, kind)] for f in (base / output, whole))
        assert found == expected
