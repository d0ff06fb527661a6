"""Equal pairs are not each other's negatives: every method equals its masked formula, and runs mask what they read."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from jobs.plan import command as plan
from pipeline.errors import UserError
from pipeline.objectives import build_objective, objective_names, pairwise
from pipeline.objectives.autograd import AutogradObjective
from pipeline.objectives.npn import amorlip
from pipeline.objectives.pairwise import batch_keys, row_hashes
from pipeline.objectives.temperature import TemperatureConfig
from tests.metrics import metrics
from tests.shards import sample, write_shards
from tests.training import SMALL, prepare, settings_in, train_here
from tests.unit.objectives_reference import context, normalizers, relative_error, unit_features

BATCH, EPS = 12, 1e-14
KEYS = torch.tensor([[0, 7, 1, 2, 0, 3, 4, 5, 6, 8, 9, 2], [0, 1, 2, 3, 4, 5, 2, 7, 8, 9, 10, 11]]).T
EQUAL = (KEYS[:, None] == KEYS[None]).any(2) & ~torch.eye(BATCH, dtype=torch.bool)


def make(name, **settings):
    own = {"prototypes": 8} if name.startswith("neuclip") else {}
    own |= {"ratio_cap": 0, "stop_gradient": True} if name in ("neuclip", "neuclip_literal") else {}
    return build_objective({"name": name, "mask_equal": True, **own, **settings}, context=context(BATCH))


def written(objective, image, text, tau):
    """The loss of a first step as the papers write it, with masked normalizers."""
    name, c, s = objective.config.name, objective.config, (image * text).sum(1)
    if name == "siglip":
        logits = image @ text.T / tau[0] + objective.bias.value
        own = torch.eye(BATCH, dtype=torch.bool)
        return (F.softplus(-logits)[own].sum() + F.softplus(logits)[~own & ~EQUAL].sum()) / BATCH
    g = normalizers(image, text, tau, equal=EQUAL)
    if name == "openclip":
        return sum(torch.log1p((BATCH - 1) * x).mean() for x in g) / 2
    if name == "dcl":
        return sum(torch.log((BATCH - 1) * (EPS + x)).mean() for x in g) / 2
    constant = objective._pending.log_normalizer
    if name == "amorlip":
        kappa = amorlip.POSITIVE_WEIGHT / (BATCH - 1)
        log_lambda = constant + (s / tau[0]).detach() - math.log1p(kappa)
        means = [torch.exp(s / tau[0]) * (x + kappa) / (1 + kappa) for x in g]
        return -2 * s.mean() + tau[0] * (
            sum((e / x.exp()).mean() for e, x in zip(means, log_lambda, strict=True)) + c.rho
        )
    if name.startswith("neuclip"):
        inside = sum(((EPS + x) * torch.exp(-a) + a).mean() for x, a in zip(g, constant, strict=True))
        return tau[0] * (inside + 2 * (c.rho - 1))
    rho = getattr(c, "rho", 0.0)
    scales = (1.0, 1.0) if name == "fastclip_v0" else tau
    return sum((scale * (torch.log(EPS + x) + rho)).mean() for scale, x in zip(scales, g, strict=True))


@pytest.mark.parametrize("name", objective_names())
def test_every_method_equals_its_masked_formula(name, monkeypatch):
    """In blocks of three rows; loss, feature gradients and the temperature's."""
    monkeypatch.setattr(pairwise, "LEAST_ROWS", 3)
    monkeypatch.setattr(pairwise, "CPU_BLOCK", 1)
    objective, ids = make(name), torch.arange(BATCH)
    image, text = (x.requires_grad_() for x in unit_features(BATCH))
    rows = None if objective.table is None else objective.table.lookup(ids).double()
    taus = objective.temperature.of_anchors(BATCH, rows).clone()
    tau = tuple((x if rows is not None and len(rows.T) > 2 else x[0]).clone().requires_grad_() for x in taus)
    tau = tau if tau[0].dim() else (tau[0], tau[0])
    output = objective.compute(image.detach(), text.detach(), sample_ids=ids, keys=KEYS)
    loss = written(objective, image, text, tau)
    expected = torch.autograd.grad(loss, [image, text, *dict.fromkeys(tau)])
    assert relative_error(output.loss, loss) < 1e-10
    assert relative_error(output.grad_image, expected[0]) < 1e-10
    assert relative_error(output.grad_text, expected[1]) < 1e-10
    pending = objective._pending
    slope = pending[0] if name == "siglip" else pending.tau_gradient
    if slope is not None:
        slopes = torch.stack(expected[2:], 1) * BATCH if slope.dim() else expected[2]
        assert relative_error(slope, slopes) < 1e-10


