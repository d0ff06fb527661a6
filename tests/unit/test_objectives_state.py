"""For every method: compute changes no lasting state, discard restores it, and a resumed run is bit-identical."""

import pytest
import torch

from pipeline.config import keys
from pipeline.errors import UserError
from pipeline.objectives import build_objective, objective_names, parse_objective
from tests.unit.objectives_reference import context, unit_features

NEUCLIP = {"name": "neuclip", "prototypes": 20, "restart_every": 4}
VARIANTS = [
    *({"name": name} for name in objective_names() if not name.startswith("neuclip")),
    {"name": "isogclr", "tau_optimizer": "momentum"},
    {"name": "amorlip", "divergence": "kl"},
    {"name": "amorlip", "divergence": "js"},
    NEUCLIP,
    {**NEUCLIP, "prototypes": 5},
    {**NEUCLIP, "npn": "queue"},
    {"name": "neuclip_plus", "prototypes": 20},
    {**NEUCLIP, "restart_with": "previous", "npn_optimizer": "adam"},
    {**NEUCLIP, "npn_schedule": "simultaneous", "inner_steps": 1},
    {"name": "neuclip", "npn": "mlp", "restart_every": 0},
    {**NEUCLIP, "npn_precision": "bf16", "stop_gradient": False},
]
every_variant = pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(str(v) for v in s.values()))
BATCH = 8


def build(settings):
    return build_objective(settings, context=context(BATCH, dtype=torch.float32, steps_per_epoch=3, total_steps=12))


def one_step(objective, step):
    image, text = unit_features(BATCH, seed=step, dtype=torch.float32)
    ids = (torch.arange(BATCH) * 3 + step) % (4 * BATCH)
    return objective.compute(image, text, sample_ids=ids)


def snapshot(objective):
    rows = {name: (first, torch.cat(list(blocks))) for name, (first, blocks) in objective.row_blocks().items()}
    return objective.state_dict(), rows


def same(one, other):
    small = one[0].keys() == other[0].keys() and all(torch.equal(v, other[0][k]) for k, v in one[0].items())
    return small and all(torch.equal(rows, other[1][name][1]) for name, (_, rows) in one[1].items())


@every_variant
def test_compute_and_discard_leave_the_state_unchanged(settings):
    objective = build(settings)
    for step in range(5):
        one_step(objective, step)
        objective.commit(lr_scale=0.5)
    before = snapshot(objective)
    first = one_step(objective, 5)
    assert same(before, snapshot(objective))
    objective.discard()
    assert same(before, snapshot(objective))
    one_step(objective, 7)  # another batch, skipped
    objective.discard()
    again = one_step(objective, 5)
    assert torch.equal(first.grad_image, again.grad_image)
    assert torch.equal(first.loss, again.loss)
    objective.commit()
    assert not same(before, snapshot(objective))
    assert objective.steps == 6
    with pytest.raises(RuntimeError, match="nothing is pending"):
        objective.commit()


@every_variant
def test_a_resumed_run_is_bit_identical(settings):
    straight = build(settings)
    resumed = None
    for step in range(9):
        if step == 5:
            small, rows = snapshot(straight)
            resumed = build(settings)
            resumed.load_state_dict(small)
            resumed.load_row_state_dict(lambda name, start, stop, rows=rows: rows[name][1][start:stop])
        for objective in (straight, resumed) if resumed else (straight,):
            one_step(objective, step)
            objective.commit(lr_scale=1 / (step + 1))
    assert same(snapshot(straight), snapshot(resumed))
    assert straight.logit_parameters() == resumed.logit_parameters()


def test_state_from_other_settings_is_rejected_and_changes_nothing():
    objective = build(NEUCLIP)
    one_step(objective, 0)
    objective.commit()
    before = snapshot(objective)
    with pytest.raises(UserError, match=r"npn\.weight of shape .*, but these settings need"):
        objective.load_state_dict(build({**NEUCLIP, "prototypes": 30}).state_dict())
    with pytest.raises(UserError, match=r"has no npn\."):
        objective.load_state_dict(build("openclip").state_dict())
    assert same(before, snapshot(objective))
    v2, v3 = build("fastclip_v2"), build("fastclip_v3")
    with pytest.raises(UserError, match="9 columns"):
        v2.load_row_state_dict(lambda name, start, stop: snapshot(v3)[1][name][1][start:stop])


@every_variant
def test_extreme_inputs_give_finite_results_in_fp32(settings):
    """tau = 0.005; identical, one-hot and opposite features; B = 2: loss, gradients and state."""
    known = keys(type(parse_objective({"name": settings["name"]})))
    low = {key: 0.005 for key in ("tau", "tau_init", "tau_min") if key in known}
    one_hot = torch.eye(16)[: 2 * BATCH : 2].contiguous()
    same_feature = torch.zeros(BATCH, 16)
    same_feature[:, 3] = 1
    worst = one_hot.roll(1, 0)  # every text belongs to a different image
    for pairs in ((same_feature, same_feature), (one_hot, one_hot), (one_hot, worst), (same_feature, -same_feature)):
        for size in (BATCH, 2):
            run = context(size, dtype=torch.float32, dataset_size=64, steps_per_epoch=2)
            objective = build_objective({**settings, **low}, context=run)
            for step in range(5):
                mix = unit_features(size, seed=step, dtype=torch.float32) if step == 2 else [p[:size] for p in pairs]
                output = objective.compute(*mix, sample_ids=torch.arange(size))
                for tensor in (output.loss, output.grad_image, output.grad_text, *output.metrics.values()):
                    assert torch.isfinite(tensor).all(), (settings, step)
                objective.commit()
                small, rows = snapshot(objective)
                for name, tensor in small.items():
                    assert torch.isfinite(tensor.double()).all(), (settings, name)
                for _, table in rows.values():
                    assert torch.isfinite(table[:size]).all()


@pytest.mark.parametrize("name", ["openclip", "siglip", "fastclip_v3", "amorlip", "neuclip"])
def test_within_a_step_loading_drops_it_and_normalizers_are_not_estimated(name):
    objective = build({"name": name})
    saved = objective.state_dict()
    one_step(objective, 0)
    if name != "siglip":
        with pytest.raises(RuntimeError, match=r"between compute\(\) and commit\(\)"):
            objective.log_normalizers(*unit_features(BATCH, dtype=torch.float32), sample_ids=torch.arange(BATCH))
    objective.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="nothing is pending"):
        objective.commit()
    one_step(objective, 0)
    objective.commit()
