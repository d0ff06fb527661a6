"""Estimates compared with figures calculated by hand or measured; FLOP counts, peak rates, and images with captions."""

from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from jobs.plan import command
from pipeline.errors import UserError
from pipeline.metrics.mfu import Utilization, known_peak, measure_flops, measure_towers, training_flops
from pipeline.model.towers import ModelConfig, build_towers
from pipeline.planning import measure
from pipeline.planning.run_plan import engine_memory, plan_run
from pipeline.training.recipe import load_recipe
from tests.shards import write_shards
from tests.towers import TINY, write_tiny
from tests.training import in_this_process

P = 1_000_003


@pytest.fixture(scope="module")
def arch(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("towers"))


def settings(arch, *more):
    return ["output=x", "samples=1000", "batch_size=40", "schedule.warmup_steps=2", f"model.arch={arch}",
            "data.sources=nowhere", "data.streams=4", "data.workers=0", *more]  # fmt: skip


def test_published_figures_of_vit_b_32():
    """open_clip publishes 151.28M parameters and 14.78 GFLOP for this model."""
    config = ModelConfig(arch="ViT-B-32", packed_attention=False)
    towers, architecture = build_towers(config, seed=0, device="meta")
    costs = measure_towers(towers, image_size=architecture.image_size, context_length=77)
    assert costs.parameters == 151_277_312
    assert costs.forward_flops == pytest.approx(14.78e9, rel=1e-3)


def test_saved_bytes_equal_what_autograd_saves(arch):
    """Compared with real tensors on the CPU."""
    meta, architecture = build_towers(ModelConfig(arch=arch), seed=0, device="meta")
    estimated = measure_towers(meta, image_size=architecture.image_size, context_length=8).saved_bytes
    real, _ = build_towers(ModelConfig(arch=arch), seed=0)
    real.train()
    own = {p.data_ptr() for p in real.parameters()}

    def saved(batch):
        kept: dict[int, torch.Tensor] = {}
        keep = lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) if t.data_ptr() not in own else t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            output = real(torch.zeros(batch, 3, 16, 16), torch.zeros(batch, 8, dtype=torch.int64))
        del output
        return sum(t.untyped_storage().nbytes() for t in kept.values())

    assert (saved(64) - saved(32)) / 32 == pytest.approx(estimated, rel=0.01)


@pytest.mark.parametrize("unfit", ["model.text_tokens=8", "model.text_batching=packed"])
def test_what_training_refuses_is_refused(arch, unfit):
    """Regression test: `plan` gave numbers for it, or ended as a bug."""
    given = settings("ViT-B-32", "model.packed_attention=false", unfit)
    with pytest.raises(UserError, match="It needs packed attention"):
        plan_run(load_recipe(None, given), gpus=1, dataset_size=1000)


def test_what_training_on_gpus_takes_is_planned(arch):
    """Regression test: packed texts with compiled towers were refused, also at the start of a run with stages."""
    stages = "schedule.stages=[{until: 0.5, patch_dropout: 0.5}]"
    given = settings(arch, "model.compile=true", "model.text_batching=packed", stages)
    assert plan_run(load_recipe(None, given), gpus=1, dataset_size=1000).stage == 1


def test_flops_of_towers_that_pool_by_attention_are_counted():
    """Regression test: training SigLIP's towers ended as a bug where the GPU's peak is known, and `plan` everywhere."""
    towers, architecture = build_towers(ModelConfig(arch="PE-Core-T-16-384"), seed=0, device="meta")
    assert measure_towers(towers, image_size=architecture.image_size, context_length=8).image_flops > 1e9
    assert measure_flops(towers, image_size=architecture.image_size, context_length=8) > 1e9


def test_checkpointing_saves_memory(arch):
    full, less = (
        plan_run(load_recipe(None, settings("ViT-B-32", *more)), gpus=1, dataset_size=1000)
        for more in ((), ("model.grad_checkpointing=true",))
    )
    assert less.memory[1]["activations"] < 0.35 * full.memory[1]["activations"]
    assert less.flops == pytest.approx(full.flops * 4 / 3)
    assert full.flops == pytest.approx(1000 * 3 * full.towers.forward_flops)


