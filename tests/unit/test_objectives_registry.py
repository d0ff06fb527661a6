"""Objectives by name, methods defined outside the package, and use as a library."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from pipeline.config import section, to_tree
from pipeline.errors import UserError
from pipeline.objectives import ObjectiveConfig, build_objective, objective_names, parse_objective, register
from pipeline.objectives.autograd import AutogradObjective
from pipeline.objectives.registry import OBJECTIVES
from pipeline.objectives.temperature import TemperatureConfig
from pipeline.training.recipe_file import stored_recipe
from tests.plugins import install
from tests.unit.objectives_reference import context, relative_error, unit_features

PAPERS = {"openclip", "dcl", "siglip", "sogclr", "isogclr", "amorlip", "neuclip", *(f"fastclip_v{i}" for i in range(4))}


def test_every_method_of_the_papers_is_registered_and_its_section_round_trips():
    assert set(objective_names()) >= PAPERS
    for name in objective_names():
        config = parse_objective({"name": name})
        assert config.name == name
        assert parse_objective(to_tree(config)) == config


FACTS = {"dim": 4, "batch_size": 8, "dataset_size": 32}


@pytest.mark.parametrize(
    ("tree", "facts", "says"),
    [
        ({}, FACTS, "objective.name is required"),
        ({"name": "neuclp"}, FACTS, "The nearest is neuclip"),
        ({"name": "neuclip", "npn_lrr": 1}, FACTS, r"objective\.npn_lrr.*objective\.npn_lr"),
        ({"name": "neuclip", "prototypes": 0}, FACTS, "objective.prototypes = 0"),
        ({"name": "openclip", "rho": 1.0}, FACTS, "objective.rho"),
        ({"name": "openclip", "tau_init": 2.0}, FACTS, r"within \[tau_min, 1\]"),
        ({"name": "openclip"}, {"dim": 4}, "batch_size"),
        ({"name": "openclip"}, {"dim": 4, "batch_size": 8, "dataset": 3}, "dataset_size"),
        ({"name": "openclip"}, {"dim": 4, "batch_size": 1}, "2 or more"),
        ({"name": "amorlip"}, FACTS, "objective.name = 'amorlip' follows the epochs of the run"),
        ({"name": "fastclip_v3"}, FACTS, "without objective.gamma_decay_epochs follows the epochs of the run"),
    ],
)
def test_errors_name_the_wrong_setting_or_missing_fact(tree, facts, says):
    with pytest.raises(UserError, match=says):
        build_objective(tree, **facts)


def test_schedules_by_epoch_take_the_length_of_the_run():
    assert build_objective("amorlip", **FACTS, total_steps=9).context.epochs(needed_by="this") == 3
    build_objective({"name": "fastclip_v3", "gamma_decay_epochs": 18}, **FACTS)


LOSS_OUTSIDE = """
import torch
import torch.nn.functional as F
from pipeline.config import section
from pipeline.objectives import register
from pipeline.objectives.autograd import AutogradObjective
from pipeline.objectives.temperature import TemperatureConfig

@section
class MarginConfig(TemperatureConfig):
    name: str = "margin"
    margin: float = 0.0

