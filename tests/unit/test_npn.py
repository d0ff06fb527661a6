"""The normalizer-prediction network: closed form, optimizers, restarts, growth, variants."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from jobs.settings import command as settings
from pipeline.errors import UserError
from pipeline.objectives import build_objective, parse_objective
from pipeline.objectives.npn import kernels, prototypes
from pipeline.objectives.npn.network import NPNS
from pipeline.objectives.npn.prototypes import Anchors
from pipeline.objectives.npn.reference import predicted_log_normalizers
from tests.metrics import metrics
from tests.plugins import install
from tests.training import prepare, settings_in, train_here
from tests.unit.objectives_reference import assert_exact, context, normalizers, relative_error, unit_features

EPS = 1e-14


def make_anchors(batch_size, *, tau=0.07, dim=16, seed=0, dtype=torch.float64, low=False):
    image, text = unit_features(batch_size, dim, seed=seed, dtype=torch.float64)
    g, _ = normalizers(image, text, (torch.tensor(tau), torch.tensor(tau)))
    anchors = Anchors(
        features=image.to(dtype),
        positive=(image * text).sum(1).to(dtype),
        log_target=torch.log(EPS + g).to(dtype),
        tau=torch.tensor(tau, dtype=dtype),
        log_eps=math.log(EPS),
        low=image.bfloat16() if low else None,
    )
    return anchors, text


def make_weight(m, dim=16, *, seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(m, dim, generator=generator, dtype=torch.float64) * 1.7).to(dtype)


def loss_gradient(anchors, weight, *, objective="unified", passes=None):
    """dL/dW, [m, d], alpha under this W, [B], and dL/dU, [m, d]."""
    passes = passes or kernels.Passes()
    at = passes.prepare(weight, anchors.tau, dtype=None if anchors.low is None else torch.bfloat16)
    product, alpha = prototypes.unit_gradient(anchors, at, objective=objective, passes=passes)
    return torch.cat([at.tangent(product, rows) for rows in kernels.pieces(weight)]), alpha, product


def written_loss(anchors, text, weight, objective):
    alpha = predicted_log_normalizers(anchors.features, text, weight, tau=anchors.tau, eps=EPS)
    if objective == "separate":
        return (alpha - anchors.log_target).square().mean() / 2
    return anchors.tau * (torch.exp(anchors.log_target - alpha) + alpha).mean()


@pytest.mark.parametrize("objective", ["unified", "separate"])
@pytest.mark.parametrize("batch_size", [2, 3, 17, 64])
def test_closed_form_gradient_equals_autograd(batch_size, objective, monkeypatch):
    monkeypatch.setattr(prototypes, "_CPU_BLOCK", 11 * 5)  # blocks of five anchors
    monkeypatch.setattr(kernels, "_CPU_PIECE", 16 * 3)  # pieces of a few rows
    anchors, text = make_anchors(batch_size)
    weight = make_weight(11).requires_grad_()
    expected = torch.autograd.grad(written_loss(anchors, text, weight, objective), weight)[0]
    gradient, alpha, _ = loss_gradient(anchors, weight.detach(), objective=objective)
    assert relative_error(gradient, expected) < 1e-10
    predicted = predicted_log_normalizers(anchors.features, text, weight, tau=anchors.tau, eps=EPS)
    assert relative_error(alpha, predicted) < 1e-12


@pytest.mark.parametrize("low", [False, True])
def test_memory_is_bounded_by_one_block_of_anchors(low, monkeypatch):
    monkeypatch.setattr(prototypes, "_CPU_BLOCK", 96 * 8)  # eight of 256 anchors at a time
    anchors, _ = make_anchors(256, dtype=torch.float32, low=low)
    passes = kernels.Passes()
    product = loss_gradient(anchors, make_weight(96, dtype=torch.float32), passes=passes)[2]
    assert product.dtype == torch.float32  # sums over blocks are not rounded to bf16
    assert max(buffer.numel() for buffer in passes.space._buffers.values()) <= 96 * 16  # the size of [m, d]


def test_slopes_of_a_queue_without_the_anchors_own_samples_equal_autograd():
    settings = {"name": "neuclip", "npn": "queue", "prototypes": 12, "restart_with": "previous"}
    npn = build_objective(settings, context=context(6, 16)).npn
    anchors, text = make_anchors(6)
    anchors = replace(anchors, ids=torch.arange(6))
    npn.queue.features[0] = F.normalize(make_weight(12), dim=1)
    npn.queue.ids.copy_(torch.tensor([0, 7, 8, 1, 9, 0, 10, 11, 5, 12, 13, 14]))
    npn.queue.written.fill_(12)
    own, partner = anchors.features.clone().requires_grad_(), text.clone().requires_grad_()
    tau = anchors.tau.expand(6).clone().requires_grad_()
    terms = torch.exp((own @ npn.queue.features[0].T - (own * partner).sum(1)[:, None]) / tau[:, None])
    others = (anchors.ids[:, None] != npn.queue.ids).double()
    alpha = torch.log(EPS + (terms * others).sum(1) / others.sum(1))
    assert relative_error(npn.predict((anchors, anchors))[0], alpha) < 1e-12
    for ours, expected in zip(
        npn.slopes(0, anchors, text), torch.autograd.grad(alpha.sum(), [own, partner, tau]), strict=True
    ):
        assert relative_error(ours, expected) < 1e-10


def test_bf16_products_stay_close_to_fp32():
    anchors, _ = make_anchors(128, dim=64, dtype=torch.float32, low=True)
    weight = make_weight(96, 64, dtype=torch.float32)
    low, low_alpha, _ = loss_gradient(anchors, weight)
    full, full_alpha, _ = loss_gradient(replace(anchors, low=None), weight)
    assert (low_alpha - full_alpha).square().mean() < 1e-3
    assert F.cosine_similarity(low.flatten(), full.flatten(), dim=0) > 0.999
    assert not torch.equal(low, full)


def take_step(objective, *, seed, size=8):
    """Take and commit one step; return the features that may fill W1 and W2: texts and images."""
    image, text = unit_features(size, seed=seed)
    objective.compute(image, text, sample_ids=torch.arange(size))
    objective.commit()
    return [text, image]


# Settings beside `inner_steps` 0, the sizes of the batches, and per step which rows of which batch each prototype has.
FILLS = {
    "growth": ({"prototypes": 20}, [8, 8, 8, 8], [0] * 8 + [1] * 8 + [2] * 4),
    "a smaller batch leaves no gap": ({"prototypes": 20, "restart_every": 0}, [5, 8], [0] * 5 + [1] * 8),
    "a restart with fewer than m": ({"prototypes": 6, "restart_every": 1}, [6, 4], [1] * 4),
    "few from previous batches": ({"prototypes": 5, "restart_every": 1, "restart_with": "previous"}, [8, 8], [0] * 5),
    "growth from previous batches": (
        {"prototypes": 20, "restart_every": 0, "restart_with": "previous"}, [8] * 3, [0] * 8 + [1] * 8),
    "newest": ({"prototypes": 20, "restart_every": 3}, [8] * 4, [1] * 4 + [2] * 8 + [3] * 8),
    "newest of previous": (
        {"prototypes": 20, "restart_every": 3, "restart_with": "previous"}, [8] * 4, [0] * 4 + [1] * 8 + [2] * 8),
}  # fmt: skip


@pytest.mark.parametrize("name", FILLS)
def test_which_features_are_prototypes(name):
    """Distinct ones of the other modality."""
    settings, sizes, batches = FILLS[name]
    objective = build_objective({"name": "neuclip", "inner_steps": 0, **settings}, context=context(8))
    features = [take_step(objective, seed=step, size=size) for step, size in enumerate(sizes)]
    assert int(objective.npn.live) == len(batches)
    for side in (0, 1):
        weight = objective.npn.network.lasting["weight"][side, : len(batches)]
        equal = [(weight[:, None] == batch[side][None]).all(2) for batch in features]
        assert sorted(step for step, found in enumerate(equal) for _ in found.nonzero()) == batches
        assert sum(int(found.any(0).sum()) for found in equal) == len(batches), "each feature once"
        if not name.startswith("newest"):  # in the order of the samples
            places = torch.cat([found.any(1).nonzero() for found in equal]).flatten()
            assert places.tolist() == list(range(len(batches)))


@pytest.mark.parametrize("prototypes", [4, 8, 20])
def test_a_feature_of_zeros_does_not_ruin_the_network(prototypes):
    """Regression test: from the next restart on, every step was NaN, and was skipped."""
    settings = {"name": "neuclip", "prototypes": prototypes, "restart_every": 2}
    objective = build_objective(settings, context=context(8))
    for step in range(6):
        image, text = unit_features(8, seed=step)
        if step == 1:
            image[0] = text[1] = 0
        output = objective.compute(image, text, sample_ids=torch.arange(8))
        assert output.loss.isfinite(), step
        assert output.grad_image.isfinite().all(), step
        objective.commit()
    assert objective.npn.network.lasting["weight"].isfinite().all()


def test_small_m_takes_the_same_subset_for_both_sides_and_depends_on_the_seed():
    """And on the step: every restart draws another."""
    chosen = []
    for seed in (0, 1):
        settings = {"name": "neuclip", "prototypes": 5, "inner_steps": 0, "restart_every": 1}
        objective = build_objective(settings, context=context(32, seed=seed))
        for step in (0, 1):
            text, image = take_step(objective, seed=step, size=32)
            weight = objective.npn.network.lasting["weight"]
            rows = [int((text == w).all(1).nonzero()) for w in weight[0]]
            assert torch.equal(weight[1], image[rows])
            assert len(set(rows)) == 5
            chosen.append(tuple(rows))
    assert len(set(chosen)) == 4


def test_a_restart_keeps_the_optimizers_memory_unless_configured():
    for optimizer, slot in (("adagrad", "accumulator"), ("adam", "moment2")):
        for reset, expected in ((False, [2, 4, 6, 8, 10]), (True, [2, 4, 6, 2, 4])):
            settings = {"npn_optimizer": optimizer, "reset_accumulator": reset, "restart_every": 3, "inner_steps": 2}
            objective = build_objective({"name": "neuclip", "prototypes": 8, **settings}, context=context(8))
            counts, sums = [], []
            for step in range(5):
                take_step(objective, seed=step)
                counts.append(int(objective.npn.network.updates))
                sums.append(float(objective.npn.network.lasting[slot].sum()))
            assert counts == expected
            assert optimizer == "adam" or (sums[3] < sums[2]) is reset


@pytest.mark.parametrize(
    "settings",
    [
        {"npn": "mlp", "restart_every": 0},
        {"npn": "mlp", "restart_every": 0, "npn_objective": "separate"},
        {"npn_objective": "separate"},
        {},
    ],
)
def test_inner_updates_close_the_gap_on_a_fixed_batch(settings):
    # Every variant's minimum is alpha = log(eps + g): many small steps on one batch approach it.
    base = {"name": "neuclip", "prototypes": 32, "npn_lr": 0.02, "inner_steps": 40, "restart_every": 0}
    objective = build_objective({**base, **settings}, context=context(16))
    image, text = unit_features(16)
    output = objective.compute(image, text, sample_ids=torch.arange(16))
    assert output.metrics["normalizer_gap"] < 0.6 * output.metrics["normalizer_gap_cold"]


def test_mlp_gradient_through_alpha_equals_autograd():
    settings = {"name": "neuclip", "npn": "mlp", "restart_every": 0, "ratio_cap": 0, "stop_gradient": False}
    objective = build_objective(settings, context=context(5))
    image, text = (f.requires_grad_() for f in unit_features(5))
    output = objective.compute(image.detach(), text.detach(), sample_ids=torch.arange(5))
    from pipeline.objectives.npn import mlp

    tau = objective.temperature.value().requires_grad_()
    positive = (image * text).sum(1)
    loss = 2 * tau * (objective.config.rho - 1)
    for side, g in enumerate(normalizers(image, text, (tau, tau))):
        f = mlp.forward(objective.npn.network.side(side), (image, text)[side])
        alpha = torch.log(EPS + torch.exp(f - positive / tau))
        loss = loss + tau * (torch.exp(-alpha) * (EPS + g) + alpha).mean()
    assert_exact(objective, output, loss, image, text, tau)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"npn": "mlp"}, "restart_every"),
        ({"npn_schedule": "simultaneous"}, "inner_steps"),
        ({"npn": "mlp", "restart_every": 0, "npn_update": "prototypes"}, "npn_update"),
        ({"prototypes": 2**63}, "objective.prototypes = 9223372036854775808: .*less than or equal to 1073741824"),
        ({"npn_update": "spread"}, "objective.npn_update = 'spread': .*'replicated' or 'prototypes'"),
        ({"npn": "mlp", "restart_every": 0, "npn_compile": True}, "npn_compile"),
        ({"npn": "table"}, r"objective\.npn = 'table': no such network.*mlp, prototypes, queue"),
        ({"name": "neuclip_plus", "npn": "mlp", "restart_every": 0}, "mlp predicts no mean.*prototypes, queue"),
        ({"name": "neuclip_plus", "stop_gradient": False}, "stop_gradient"),
    ],
)
def test_invalid_settings_are_rejected(settings, says):
    with pytest.raises(UserError, match=says):
        parse_objective({"name": "neuclip", **settings})


LEVEL = """
import torch
from pipeline.objectives.npn.network import Npn, Prediction, register_npn

