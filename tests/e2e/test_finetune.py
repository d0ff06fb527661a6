"""Fine-tuning as a user does it: from a run, a folder or a file, at other sizes, with locked towers and layer decay."""

import json
import math

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from jobs.export import command as export
from jobs.pairs import small_batch
from jobs.train import command
from pipeline.errors import UserError
from pipeline.model.finetuning import LoraConfig
from pipeline.model.model_folder import create_from
from pipeline.model.starting_weights import start_in
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.training.recipe import load_recipe
from pipeline.training.run import train as run_training
from tests.launch import ROOT, run
from tests.metrics import metrics
from tests.shards import write_shards
from tests.towers import TINY
from tests.training import SMALL, in_this_process, prepare, settings_in, train_here

CONFIG = {**TINY, **{side: {**TINY[side], "layers": 2} for side in ("vision_cfg", "text_cfg")}}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with shards, an architecture, and a run `first` of 4 steps on them."""
    folder = tmp_path_factory.mktemp("finetune")
    write_shards(folder / "shards", [20, 30])
    (folder / "small.json").write_text(json.dumps(CONFIG))
    train(folder, "first", f"model.arch={folder / 'small.json'}", "objective.name=openclip", "objective.tau_init=0.2")
    return folder


def train(base, output, *more, resume=None):
    """Train in this process and return the run's messages."""
    train_here(*fixed(base, output), *more, resume=resume)
    return " ".join(record["message"] for record in metrics(base / output, "event"))


def fixed(base, output):
    return [f"output={base / output}", f"data.sources={base / 'shards'}", "samples=32"]


def checkpoint(base, output, step=4):
    return base / output / "checkpoints" / f"step-{step:08d}"


def weights(base, output):
    return load_file(checkpoint(base, output) / "open_clip_model.safetensors")


def first_tau(base, output):
    return float(metrics(base / output, "train")[0]["tau"])


def test_a_run_starts_from_another_with_its_temperature_at_other_sizes(base):
    learned = math.exp(-float(weights(base, "first")["logit_scale"]))
    assert abs(learned - 0.2) > 1e-4
    printed = train(base, "second", "model.arch=pretrained", f"model.pretrained={base}/first", "model.image_size=32",
                    "model.context_length=16", "objective.name=openclip",
                    "optimizer.lr=1e-12", "objective.tau_lr=0")  # fmt: skip
    assert f"whose temperature is {learned:.4g}; that of the objective starts at {learned:.4g}." in printed
    assert first_tau(base, "second") == pytest.approx(learned, rel=1e-5)
    before, after = weights(base, "first"), weights(base, "second")
    assert after["visual.positional_embedding"].shape == (17, 32)
    assert after["positional_embedding"].shape == (16, 16)
    same = [name for name in before if "positional" not in name]
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in same)
    stored = json.loads((checkpoint(base, "second") / "open_clip_config.json").read_text())
    assert stored["model_cfg"]["text_cfg"]["context_length"] == 16
    assert stored["model_cfg"]["vision_cfg"]["image_size"] == [32, 32]
    train(base, "second", "model.arch=pretrained", f"model.pretrained={base}/first", "model.image_size=32",
          "model.context_length=16", "objective.name=openclip", "samples=48", resume="latest")  # fmt: skip
    assert checkpoint(base, "second", 6).is_dir()


def test_the_initial_temperature_of_the_objective_can_be_used(base):
    file = checkpoint(base, "first") / "open_clip_model.safetensors"
    printed = train(base, "own-tau", f"model.arch={base}/small.json", f"model.pretrained={file}",
                    "objective.name=openclip", "model.pretrained_temperature=false", "objective.tau_init=0.07",
                    "objective.tau_lr=0")  # fmt: skip
    assert "that of the objective starts at 0.07." in printed
    assert first_tau(base, "own-tau") == pytest.approx(0.07)


