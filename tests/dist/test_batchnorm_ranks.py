"""Synchronized batch norm over several processes, compared with torch's batch norm on the whole batch."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.model.image_tower import SyncFp32BatchNorm2d, use_fp32_batch_norms
from pipeline.model.towers import ModelConfig, build_towers
from tests.dist.batchnorm_ranks import net, results
from tests.launch import run


def test_several_ranks_equal_one_rank_with_all_rows(tmp_path):
    torch.set_num_threads(1)
    expected = results(net(), World())
    run("tests.dist.batchnorm_ranks", str(tmp_path / "found"), ranks=3)
    found = load_file(tmp_path / "found")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Terms of a gradient cancel, so the tolerance is relative to the largest entry of the tensor.
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_the_setting_takes_other_batch_norm_classes_for_a_mistake():
    towers, _ = build_towers(ModelConfig(arch="RN50", sync_batchnorm=True), seed=0, device="meta")
    norms = {type(module) for module in towers.modules() if isinstance(module, nn.BatchNorm2d)}
    assert norms == {SyncFp32BatchNorm2d}
    with pytest.raises(UserError, match="1 is a BatchNorm1d"):
        use_fp32_batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), synchronised=True)
