"""Invalid configurations are refused with clear messages."""

from pathlib import Path

import pytest
import yaml

from pipeline import config as cfg
from pipeline import departed
from pipeline.engine.engine_config import EngineConfig, deepspeed_settings
from pipeline.errors import UserError
from pipeline.training.recipe import load_recipe, parse_recipe

RECIPES = sorted((Path(__file__).parents[2] / "jobs" / "recipes").glob("*.yaml"))
BASE = ["output=x", "samples=1000", "batch_size=100", "data.sources=shards", "schedule.warmup_steps=2"]


def refused(*overrides):
    with pytest.raises(UserError) as caught:
        load_recipe(None, [*BASE, *overrides])
    return str(caught.value)


def test_overrides_win_over_the_recipe_and_the_defaults(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("output: y\nsamples: 10\nbatch_size: 2\ndata: {sources: a}\noptimizer: {lr: 1e-3, eps: 1e-6}\n")
    run = load_recipe(recipe, ["optimizer.lr=3e-4", "schedule.warmup_steps=0"])
    assert (run.optimizer.lr, run.optimizer.eps, run.optimizer.weight_decay) == (3e-4, 1e-6, 0.1)
    assert run.total_steps == 5


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("objective.prototypes=0", ["objective.prototypes = 0", "greater than or equal to 1"]),
        ("objective.tau_min=0", ["objective.tau_min", "greater than 0"]),
        ("objective.name=neuclp", ["'neuclp'", "neuclip"]),
        ("objective.prototype=8", ["objective.prototype", "The nearest valid key is objective.prototypes"]),
        ("optimiser.lr=1", ["optimiser", "The nearest valid key is optimizer"]),
        ("optimizer.rl=1", ["optimizer.rl", "The nearest valid key is optimizer.lr", "weight_decay"]),
        ("optimizer.lr=fast", ["optimizer.lr = 'fast'", "valid number"]),
        ("optimizer.lr=-1", ["optimizer.lr = -1", "greater than 0"]),
        ("optimizer.lr=yes", ["optimizer.lr = True: should be a valid number, not true or false."]),
        ("objective.restart_every=true", ["objective.restart_every = True: should be a valid number"]),
        ("optimizer.betas=[true, 0.98]", ["optimizer.betas = [True, 0.98]: should be a valid number"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas.1 = 1.0: should be less than 1."]),
        ("optimizer.betas=[-0.5, 0.9]", ["optimizer.betas.0 = -0.5: should be greater than or equal to 0."]),
        (f"seed={2**64}", [f"seed = {2**64}: should be less than {2**63}."]),
        ("model.unlocked_image_blocks=2", ["unlocked_image_blocks = 2 is for a locked tower: set model.lock_image"]),
        ("model.unlocked_text_blocks=1", ["unlocked_text_blocks = 1 is for a locked tower: set model.lock_text=true"]),
        ("model.lora.alpha=16", ["alpha is of adapters, and there are none: set model.lora.rank"]),
        ("data.workers=on", ["data.workers = True: should be a valid number"]),
        ("schedule.stages=[{until: false, image_size: 16}]", ["schedule.stages.0.until = False: should be"]),
        ("engine.device=tpu", ["engine.device = 'tpu'", "'auto', 'cpu' or 'cuda'"]),
        ("engine.deepspeed=zero7", ["zero7", "zero3_bf16"]),
        ("engine.micro_batch=33", ["engine.micro_batch = 33", "does not divide the local batch 100"]),
        ("samples=99", ["samples = 99", "less than one batch"]),
        ("schedule.warmup_steps=11", ["schedule.warmup_steps = 11", "10 steps"]),
        ("schedule.cooldown_share=0.2", ["cooldown_share is for kind=constant: cosine decays"]),
        ("schedule={kind: constant, warmup_steps: 6, cooldown_share: 0.5}", ["= 6 with the 5 steps of", "10 steps"]),
        ("data.augment.color_jitter_prob=0.8", ["color_jitter_prob are set together"]),
        ("data={decoding: gpu, augment: {gray_scale_prob: 0.2}}", ["data.augment works on pixels that workers decode"]),
        ("data={image_features: x, augment: {gray_scale_prob: 0.2}}", ["data.image_features are of unchanged ones"]),
        ("data.streams=0", ["data.streams = 0"]),
        ("lr", ["section.key=value"]),
        ("optimizer=[1", ["not valid YAML"]),
        ("optimizer.lr=!!bool x", ["not valid YAML"]),
        ("optimizer.lr=.inf", ["optimizer.lr = inf", "finite number"]),
        ("epoch=3", ["The nearest valid key is epochs"]),  # a recipe's key
        ("refrence_batch=8", ["The nearest valid key is reference_batch"]),
        ("method={}", ["The nearest valid key is methods"]),
    ],
)
def test_error_messages_name_key_value_and_remedy(override, parts):
    message = refused(override)
    for part in parts:
        assert part in message


def test_values_are_parsed_as_users_expect(tmp_path):
    assert cfg.parse_overrides(["a=1e6", "b=-2.5E-3", "c=2024-11-01", "d=1e", "e=1_000"]) == {
        "a": 1e6, "b": -2.5e-3, "c": "2024-11-01", "d": "1e", "e": 1000}  # fmt: skip
    run = load_recipe(None, [*BASE, "output=20241101", "epochs=null"])
    assert (run.output, run.samples) == ("20241101", 1000)
    twice = tmp_path / "twice.yaml"
    twice.write_text("optimizer: {lr: 1e-3}\nsamples: 10\noptimizer: {weight_decay: 0.1}\n")
    with pytest.raises(UserError, match="the key 'optimizer' is given twice"):
        load_recipe(twice, BASE)
    twice.write_bytes(b"samples: \xff\n")
    with pytest.raises(UserError, match=r"twice\.yaml is not valid YAML: unacceptable character #x00ff"):
        load_recipe(twice, BASE)


def test_deepspeed_files_are_filled_from_the_recipe():
    settings = deepspeed_settings(EngineConfig(gradient_clipping=1.0), global_batch=64, world_size=4)
    assert (settings["train_batch_size"], settings["train_micro_batch_size_per_gpu"]) == (64, 16)
    assert settings["gradient_clipping"] == 1.0
    assert settings["timers"]["throughput"]["enabled"] is False  # it would synchronize the device in every forward pass


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_and_round_trips(path):
    run = load_recipe(path, dataset_size=20_000)
    assert parse_recipe(yaml.safe_load(cfg.dump(run))) == run


def test_what_has_left_says_what_to_use_instead(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(departed.SETTINGS, "gone.", "Use what stays.")
    monkeypatch.setitem(departed.SETTINGS, "optimizer.gone", "It is automatic.")
    assert "The setting gone (given {'a': {'b': 1}}) was removed. Use what stays." in refused("gone.a.b=1")
    assert "The setting optimizer.gone (given 1) was removed. It is automatic." in refused("optimizer.gone=1")
    assert "data.decoding = 'scaled' was removed. `fast` decodes all" in refused("data.decoding=scaled")
    for value, logged in (
        ({"gone": {"a": False, "b": None}}, ["settings of an earlier version are ignored: gone.a = False."]),
        ({"gone": {"a": None, "b": []}}, []),
        ({"telemetry": {"progress": "brief"}}, ["are ignored: telemetry.progress = 'brief'."]),  # of every demo's run
    ):
        stored = cfg.merge(cfg.to_tree(load_recipe(None, BASE)), {**value, "optimizer": {"gone": None}})
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
        caplog.clear()
        assert load_recipe(tmp_path / "config.yaml") == load_recipe(None, BASE)
        assert len(caplog.messages) == len(logged)
        assert all(message.endswith(words) for message, words in zip(caplog.messages, logged, strict=True))