def test_a_locked_tower_stays_bit_identical_and_the_rest_is_trained(base):
    start = ["model.arch=pretrained", f"model.pretrained={checkpoint(base, 'first')}", "objective.name=openclip"]
    image = ["model.lock_image=true", "model.unlocked_image_blocks=1"]
    train(base, "lit-bf16", *start, *image, "engine.deepspeed=zero1_bf16")
    train(base, "lit-fp32", *start, *image, "engine.deepspeed=zero0_fp32")
    run("jobs.train", *SMALL, *fixed(base, "text"), *start[:2], "model.lock_text=true", ranks=2)
    before = weights(base, "first")
    for output, locked, trained in (
        ("lit-bf16", "visual.", {"visual.proj"}),
        ("lit-fp32", "visual.", {"visual.proj"}),
        ("text", "", {"logit_scale"}),
    ):
        moved = {name for name, value in weights(base, output).items() if not torch.equal(before[name], value)}
        of_image = {name for name in moved if name.startswith("visual.")}
        assert (of_image if locked else moved - of_image) <= trained
        assert {"visual.proj", "token_embedding.weight"} <= moved if locked else "visual.conv1.weight" in moved


@pytest.mark.parametrize("precision", ["zero2_fp32", "zero0_fp32"])
def test_layer_decay_changes_the_first_layers_least(base, precision):
    """Adam's first updates equal the learning rate in size, so the ratio of changes is the ratio of learning rates."""
    common = ["model.arch=pretrained", f"model.pretrained={base}/first", "optimizer.weight_decay=0",
              "objective.name=openclip", "samples=8",
              f"engine.deepspeed={precision}", "optimizer.eps=1e-12"]  # fmt: skip
    train(base, f"decay-{precision}", *common, "optimizer.layer_decay=0.5", "optimizer.lr=1e-3")
    before = weights(base, "first")
    after = load_file(checkpoint(base, f"decay-{precision}", 1) / "open_clip_model.safetensors")

    def change(name):
        return float((after[name] - before[name]).abs().median())

    assert change("visual.proj") == pytest.approx(1e-3, rel=0.05)
    assert change("visual.transformer.resblocks.1.mlp.c_fc.weight") == pytest.approx(5e-4, rel=0.05)
    assert change("transformer.resblocks.0.mlp.c_fc.weight") == pytest.approx(2.5e-4, rel=0.05)
    assert change("visual.conv1.weight") == pytest.approx(1.25e-4, rel=0.05)


def test_incompatible_settings_are_rejected_before_the_run_starts(base):
    cases = [
        (["model.arch=pretrained"], "must then be a model folder, a run or hf-hub:OWNER/NAME; it is None"),
        (["model.arch=ViT-B-32", f"model.pretrained={base}/first"], "holds another architecture"),
        (["model.arch=coca_ViT-B-32"], "is a CoCa model"),
        (["model.arch=pretrained", f"model.pretrained={base / 'shards'}"], "neither a folder with"),
        (["model.arch=pretrained", f"model.pretrained={base}/first", "model.lock_image=true",
          "model.lock_text=true"],
         "nothing is left to train"),
    ]  # fmt: skip
    for more, message in cases:
        result = CliRunner().invoke(command, [*SMALL, *fixed(base, "refused"), *more, "--dry-run"])
        assert message in str(result.exception), result.output