def test_memory_of_the_zero_stages():
    found = {stage: engine_memory(P, stage=stage, bf16=True, ranks=4, bucket=10**9) for stage in range(4)}
    share = -(-P // 4)
    assert list(found[0].values())[:4] == [4 * P, 4 * P, 0, 8 * P]
    assert list(found[1].values())[:4] == [2 * P, 4 * P, 4 * share, 8 * share]
    assert list(found[2].values())[:2] == [2 * P, 4 * share]
    assert found[3]["weights"] == 2 * share
    totals = [sum(found[stage].values()) for stage in (1, 2, 3)]
    assert totals == sorted(totals, reverse=True)


def test_without_data_a_size_is_required(arch):
    with pytest.raises(UserError, match=r"give --dataset-size SAMPLES"):
        plan_run(load_recipe(None, settings(arch)), gpus=1)
    plan = plan_run(load_recipe(None, settings(arch, "objective.name=fastclip_v3")), gpus=4, dataset_size=1000)
    assert (plan.local_batch, plan.dataset_size, plan.objective.per_sample) == (10, 1000, 8)
    with pytest.raises(UserError, match="do not fit 3 ranks"):
        plan_run(load_recipe(None, settings(arch)), gpus=3, dataset_size=1000)


def test_a_measurement_uploads_nothing(tmp_path):
    given = ["checkpoint.mirror=s3://bucket/runs", "telemetry.trackers=[wandb]", "telemetry.tensorboard=true"]
    trial = measure._trial(load_recipe("jobs/recipes/demo.yaml", given), ranks=2, folder=tmp_path)
    assert trial.checkpoint.mirror is None
    assert trial.telemetry.trackers == ()
    assert not trial.telemetry.tensorboard


def test_the_command_prints_the_plan_and_the_data(arch, tmp_path):
    write_shards(tmp_path / "shards", [60, 60])
    arguments = settings(arch, f"data.sources={tmp_path / 'shards'}", "engine.micro_batch=10")
    arguments += [f"output={tmp_path / 'run'}", "engine.device=cpu"]
    with in_this_process():
        result = CliRunner().invoke(command, [*arguments, "--ranks", "2", "--measure", "--seconds", "1"])
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "run").exists()
    for part in (
        " on tiny-towers: 2 x 20 pairs",
        "1 (recipe)",
        "GPU hours",
        "120 samples in 2 shards",
        "3 steps of 40; every sample is in a batch",
        "25 steps, 1,000 pairs (8.33 times the data)",
        "of decoded batches per rank",
        "one rank, 20 pairs a step",
        "2 times one rank's, without communication",
    ):
        assert part in result.output
    absent = CliRunner().invoke(command, [*settings(arch, "model.image_size=33"), "--dataset-size", "400"])
    assert "400 samples, assumed" in absent.output
    assert absent.output.startswith("The data is assumed, not read: There is no manifest")
    assert " on 1 GPU\n" in absent.output
    utilized = "at 30% utilization (--mfu) of 989 TFLOP/s (--peak-tflops) less than 0.01 GPU hours"
    for part in (utilized, "below 90% of 80 GiB", "note Images of 33 px hold"):
        assert part in " ".join(absent.output.split())


PEAKS = {
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H200": 989.0,
    "NVIDIA H200 NVL": 835.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA L4": 121.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "Tesla V100-SXM2-32GB": None,
    "A GPU of tomorrow": None,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
}


def test_peaks_are_looked_up_and_never_guessed():
    assert {name: known_peak(name) for name in PEAKS} == PEAKS


def test_utilization_is_the_flop_count_over_the_peak(tmp_path):
    model = ModelConfig(arch=write_tiny(tmp_path), packed_attention=False)
    vision, text = TINY["vision_cfg"], TINY["text_cfg"]

    def tower(tokens, width, hidden):
        """Return the multiply-adds of one block: q, k, v and output, the two attention products, the MLP."""
        return tokens * width * (4 * width + 2 * hidden) + 2 * tokens**2 * width

    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    width = vision["width"]
    expected = tower(patches + 1, width, width * vision["mlp_ratio"]) + tower(8, text["width"], 4 * text["width"])
    expected += patches * width * 3 * vision["patch_size"] ** 2 + (width + text["width"]) * TINY["embed_dim"]
    flops = training_flops(model)
    assert flops == pytest.approx(3 * 2 * expected, rel=0.01)
    # Shapes depend neither on the initial weights nor on other ranks.
    assert training_flops(replace(model, pretrained="runs/old/checkpoints/step-00000001")) == flops
    cpu = torch.device("cpu")
    given = Utilization(model, device=cpu, ranks=2, bf16=False, peak_tflops=1e-6)
    assert given.scalars(100.0) == {"mfu": pytest.approx(100 * flops / 2e6)}
    assert Utilization(model, device=cpu, ranks=2, bf16=True, peak_tflops=None).scalars(100.0) == {}