@register("margin", MarginConfig)
class Margin(AutogradObjective):
    def batch_loss(self, image, text, *, tau):
        logits = (image @ text.T - self.config.margin * torch.eye(len(image), device=image.device)) / tau
        labels = torch.arange(len(image), device=image.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
"""


def test_a_loss_with_autograd_is_a_file_of_ten_lines_outside_the_repository(tmp_path, monkeypatch):
    """Without a margin it is `openclip`: the same loss, gradients and temperature over several steps."""
    install(monkeypatch, OBJECTIVES, tmp_path, "", margin_loss=LOSS_OUTSIDE)
    importlib.import_module("margin_loss")
    both = [build_objective(name, context=context(8)) for name in ("margin", "openclip")]
    for step in range(3):
        found = [each.compute(*unit_features(8, seed=step), sample_ids=torch.arange(8)) for each in both]
        for key in ("loss", "grad_image", "grad_text"):
            assert relative_error(*(getattr(output, key) for output in found)) < 1e-10
        for each in both:
            each.commit(lr_scale=0.5)
    assert both[0].logit_parameters() == (pytest.approx(both[1].logit_parameters()[0], rel=1e-12), None)
    resumed = build_objective("margin", context=context(8))
    resumed.load_state_dict(both[0].state_dict())
    assert resumed.logit_parameters() == both[0].logit_parameters()
    assert resumed.steps == 3


def test_a_method_of_a_package_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    """tests/unit/test_own_package.py has all commands with one that can."""
    entry_points = "[neuclip.objectives]\nmargin = margin_loss\n"
    install(monkeypatch, OBJECTIVES, tmp_path, entry_points, margin_loss="import nothing_of_this_name")
    with pytest.raises(UserError, match=r"'margin' \(margin_loss, an entry point of .*objectives\) cannot be imported"):
        parse_objective({"name": "margin"})


@pytest.mark.parametrize(
    ("wrong", "says"), [(lambda s: s.diagonal(), r"shape \(8,\)"), (lambda s: s.mean().detach(), "without a graph")]
)
def test_a_loss_that_is_no_scalar_with_a_graph_is_refused(wrong, says):
    class Wrong(AutogradObjective):
        def batch_loss(self, image, text, *, tau):
            return wrong(image @ text.T / tau)

    with pytest.raises(UserError, match=says):
        Wrong(TemperatureConfig(name="wrong"), context(8)).compute(*unit_features(8), sample_ids=torch.arange(8))


def test_an_objective_without_anything_pending_commits():
    """None is a valid answer to what `update_state` needs."""

    class Constant(AutogradObjective):
        def batch_loss(self, image, text, *, tau):
            return -(image * text).sum(1).mean()

    objective = Constant(TemperatureConfig(name="constant"), context(8))
    objective.compute(*unit_features(8), sample_ids=torch.arange(8))
    objective.commit()
    assert objective.steps == 1
    with pytest.raises(RuntimeError, match="nothing is pending"):
        objective.commit()


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_an_objective_in_a_plain_training_loop_learns(name):
    """The README's snippet on two linear towers, which learn to retrieve the matching samples."""
    torch.manual_seed(0)
    inputs, dataset_size, batch_size = torch.randn(64, 24), 64, 32
    image_tower, text_tower = torch.nn.Linear(24, 16), torch.nn.Linear(24, 16)
    optimizer = torch.optim.AdamW([*image_tower.parameters(), *text_tower.parameters()], lr=1e-2)
    objective = build_objective(name, dim=16, batch_size=batch_size, dataset_size=dataset_size, total_steps=60)
    for step in range(60):
        sample_ids = torch.randperm(dataset_size, generator=torch.Generator().manual_seed(step))[:batch_size]
        image_features = F.normalize(image_tower(inputs[sample_ids]), dim=-1)
        text_features = F.normalize(text_tower(inputs[sample_ids]), dim=-1)

        loss = objective.loss(image_features, text_features, sample_ids=sample_ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        objective.commit()
    with torch.no_grad():
        s = F.normalize(image_tower(inputs), dim=-1) @ F.normalize(text_tower(inputs), dim=-1).T
    assert (s.argmax(1) == torch.arange(64)).float().mean() > 0.9
    assert objective.steps == 60


@pytest.mark.parametrize("name", ["neuclip", "neuclip_literal", "fastclip_v2", "fastclip_v3", "isogclr"])
@pytest.mark.filterwarnings("ignore:objective.npn_lr")
def test_an_unreachable_rho_is_logged(name, caplog):
    facts = {"dim": 4, "batch_size": 8, "dataset_size": 100, "total_steps": 10}
    build_objective({"name": name, "rho": 6.0}, **facts)
    assert "objective.rho = 6 is not below log(n - 1) = 4.60" in caplog.text
    assert "set objective.rho to 2.0 to 3.1" in caplog.text
    caplog.clear()
    build_objective({"name": name, "rho": 4.0}, **facts)
    build_objective({"name": name, "rho": 6.0, "tau_lr": 0.0}, **facts)  # tau is held constant on purpose
    build_objective({"name": name, "rho": 6.0}, **{**facts, "dataset_size": 1000})
    assert not caplog.text


@pytest.mark.parametrize("name", ["openclip", "siglip", "neuclip"])
def test_a_second_batch_before_commit_and_one_larger_than_configured_are_refused(name):
    objective = build_objective(name, dim=16, batch_size=8)
    features = unit_features(8, dtype=torch.float32)
    objective.loss(*features)
    with pytest.raises(RuntimeError, match=r"commit\(\) .* discard\(\) .* cannot be accumulated"):
        objective.loss(*features)
    objective.discard()
    objective.loss(*unit_features(4, dtype=torch.float32))  # a last batch may be smaller
    objective.commit()
    with pytest.raises(UserError, match=r"holds 9 pairs: .* batch_size = 8, over all ranks"):
        objective.loss(*unit_features(9, dtype=torch.float32))
    objective.loss(*features)


@pytest.mark.parametrize("name", ["openclip", "neuclip", "siglip", "isogclr", "fastclip_v3", "amorlip"])
def test_the_temperature_learning_rate_follows_the_schedule_or_is_constant(name):
    def moved(schedule):
        facts = {"dim": 16, "batch_size": 8, "dataset_size": 8, "total_steps": 1}
        objective = build_objective({"name": name, "tau_schedule": schedule}, **facts)
        before = objective.logit_parameters()
        assert objective.learning_rates(lr_scale=0.25)["tau_lr"] == pytest.approx(
            objective.config.tau_lr * (0.25 if schedule == "encoders" else 1.0)
        )
        objective.loss(*unit_features(8, dtype=torch.float32), sample_ids=torch.arange(8))
        objective.commit(lr_scale=0.0)
        return [now != then for now, then in zip(objective.logit_parameters(), before, strict=True)]

    assert moved("encoders") == [False, False]
    assert moved("constant") == [True, name == "siglip"]  # siglip also learns a bias


def test_a_stored_setting_that_has_left_is_kept_where_a_method_of_a_package_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(OBJECTIVES, "registered", dict(OBJECTIVES.registered))

    @section
    class BoundedConfig(ObjectiveConfig):
        name: str = "bounded"
        tau_max: float = 1.0

    register("bounded", BoundedConfig)(type("Bounded", (AutogradObjective,), {}))
    for name, kept in (("bounded", {"tau_max": 3.0}), ("openclip", {})):
        tree = {"seed": 1, "objective": {"name": name, "tau_max": 3.0}}
        assert stored_recipe(tree, file=tmp_path) == {"seed": 1, "objective": {"name": name, **kept}}
