"""What a run says first, what a resumed one reports, and what is missing before anything is loaded."""

import gc

import pytest
import torch
from huggingface_hub import constants

from jobs import train
from pipeline.errors import UserError
from pipeline.metrics.logger import TelemetryConfig
from pipeline.metrics.trackers import check_trackers
from pipeline.model.starting_weights import check_fetched
from pipeline.training import run
from pipeline.training.recipe import load_recipe
from pipeline.training.run_folder import changed_settings
from tests.towers import write_tiny


def test_the_block_says_what_will_be_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "usable_cores", lambda: 2)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("{reference_batch: 256, optimizer: {lr: 1.0e-5}, schedule: {warmup_steps: 1}}")
    scaled = {}
    given = [f"output={tmp_path / 'run'}", "data.sources=x", "data.streams=64", "batch_size=64", "samples=640"]

    def block(arch, *, ranks):
        run = load_recipe(recipe, [*given, f"model.arch={arch}"], scaled=scaled)
        return "\n".join(train.start_lines(run, pairs=320, ranks=ranks, scaled=scaled))

    tiny = block(write_tiny(tmp_path), ranks=1)
    for part in ("10 steps of batch_size=64 (2.00 times", "320 pairs", "CPU, 1 rank", "2.5e-06 = 1e-05 x 64/256"):
        assert part in tiny
    assert "WARNING" not in tiny
    given[3:] = ["batch_size=256", "samples=2560"]
    unlikely = block("ViT-B-32", ranks=8)
    assert "WARNING: torch uses no GPU here: a step is 1" in unlikely
    assert "WARNING: 8 ranks share 2 cores" in unlikely


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_not_here_without_a_network_is_said_at_once(offline, tmp_path, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path), raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    why = "HF_HUB_OFFLINE is set" if offline else "http://127.0.0.1:9 cannot be reached"
    for arch, pretrained, missing in (
        ("ViT-B-32-quickgelu", "openai", "model.pretrained = openai of ViT-B-32-quickgelu"),
        ("pretrained", "hf-hub:someone/model", "hf-hub:someone/model"),
        ("ViT-B-16-SigLIP", None, "The tokenizer timm/ViT-B-16-SigLIP"),
        ("xlm-roberta-base-ViT-B-32", None, "The text tower xlm-roberta-base"),
    ):
        with pytest.raises(UserError, match=f"^{missing} is not in this machine's cache, and {why}"):
            check_fetched(arch, pretrained, tokenizer=None)
        assert offline == constants.HF_HUB_OFFLINE


def test_a_tracker_may_be_a_string_and_needs_a_login(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    assert TelemetryConfig(trackers="wandb, trackio").trackers == ("wandb", "trackio")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        monkeypatch.setenv("WANDB_MODE", "offline")
        check_trackers(["wandb"])
        wandb.teardown()  # it keeps the settings of its first use
        monkeypatch.delenv("WANDB_MODE")
        with pytest.raises(UserError, match=r"telemetry\.trackers=wandb: there is no login .*WANDB_MODE=offline"):
            check_trackers(["wandb"])
    finally:
        wandb.teardown()


def test_a_setting_that_the_checkpoint_does_not_have_is_reported_also_if_it_is_null():
    before = {"output": "a", "samples": 10, "model": {"arch": "x"}}
    now = {"output": "b", "samples": 20, "model": {"arch": "x", "lock_text": False}}
    assert changed_settings(before, now) == ["samples 10 -> 20", "model.lock_text absent -> False"]
    assert changed_settings(now, now) == []
    for ratio, changes in ((None, []), (0.5, ["selection.ratio 0.5 -> absent"])):  # a setting that has left
        assert changed_settings({"selection": {"ratio": ratio}, **now}, now) == changes


def test_the_full_collections_of_a_start_do_not_look_at_imports():
    """With DeepSpeed they are about ten, of a quarter of a second each."""
    with run._end_recorded():
        assert gc.get_freeze_count() > 100_000
    assert gc.get_freeze_count() == 0