def test_adapters_are_trained_merged_saved_alone_and_resumed_to_the_bit(base):
    peft = pytest.importorskip("peft")
    given = ["model.arch=pretrained", f"model.pretrained={base}/first", "model.lora.rank=2",
             "engine.micro_batch=4", "checkpoint.every=2", "checkpoint.keep_last=9"]  # fmt: skip
    train(base, "lora", *given)
    before, after = weights(base, "first"), weights(base, "lora")
    changed = {name for name in before if not torch.equal(before[name], after[name])} - {"logit_scale"}
    layers = [f"{tower}transformer.resblocks.{block}.mlp.c_{kind}"
              for tower in ("", "visual.") for block in (0, 1) for kind in ("fc", "proj")]  # fmt: skip
    assert changed == {f"{layer}.weight" for layer in layers}
    assert before.keys() == after.keys()

    adapters = checkpoint(base, "lora") / "adapters"
    stored = load_file(adapters / "adapter_model.safetensors")
    assert sum(value.numel() for value in stored.values()) == 2 * 2 * 2 * ((32 + 64) + (16 + 64))
    plain, _ = create_from(start_in(checkpoint(base, "first")))
    by_peft = peft.PeftModel.from_pretrained(plain, adapters).merge_and_unload().state_dict()
    assert all(torch.allclose(by_peft[name], after[name], atol=1e-7) for name in changed)

    folder = base / "a hub folder"
    exported = CliRunner().invoke(export, [str(base / "lora"), "--output", str(folder)], catch_exceptions=False)
    assert "adapters/adapter_model.safetensors" in exported.output
    for path in adapters.iterdir():
        assert (folder / "adapters" / path.name).read_bytes() == path.read_bytes()
    assert "`adapters/` has them alone" in (folder / "README.md").read_text()

    train(base, "again", *given, resume=str(checkpoint(base, "lora", 2)))
    for file in ("open_clip_model", "adapters/adapter_model", "moments", "objective"):
        one, other = (load_file(checkpoint(base, name) / f"{file}.safetensors") for name in ("lora", "again"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    for stage in (0, 2):
        more = [f"engine.deepspeed=zero{stage}_fp32", *given]
        train(base, f"stage{stage}", *more, resume=str(checkpoint(base, "lora", 2)))
        for name, value in weights(base, f"stage{stage}").items():
            assert torch.allclose(value, after[name], atol=1e-5), name

    for more, words in (
        (["model.lora.rank=null"], "has adapters, and model.lora.rank = None"),
        (["model.pretrained=" + str(checkpoint(base, "lora"))], "has other weights than those beside which"),
    ):
        with pytest.raises(UserError, match=words):
            train(base, "refused", *given, *more, resume=str(checkpoint(base, "lora", 2)))


def test_what_adapters_do_not_work_with_is_refused_in_one_message():
    common = ["output=x", "data.sources=x", "samples=32", "batch_size=8", "data.streams=4", "schedule.warmup_steps=1"]
    for given, words in (
        (["model.pretrained=null"], "model.lora needs model.pretrained, which is not given"),
        (["ema.decay=0.9", "model.compile=true"], "model.lora needs no ema.decay; no model.compile"),
        (["engine.deepspeed=zero3_fp32"], "a ZeRO stage below 3"),
        (["model.lock_text=true", "model.unlocked_text_blocks=1"], "whole towers locked or none"),
    ):
        with pytest.raises(UserError, match=words):
            load_recipe(None, [*common, "model.lora.rank=2", "model.pretrained=x", *given])
    with pytest.raises(UserError, match="statistics of this architecture's batch norms"):
        build_towers(ModelConfig(arch="RN50", lora=LoraConfig(rank=2)), seed=0, device="meta")


@pytest.mark.parametrize("pairs", [60, 700])
def test_the_command_that_pairs_prints_for_few_pairs_learns(tmp_path, pairs):
    folder = prepare(tmp_path, (pairs,))
    train_here(*settings_in(folder, "start", "samples=160", "optimizer.lr=1e-3"))
    given = [f"output={folder / 'tuned'}", f"data.sources={folder / 'shards'}", "model.arch=pretrained"]
    here = ["engine.device=cpu", "engine.deepspeed=zero1_fp32", "data.workers=0", "telemetry.tensorboard=false",
            "telemetry.progress=quiet"]  # fmt: skip
    with in_this_process():
        tuned = [*given, f"model.pretrained={folder / 'start'}", *small_batch(pairs).split(), *here]
        run = load_recipe(ROOT / "jobs" / "recipes" / "finetune.yaml", tuned)
        assert run.optimizer.lr == 1e-5, "it is not scaled down with the batch"
        assert run_training(run, resume=None) == 0
    losses = [record["loss"] for record in metrics(folder / "tuned", "train")]
    assert len(losses) >= 200
    assert sum(losses[-20:]) / 20 < sum(losses[:20]) / 20 - 0.004