@register_npn("level")
class LevelNpn(Npn):
    def __init__(self, config, context):
        super().__init__(config, context, {"level": torch.zeros(2, 1, dtype=context.dtype, device=context.device)})

    def advance(self, batch, anchors):
        self.network.begin()
        cold = self.predict(anchors)
        for side in (0, 1):
            self.network.side(side)["level"].lerp_(anchors[side].log_target.mean(), 0.5)
        return Prediction(self.levels(anchors, lasting=False), cold)

    def levels(self, anchors, *, lasting):
        return tuple(self.network.side(i, lasting=lasting)["level"].expand(len(anchors[i])) for i in (0, 1))

    def predict(self, anchors):
        return self.levels(anchors, lasting=True)

    def slopes(self, side, anchors, partners_bd):
        return torch.zeros_like(partners_bd), torch.zeros_like(partners_bd), torch.zeros_like(anchors.positive)

    def commit(self, update):
        self.network.commit()
"""


def test_an_installed_package_adds_a_variant_to_the_commands(tmp_path, monkeypatch):
    """One file and an entry point: `settings` and training."""
    install(monkeypatch, NPNS, tmp_path, "[neuclip.npn]\nlevel = level_network\n", level_network=LEVEL)
    assert "level, mlp, prototypes or queue" in CliRunner().invoke(settings, ["objective.npn"]).output
    train_here(*settings_in(prepare(tmp_path), "run", "objective.name=neuclip", "objective.npn=level", "samples=32"))
    losses = [record["loss"] for record in metrics(tmp_path / "run", "train")]
    assert len(losses) == 4
    assert all(math.isfinite(loss) for loss in losses)