@pytest.mark.parametrize("name", objective_names())
def test_a_batch_of_equal_pairs_has_no_negatives(name):
    """Nothing is pushed apart, and nothing is inf or NaN, also in the next step."""
    objective = make(name)
    image, text = unit_features(BATCH)
    for step in range(2):
        keys = torch.zeros(BATCH, 1, dtype=torch.int64) if step == 0 else KEYS
        output = objective.compute(image, text, sample_ids=torch.arange(BATCH), keys=keys)
        for value in (output.loss, output.grad_image, output.grad_text):
            assert torch.isfinite(value).all()
        if step == 0:
            pulls_on_own = (output.grad_image / text).std(1) < 1e-9  # a multiple of the partner, or nothing
            assert pulls_on_own.all()
        objective.commit()
    assert all(torch.isfinite(x).all() for x in objective.state_dict().values())


def test_keys_are_those_of_tokens_pixels_and_ids():
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, 49408, (6, 77), generator=generator)
    pixels = torch.randint(0, 256, (6, 3, 8, 8), generator=generator, dtype=torch.uint8)
    text[3], pixels[5] = text[0], pixels[1]
    text[4, :3] = text[2, :3] + torch.tensor([1, -2, 1])  # a sum weighted by 1, 2, 3 is the same
    text[4, 3:] = text[2, 3:]
    keys = batch_keys(text, torch.tensor([3, 1, 4, 1, 5, 9]), pixels)
    pairs = (keys[:, None] == keys[None]).any(2).triu(1).nonzero().tolist()
    assert pairs == [[0, 3], [1, 3], [1, 5]]
    channels_last = pixels.to(memory_format=torch.channels_last)
    assert torch.equal(row_hashes(channels_last), row_hashes(pixels))
    assert batch_keys(text, torch.arange(6), None).shape == (6, 2)


def test_keys_and_the_setting_need_each_other():
    image, text = unit_features(BATCH)
    with pytest.raises(UserError, match=r"mask_equal = true, and compute.. was given no keys"):
        make("openclip").loss(image, text)
    with pytest.raises(UserError, match=r"mask_equal = false, and compute.. was given keys"):
        make("openclip", mask_equal=False).loss(image, text, keys=KEYS)
    with pytest.raises(UserError, match=r"own cannot leave out negatives. Use another objective.name"):
        Own(TemperatureConfig(name="own", mask_equal=True), context(BATCH))


class Own(AutogradObjective):
    def batch_loss(self, image, text, *, tau):
        return -(image * text).sum(1).mean() / tau


def test_runs_mask_the_pairs_that_they_read_and_advise_it(tmp_path):
    """With GradCache as without; texts that are cut and equal captions are reported at the first step."""
    caption = b"one two three four five six seven eight nine"
    prepare(tmp_path)
    write_shards(tmp_path / "shards", [40], replace={i: {**sample(i), "txt": caption} for i in range(20)})
    for name, more in (("masked", ["mask_equal=true"]), ("micro", ["mask_equal=true"]), ("plain", [])):
        micro = ["engine.micro_batch=4"] * (name == "micro")
        train_here(*settings_in(tmp_path, name, "samples=40", *micro, *(f"objective.{x}" for x in more)))
    records = {name: metrics(tmp_path / name) for name in ("masked", "micro", "plain")}
    losses = {name: [row["loss"] for row in rows if "loss" in row] for name, rows in records.items()}
    assert losses["masked"] == pytest.approx(losses["micro"], rel=1e-4)
    assert losses["masked"][0] < losses["plain"][0] - 0.01
    notes = {name: [x for row in rows if "captions" in (x := row.get("message", ""))] for name, rows in records.items()}
    cut, equal = notes["plain"]
    assert re.fullmatch(r"(\d+)% of the first batch's captions fill all 8 tokens of the context, and .*", cut)
    assert cut.split("%")[0] == equal.split("%")[0]
    assert "objective.mask_equal=true leaves them out" in equal
    assert notes["masked"] == [cut]
    settings = settings_in(tmp_path, "x", "samples=40", "batch_size=40")
    planned = CliRunner().invoke(plan, [*SMALL, *settings], catch_exceptions=False).output
    assert "50% of the first 40 captions fill all 8 tokens of the context" in " ".join(planned.split())
    assert "50% of the first 40 captions occur more than once" in " ".join(planned.split())
