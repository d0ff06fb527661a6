"""Declarations of studies (`jobs/studies/NAME.yaml`) and the runs they define.

A study crosses `settings` (datasets, regimes) with `arms` (what is compared) and seeds. Settings and arms are lists of
dotted overrides of a recipe; those of the arm are applied after those of the setting. Sizes: `desk` (the built-in
corpus and a micro model), `smoke` (a few steps of a few arms of it, to test the study) and `paper` (the real datasets
and recipes).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline import config as cfg
from pipeline.config import section
from pipeline.errors import UserError
from pipeline.training.recipe import RunConfig, load_recipe

FOLDER = Path(__file__).parent
RECIPES = FOLDER.parent / "recipes"
SIZES = ("desk", "smoke", "paper")
SPEC_NAME, RESULT_NAME = "unit.json", "result.json"
NOT_IDENTITY = frozenset(
    {"output", "data.sources", "evaluation.suite", "evaluation.workers", "telemetry.progress", "telemetry.tensorboard"}
)
"""Settings that affect file locations or logging, but not what a run computes."""


@section
class Variant:
    """A setting or an arm of a study."""

    title: str = ""
    """Its name in tables and figures; empty: its key."""
    set: tuple[str, ...] = ()
    """Overrides of the recipe, as on the command line."""
    recipe: str = "desk"
    """Of a setting: a recipe in `jobs/recipes/`."""
    corpus: str | None = None
    """Of a setting: a built-in corpus of `sizes.yaml`; null: `data.sources` of the recipe."""
    ranks: int | None = Field(default=None, ge=1)
    """Of a setting: number of processes; null: that of the size."""
    network_share: float = Field(default=0.0, ge=0, lt=1)
    """Of a setting: the share of the step time that NeuCLIP's network takes."""
    same_compute: bool = False
    """Of an arm: reduce its samples by `network_share`, so that all arms have the same cost."""


@section
class Size:
    """The runs of a study at one size."""

    settings: dict[str, Variant]
    """Datasets or regimes; every arm runs in every setting."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the repetitions."""
    arms: dict[str, Variant] = field(default_factory=dict)
    """Arms at this size; empty: the study's."""
    baseline: str = ""
    """Baseline at this size; empty: the study's."""


@section
class Study:
    """A study as declared in `jobs/studies/NAME.yaml`."""

    title: str
    """Its name in tables and pages."""
    reproduces: str
    """The tables and figures of the papers that it reproduces."""
    question: str
    """The question it answers, in one sentence."""
    baseline: str
    """The arm that differences are relative to."""
    columns: tuple[str, ...]
    """Columns of the tables, by their names in `jobs/studies/outcomes.py`."""
    curves: tuple[str, ...] = ("average",)
    """Columns plotted over samples seen."""
    against: str | None = None
    """Column that the first column is plotted against, one point per arm; null: no such figure."""
    arms: dict[str, Variant] = field(default_factory=dict)
    """What is compared."""
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Arms that are listed and plotted together; empty: one group."""
    smoke: dict[Literal["settings", "arms"], tuple[str, ...]]
    """What of the desk size tests within a minute whether the study works; the first arm is the baseline."""
    alone: bool = False
    """The runs are timed and must not share the machine with other runs."""
    measure: Literal["normalizers", "scores", "none"] = "normalizers"
    """Scores and the error of normalizers, scores only, or neither."""
    desk: Size
    paper: Size


@dataclass(frozen=True)
class Unit:
    """One run of a study."""

    study: str
    setting: str
    arm: str
    seed: int
    recipe: Path
    corpus: str | None
    ranks: int
    overrides: tuple[str, ...]
    run: RunConfig
    key: str
    """The name of the run's folder, the same for identical runs of different studies."""

    @property
    def label(self) -> str:
        return f"{self.study}/{self.setting}/{self.arm}/seed{self.seed}"

    def folder(self, output: Path) -> Path:
        return output / "runs" / self.key

    def is_done(self, output: Path) -> bool:
        return (self.folder(output) / RESULT_NAME).is_file()


def load_study(name: str) -> Study:
    """Load the declaration of a study.

    Raises:
        UserError: It is invalid.
    """
    return cfg.parse(Study, cfg.read_yaml(FOLDER / f"{name}.yaml"))


@section
class Corpus:
    """A built-in corpus: training pairs, held-out images of a task, and the side of the images in pixels."""

    pairs: int = Field(ge=1)
    held_out: int = Field(ge=1)
    image_size: int = Field(ge=1)


@section
class SizeFacts:
    """What all studies of a size share, as described in `sizes.yaml`."""

    anchors: int
    ranks: int = Field(ge=1)
    defaults: tuple[str, ...]
    set: tuple[str, ...]
    corpora: dict[str, Corpus] = field(default_factory=dict)


def load_size(name: str) -> dict[str, Any]:
    """The `SizeFacts` of a size as plain values; a `UserError` if sizes.yaml has another key or value."""
    return cfg.to_tree(cfg.parse(SizeFacts, cfg.read_yaml(FOLDER / "sizes.yaml")[name], prefix=f"sizes.yaml: {name}"))


def size_of(study: Study, size: str) -> Size:
    """The study at a size; `smoke` is `desk` with fewer settings and arms, and one seed."""
    chosen = study.paper if size == "paper" else study.desk
    chosen = replace(chosen, arms=chosen.arms or study.arms, baseline=chosen.baseline or study.baseline)
    if size != "smoke":
        return chosen
    return Size(
        settings={name: chosen.settings[name] for name in study.smoke["settings"]},
        seeds=chosen.seeds[:1],
        arms={name: chosen.arms[name] for name in study.smoke["arms"]},
        baseline=study.smoke["arms"][0],
    )


def units_of(name: str, *, size: str, overrides: tuple[str, ...] = ()) -> list[Unit]:
    """All runs of a study in order of declaration, seeds outermost, so that an unfinished study is balanced.

    Raises:
        UserError: The settings of a run are invalid; the message names the run.
    """
    study, facts = load_study(name), load_size(size)
    at_size = size_of(study, size)
    units = []
    for seed, setting_name, arm_name in itertools.product(at_size.seeds, at_size.settings, at_size.arms):
        setting, arm = at_size.settings[setting_name], at_size.arms[arm_name]
        given = (*facts["defaults"], *setting.set, *arm.set, *facts["set"], *overrides, f"seed={seed}")
        recipe = RECIPES / f"{setting.recipe}.yaml"
        try:
            run = load_recipe(recipe, given)
            if arm.same_compute:
                given += (f"samples={round(run.samples * (1 - setting.network_share))}",)
                run = load_recipe(recipe, given)
        except UserError as error:
            raise UserError(f"{name}, {setting_name}, {arm_name}: {error}") from error
        corpus, ranks, flat = setting.corpus, setting.ranks or facts["ranks"], cfg.flatten(cfg.to_tree(run))
        identity = {
            "settings": {key: value for key, value in flat.items() if key not in NOT_IDENTITY},
            "ranks": ranks,
            "measure": study.measure,
            "corpus": facts["corpora"][corpus] if corpus else flat["data.sources"],
        }
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        key = f"{run.objective.name}-seed{run.seed}-{digest[:10]}"
        units.append(Unit(name, setting_name, arm_name, seed, recipe, corpus, ranks, given, run, key))
    return units
