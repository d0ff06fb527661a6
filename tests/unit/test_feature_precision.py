"""How exactly features are exchanged and multiplied, compared with float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeline.distributed.precision import keep_fp32, true_fp32
from pipeline.distributed.world import World
from pipeline.objectives import build_objective
from pipeline.planning.run_costs import simulate_objective
from tests.thread_world import on_ranks
from tests.unit.objectives_reference import context, relative_error, unit_features

BATCH, DIM = 16, 64


def step(world: World, settings: dict[str, object]) -> tuple[Tensor, Tensor]:
    """Return the loss and the image gradient of all ranks."""
    objective = build_objective(settings, context=context(BATCH, DIM, world=world, dtype=torch.float32))
    rows = world.rows(BATCH // world.size)
    image, text = (side[rows] for side in unit_features(BATCH, DIM, dtype=torch.float32))
    output = objective.compute(image, text, sample_ids=torch.arange(BATCH)[rows])
    return output.loss, world.all_gather(output.grad_image)


@pytest.mark.parametrize("name", ["openclip", "siglip", "fastclip_v3", "neuclip"])
def test_features_gathered_in_bf16_change_the_loss_by_rounding(name: str) -> None:
    settings = {"name": name, **({"prototypes": BATCH} if name == "neuclip" else {})}
    exact = on_ranks(2, lambda world: step(world, settings))
    rounded = on_ranks(2, lambda world: step(world, {**settings, "gather_precision": "bf16"}))
    assert torch.equal(rounded[0][0], rounded[1][0]), "all ranks compute with the same numbers"
    assert 0 < relative_error(rounded[0][0], exact[0][0]) < 5e-3
    assert 1e-5 < relative_error(rounded[0][1], exact[0][1]) < 3e-2


def test_one_rank_rounds_nothing() -> None:
    for found, exact in zip(*(step(World(), {"name": "openclip", "gather_precision": p}) for p in ("bf16", "fp32")),
                            strict=True):  # fmt: skip
        assert torch.equal(found, exact)


def test_it_halves_the_bytes_of_features() -> None:
    def sent(precision: str) -> int:
        settings = {"name": "openclip", "gather_precision": precision}
        return simulate_objective(settings, dim=512, batch_size=5120, ranks=8)[1]["all_gather.bytes"]

    assert sent("fp32") - sent("bf16") == 2 * 640 * 512 * 2


def test_convolutions_on_a_gpu_do_not_use_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression test: fp32 training and scores had TF32 in the patches' convolution."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    keep_fp32(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    keep_fp32(torch.device("cuda"))
    assert not torch.backends.cudnn.allow_tf32
    with true_fp32(torch.device("cpu")):
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
