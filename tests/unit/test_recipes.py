"""Recipes of the papers parse, can be planned and have the stated values; epochs become samples and steps."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pipeline.config import dump, read_yaml
from pipeline.data.order.canonical_order import make_layout
from pipeline.distributed.world import World
from pipeline.errors import UserError
from pipeline.objectives import objective_names, parse_objective
from pipeline.planning.run_plan import plan_run
from pipeline.training.build import objective_of
from pipeline.training.recipe import load_recipe, parse_recipe
from pipeline.training.recipe_file import resolve_budget
from tests.launch import python
from tests.shards import write_shards

FOLDER = Path(__file__).parents[2] / "jobs" / "recipes"
STREAMS = ((64, 64), (256, 64), (48, 48), (96, 48), (6144, 64), (97, 1), (10, 10))
"""A batch, and the streams that fill it."""
PAPERS = ("cc3m", "cc12m", "dfn14m", "dfn192m", "dfn1b", "laion315m")
pytestmark = pytest.mark.filterwarnings("ignore:objective.npn_lr")

# Dataset: samples, batch, arch, lr, weight decay, warm-up; NeuCLIP Tables 1 and 3, FastCLIP Tables 2 and 7.
ENCODERS = {
    "cc3m": (100_000_000, 1024, "RN50", 1e-3, 0.1, 10_000),
    "cc12m": (300_000_000, 2048, "ViT-B-32", 4e-4, 0.1, 10_000),
    "dfn14m": (320_000_000, 4096, "ViT-B-32", 5e-4, 0.2, 500),
    "dfn192m": (1_300_000_000, 5120, "ViT-B-16", 3.125e-4, 0.2, 500),
    "dfn1b": (3_000_000_000, 5120, "ViT-B-16", 3.125e-4, 0.2, 500),
    "laion315m": (13_000_000_000, 5120, "ViT-B-16", 2e-4, 0.2, 13_000),
}
# Methods compared in the papers; every recipe has settings for them.
PUBLISHED = {"openclip", "siglip", "dcl", "sogclr", "isogclr", "amorlip", "neuclip"}
PUBLISHED |= {f"fastclip_v{i}" for i in range(4)}
# rho and lr of tau; NeuCLIP Table 3.
NEUCLIP = {
    "cc3m": (6.5, 1.25e-4),
    "cc12m": (8.5, 5e-5),
    "dfn14m": (11.0, 6.25e-5),
    "dfn192m": (11.0, 3.9e-5),
    "dfn1b": (11.0, 3.9e-5),
}


def load(name, *overrides):
    return load_recipe(FOLDER / f"{name}.yaml", overrides, dataset_size=100_000)


def assumed(name):
    """Dataset size and MFU of the command in the header of a recipe."""
    command = re.search(r"neuclip plan .*--dataset-size (\S+) --mfu (\S+)", (FOLDER / f"{name}.yaml").read_text())
    return int(command[1]), float(command[2])


def test_streams_that_are_not_given_divide_the_batch():
    for batch, streams in STREAMS:
        assert load("own", f"batch_size={batch}").data.streams == streams, batch
        assert load("own", f"batch_size={batch}", "data.streams=auto").data.streams == streams, batch
    assert load("own", "batch_size=96", "data.streams=32").data.streams == 32
    assert load_recipe(None, ["data.sources=x", "output=y", "samples=96000", "batch_size=96"]).data.streams == 48


@pytest.mark.parametrize("name", PAPERS)
def test_every_method_can_be_planned_and_read_back_and_has_the_encoders_optimizer_settings(name):
    recipe = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    assert PUBLISHED <= set(recipe["methods"]) <= set(objective_names())
    for method in recipe["methods"]:
        run = load(name, f"objective.name={method}")
        assert run.objective.name == method
        assert parse_recipe(yaml.safe_load(dump(run))) == run
        plan = plan_run(run, gpus=8, dataset_size=assumed(name)[0])
        assert plan.data is None
        assert sum(plan.memory[plan.stage].values()) < 80 * 2**30, method
        # If a method has a per-sample table, each row has at least two estimators.
        assert plan.objective.per_sample == 0 or plan.objective.per_sample >= 8
        if method in ("sogclr", "fastclip_v1"):  # their temperature is constant
            continue
        loader, towers = SimpleNamespace(n=10**4, steps_per_epoch=10), SimpleNamespace(dim=4)
        context = objective_of(run, loader=loader, architecture=towers, world=World()).context
        assert ((0.9, context.beta2), context.adam_eps) == (tuple(run.optimizer.betas), run.optimizer.eps)
        constant = method in ("isogclr", "fastclip_v2", "fastclip_v3", "amorlip")
        assert run.objective.tau_schedule == ("constant" if constant else "encoders")


@pytest.mark.parametrize("name", ["own", "finetune", "demo"])
def test_recipes_of_ones_own_data_train_our_methods_too(name):
    methods = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["methods"]
    assert {*PUBLISHED, "neuclip_literal", "neuclip_plus"} <= set(methods)
    assert name == "demo" or load(name, "samples=100000").objective.name == "openclip", "docs/which-method.md"
    run = load(name, "objective.name=neuclip_plus", "samples=100000")
    assert (run.objective.prototypes, run.objective.npn, run.objective.ratio_cap) == (4096, "queue", 2.0)
    assert run.objective.rho == load(name, "objective.name=neuclip", "samples=100000").objective.rho


TABLES = (
        ("cc3m", "fastclip_v3", {"rho": 6.5, "tau_lr": 2e-4, "gamma_min": 0.2, "gamma_decay_epochs": 18}),
        ("cc12m", "fastclip_v3", {"rho": 8.5, "tau_lr": 1e-4, "gamma_min": 0.2, "gamma_decay_epochs": 16}),
        ("laion315m", "fastclip_v3", {"rho": 16, "tau_lr": 5e-5, "gamma_min": 0.8, "gamma_decay_epochs": 10,
                                      "eps": 1e-6, "tau_lr_fall": 1 / 3}),
        ("cc3m", "fastclip_v2", {"rho": 7.0, "tau_lr": 1e-2, "tau_init": 0.03}),
        ("cc12m", "fastclip_v2", {"rho": 8.5, "tau_lr": 1e-4, "tau_init": 0.03}),
        ("cc3m", "isogclr", {"rho": 9.0, "tau_lr": 1e-2, "gamma": 0.6, "gamma_schedule": "constant"}),
        ("cc12m", "isogclr", {"gamma": 0.8, "tau_init": 0.03}),
        ("cc3m", "sogclr", {"tau": 0.03, "gamma": 0.6, "eps": 1e-14}),
)  # fmt: skip


def test_values_of_the_fastclip_tables():
    for name, method, expected in TABLES:
        objective = load(name, f"objective.name={method}").objective
        assert {key: getattr(objective, key) for key in expected} == expected, (name, method)


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_of_a_paper_has_its_values_and_states_source_command_and_gpu_hours(name):
    run = load(name)
    found = (run.samples, run.batch_size, run.model.arch, run.optimizer.lr, run.optimizer.weight_decay,
             run.schedule.warmup_steps)  # fmt: skip
    assert found == ENCODERS[name]
    assert load(name, "objective.name=fastclip_v3").objective.tau_gradient == "published_code"
    for method in ("isogclr", "fastclip_v2"):
        assert load(name, f"objective.name={method}").objective.tau_optimizer == "published_code"
    ours, literal = run.objective, load(name, "objective.name=neuclip_literal").objective
    if name in NEUCLIP:
        for reading in (literal, ours):
            assert (reading.rho, reading.tau_lr) == NEUCLIP[name]
            assert (reading.prototypes, reading.restart_every, reading.inner_steps) == (4096, 500, 10)
        assert (ours.name, ours.npn_lr, ours.ratio_cap) == ("neuclip", 0.01, 5.0)
        assert (literal.npn_lr, literal.ratio_cap) == (1.0, 0.0)
    header = (FOLDER / f"{name}.yaml").read_text().split("\noutput:")[0]
    for word in ("Reproduces", "Expected", "Command", "NOT VALIDATED", f"jobs/recipes/{name}.yaml"):
        assert word in header
    hours, (size, mfu) = re.search(r"GPU hours +(\d+)", header), assumed(name)
    estimate = plan_run(run, gpus=8, dataset_size=size).flops / (989e12 * mfu) / 3600
    assert float(hours[1]) == pytest.approx(estimate, rel=0.01)


def test_learning_rates_scale_with_the_batch_size_unless_given():
    half = load("cc3m", "batch_size=512", "objective.name=openclip")
    assert (half.optimizer.lr, half.objective.tau_lr) == (5e-4, 5e-4)
    assert load("cc3m", "batch_size=4096", "objective.name=neuclip").objective.npn_lr == 0.01
    given = load("cc3m", "batch_size=512", "optimizer.lr=3e-3")
    assert given.optimizer.lr == 3e-3
    assert given.objective.tau_lr == 1.25e-4 / 2


def test_a_method_without_settings_in_the_recipe_has_its_defaults(tmp_path, caplog):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("output: x\nsamples: 100\nbatch_size: 10\ndata: {sources: a}\nmethods: {openclip: {}}\n")
    run = load_recipe(recipe, ["objective.name=fastclip_v3", "schedule.warmup_steps=0"])
    assert run.objective == parse_objective({"name": "fastclip_v3"})
    assert "no settings for objective.name = fastclip_v3" in caplog.text
    with pytest.raises(UserError, match=r"'fastclip_v9' is not known. The nearest is fastclip_v"):
        load_recipe(recipe, ["objective.name=fastclip_v9"])
    for path in (recipe, None):
        with pytest.raises(UserError, match=r"objective\.name is required"):
            load_recipe(path, ["objective.name=[openclip]"])
    assert load_recipe(recipe, ["objective.name=openclip", "schedule.warmup_steps=0"]).objective.name == "openclip"
    recipe.write_text(recipe.read_text() + "reference_batch: ten\n")
    with pytest.raises(UserError, match="reference_batch = 'ten'"):
        load_recipe(recipe, ["objective.name=openclip"])
    recipe.write_text(recipe.read_text().replace("ten", "10"))
    with pytest.raises(UserError, match=r"batch_size = 10\.5: should be a valid integer"):
        load_recipe(recipe, ["objective.name=openclip", "batch_size=10.5"])


def test_what_only_a_recipe_resolves_is_refused_on_the_command_line():
    for override in ("extends=cc3m", "methods.neuclip.objective.rho=1.5", "reference_batch=null"):
        with pytest.raises(UserError, match=r"is for recipes only: give settings themselves, such as optimizer\.lr"):
            load("own", override)


def test_reading_a_recipe_does_not_import_open_clip():
    code = "import sys, pipeline.training.recipe; sys.exit('open_clip' in sys.modules)"
    assert python("-c", code).returncode == 0


def test_training_recipes_read_what_download_recipes_write():
    written = {read_yaml(path).get("output") for path in (FOLDER / "download").glob("*.yaml")}
    for path in PAPERS:
        assert load(path).data.sources[0].manifest in written, path


def test_a_wrong_key_is_reported_before_missing_data():
    for override, message in (("optimizer.lrr=3", r"Unknown key optimizer\.lrr"), ("seed=1", "There is no manifest at"),
                              ("selection.ratio=0.5", "Joint selection of examples")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            load_recipe(FOLDER / "own.yaml", ["data.sources=/nothing/here", "output=run", override])


def test_epochs_match_the_loader_weights_change_them_and_warmup_is_a_share_of_the_run(tmp_path):
    write_shards(tmp_path, [30, 27])
    for batch, streams in ((8, 4), (16, 16), (10, 1)):
        data = {"sources": str(tmp_path), "streams": streams}
        tree = resolve_budget({"epochs": 3, "batch_size": batch, "data": data}, {})
        layout = make_layout(samples=57, global_batch=batch, streams=streams)
        assert (tree["samples"], "epochs" in tree) == (3 * layout.steps * batch, False)
    write_shards(tmp_path, [64])
    data = {"sources": [{"manifest": str(tmp_path), "weight": 2}], "streams": 4}
    assert resolve_budget({"epochs": 0.5, "batch_size": 8, "data": data}, {})["samples"] == 64
    common = [f"output={tmp_path}", "batch_size=8", f"data.sources={tmp_path}", "data.streams=4"]
    run = load_recipe(None, [*common, "epochs=5", "schedule.warmup_share=0.1"])
    assert (run.total_steps, run.schedule.warmup_steps) == (40, 4)
    assert load_recipe(None, [*common, "samples=800", "schedule.warmup_share=0.25"]).schedule.warmup_steps == 25


def test_override_replaces_the_equivalent_recipe_setting():
    recipe = {"epochs": 3, "batch_size": 4, "schedule": {"warmup_share": 0.1}, "data": {"sources": "nowhere"}}
    tree = resolve_budget(recipe, {"samples": 400, "schedule": {"warmup_steps": 7}})
    assert (tree["samples"], tree["schedule"]) == (400, {"warmup_steps": 7})
    no_share = {"samples": 400, "schedule": {"warmup_steps": 7, "warmup_share": None}}
    assert resolve_budget(recipe, no_share)["schedule"] == {"warmup_steps": 7}
    data = {"sources": "nowhere", "streams": 2}
    other = {"samples": 400, "batch_size": 4, "data": data}
    assert resolve_budget(other, {"epochs": 2}, dataset_size=40)["samples"] == 80


def test_contradictory_settings_are_refused():
    for tree, message in (
        ({"epochs": 1, "samples": 5}, "Both epochs and samples are given"),
        ({"schedule": {"warmup_share": 0.1, "warmup_steps": 5}}, "Both warmup_share and warmup_steps"),
        ({"epochs": "x", "batch_size": 4}, "epochs = 'x': should be a valid number"),
        ({"epochs": 1}, "batch_size is required"),
        ({"epochs": 1, "batch_size": 8, "data": {"sources": "no"}}, "epochs = 1: the size of an epoch.*neuclip pairs"),
        ({"epochs": 1, "batch_size": 64, "data": {"sources": "x"}}, "does not fill one"),
        ({"samples": 8, "batch_size": 8, "schedule": {"warmup_share": 2}}, "warmup_share = 2: should be less"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            resolve_budget(tree, {}, dataset_size=None if "the size" in message else 9)
