"""Synchronized batch norm over several processes, compared with torch's batch norm on the whole batch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.image_tower import use_fp32_batch_norms
from tests.dist.batchnorm_ranks import net, results
from tests.e2e.test_train import records, settings
from tests.launch import run
from tests.shards import write_shards


def test_several_ranks_equal_one_rank_with_all_rows(tmp_path):
    torch.set_num_threads(1)
    expected = results(net(), World())
    run("tests.dist.batchnorm_ranks", str(tmp_path / "found"), ranks=3)
    found = load_file(tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Terms of a gradient cancel, so the tolerance is relative to the largest entry of the tensor.
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_other_batch_norm_classes_are_rejected():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    use_fp32_batch_norms(model)
    with pytest.raises(UserError, match="1 is a BatchNorm1d"):
        use_fp32_batch_norms(model, synchronised=True)


@pytest.mark.slow
def test_a_resnet_trains_the_same_on_one_and_two_ranks(tmp_path):
    write_shards(tmp_path / "shards", [20, 30, 15])
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64}
    text = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    tower = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (tmp_path / "tiny-towers.json").write_text(json.dumps(tower))
    for ranks, name, sync in ((0, "one", True), (2, "two", True), (2, "apart", False)):
        run("jobs.train", *settings(tmp_path, name), f"model.sync_batchnorm={sync}".lower(), ranks=ranks)
    losses = {name: [r["loss"] for r in records(tmp_path / name).values()] for name in ("one", "two", "apart")}
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-4)
    assert losses["apart"] != pytest.approx(losses["one"], rel=1e-3)
    one, two = (
        load_file(tmp_path / name / "checkpoints" / "step-00000012" / "open_clip_model.safetensors")
        for name in ("one", "two")
    )
    moved = [name for name in one if "running" in name]
    assert len(moved) > 20
    for name in moved:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
