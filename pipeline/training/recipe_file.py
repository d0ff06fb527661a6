"""Keys of a recipe that are no settings of a run: they are resolved when the recipe is read.

`methods` has settings by objective, `reference_batch` scales learning rates, and `epochs` and `schedule.warmup_share`
become `samples` and `schedule.warmup_steps`. A run's stored configuration therefore holds plain numbers only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from pipeline import config as cfg
from pipeline.config import section
from pipeline.data.data_config import DataConfig
from pipeline.data.order.canonical_order import default_streams
from pipeline.data.order.mixture import load_mixture
from pipeline.data.shards.check_shards import check_captions
from pipeline.errors import UserError
from pipeline.objectives import parse_objective
from pipeline.objectives.registry import setting_names
from pipeline.run_files import RUN_CONFIG_NAME

log = logging.getLogger(__name__)
DEFAULT_OBJECTIVE = "neuclip"
ONLY_IN_RECIPES = ("extends", "methods", "reference_batch")
BUDGETS, WARM_UPS = ("epochs", "samples"), ("warmup_share", "warmup_steps")
SCALED_RATES = (("optimizer", "lr"), ("objective", "tau_lr"))
CONSENTS = ("data.allow_outside", "evaluation.allow_outside")
"""Settings by which users let what they were given by others act on their machine."""
RESOLVED = ("seed", "max_skipped_steps", "model", "optimizer", "schedule", "engine", "checkpoint", "telemetry")
"""Every resolved configuration has all of these, also of earlier versions: it is recognized under any name."""


@section
class RecipeKeys:
    """What a recipe or the command line may say beside the settings of a run. It is resolved when the recipe is read:
    the run's `config.yaml` holds its result."""

    extends: str | None = None
    """Only in a recipe: the name of the recipe beside it that it changes."""
    epochs: float | None = Field(default=None, gt=0, le=1e6)
    """Passes over the data, instead of `samples`."""
    reference_batch: int | None = Field(default=None, ge=1)
    """Only in a recipe: the batch size for which its `optimizer.lr` and `objective.tau_lr` were chosen: both are
    multiplied by batch_size / reference_batch, unless they are given as overrides."""
    methods: dict[str, dict[str, Any]] | None = None
    """Only in a recipe: settings by method, `{NAME: {section: {key: value}}}`: those of `objective.name` override the
    rest. A method without settings here trains with its defaults."""


@section
class ScheduleKeys:
    """Keys of recipes in the section `schedule`."""

    warmup_share: float | None = Field(default=None, gt=0, le=1)
    """Share of the run that is warm-up, instead of `schedule.warmup_steps`."""


RECIPE_KEYS = (*cfg.keys(RecipeKeys), *(f"schedule.{key}" for key in cfg.keys(ScheduleKeys)))
"""Dotted keys that a recipe may have beside those of `RunConfig`."""


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's tree, laid over that of the recipe beside it that it `extends`, if any. A `UserError` if a file cannot
    be read, or if recipes extend each other in a circle."""
    tree, seen = _read_one(path), {path.resolve()}
    while "extends" in tree:
        base = path.parent / f"{tree.pop('extends')}.yaml"
        if base.resolve() in seen:
            raise UserError(f"{path} extends itself by way of {base}.")
        seen.add(base.resolve())
        tree = cfg.merge(_read_one(base), tree)
    return tree


def _read_one(path: Path) -> dict[str, Any]:
    """A recipe's tree; that of a run's folder, which may be of somebody else, without consents."""
    tree = cfg.read_yaml(path)
    if path.name != RUN_CONFIG_NAME and not all(key in tree for key in RESOLVED):
        return tree
    if given := consents_in(tree):
        log.warning(
            "%s, which may come from somebody else, has %s: it is not taken from there. If you trust the run and its "
            "data, give it on the command line.",
            path,
            " ".join(given),
        )
    return stored_recipe(tree, file=path)


def stored_recipe(tree: Mapping[str, Any], *, file: Path) -> dict[str, Any]:
    """A run's stored configuration without consents, and without settings that have left since."""
    objective = tree.get("objective") or {}
    known = setting_names(objective.get("name"))  # a method of a package may have a setting of the same name
    valid = {key: value for key, value in objective.items() if key in known}
    left = {key: value for key, value in objective.items() if key not in known}
    current = cfg.without_departed({**tree, "objective": left}, file=file)
    return without_consents({**current, "objective": {**current.get("objective", {}), **valid}})


def consents_in(stored: Mapping[str, Any]) -> list[str]:
    """The consents in a stored configuration, as overrides."""
    given = [key for key, value in cfg.flatten(stored).items() if value]
    return [f"{consent}=true" for consent in CONSENTS if any(f".{key}".endswith(f".{consent}") for key in given)]


def without_consents(stored: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration that was read from a checkpoint or a run's folder, without the consents in it.

    It comes from whoever wrote the checkpoint. Users consent for themselves, in a recipe or by an override.
    """
    return {
        key: without_consents(value, f"{prefix}.{key}") if isinstance(value, Mapping) else value
        for key, value in stored.items()
        if not any(f"{prefix}.{key}".endswith(f".{consent}") for consent in CONSENTS)
    }


def resolve_methods(
    recipe: Mapping[str, Any], above: Mapping[str, Any], *, scaled: dict[str, str] | None = None
) -> dict[str, Any]:
    """Resolve `methods` and `reference_batch`: a recipe with what it has for the chosen method, and with learning rates
    scaled linearly with the batch size, as FastCLIP (appendix B) does over numbers of nodes.

    `above` is the overrides' tree; `scaled` gets each changed rate that counts, as "1e-05 x 64/256".

    Raises:
        UserError: There is no such method, a value is of the wrong type, or an override is for recipes only.
    """
    if only := [key for key in ONLY_IN_RECIPES if key in above]:
        raise UserError(
            f"{only[0]} = {above[only[0]]!r} is for recipes only: give settings themselves, such as optimizer.lr, or "
            "write a recipe with `extends: NAME` that changes the one of that name."
        )
    tree = dict(recipe)
    methods = cfg.parse(RecipeKeys, {"methods": tree.pop("methods", None)}).methods
    name = cfg.merge(_section(tree, "objective"), _section(above, "objective")).get("name", DEFAULT_OBJECTIVE)
    if methods is not None and str(name) not in methods:
        parse_objective({"name": name})
        log.warning(
            "This recipe has no settings for objective.name = %s: the method's defaults are used. A part under "
            "`methods` sets others.",
            name,
        )
    tree = cfg.merge(tree, (methods or {}).get(str(name), {}))
    reference = cfg.parse(RecipeKeys, {"reference_batch": tree.pop("reference_batch", None)}).reference_batch
    if reference is None or (size := _sizes({**tree, **above}).batch_size) == reference:
        return tree
    for section_name, key in SCALED_RATES:
        values = _section(tree, section_name)
        if key in values:
            tree[section_name] = {**values, key: float(values[key]) * size / reference}
            if scaled is not None and key not in _section(above, section_name):
                scaled[f"{section_name}.{key}"] = f"{float(values[key]):g} x {size}/{reference}"
    return tree


def resolve_budget(
    recipe: Mapping[str, Any], above: Mapping[str, Any], *, dataset_size: int | None = None
) -> dict[str, Any]:
    """Merge a recipe with its overrides, convert `epochs` and `schedule.warmup_share` to samples and steps, and derive
    `data.streams` if it is not given.

    A budget in the overrides' tree, `above`, replaces the recipe's, also one in the other unit. `dataset_size` are the
    samples of an epoch if the manifests of the data are missing.

    Raises:
        UserError: A budget is given in both units in one place, or a value is out of range.
    """
    tree = _merged_in_one_unit(BUDGETS, recipe, above)
    data, batch = tree.get("data", {}), tree.get("batch_size")
    if isinstance(data, Mapping) and isinstance(batch, int) and batch > 0 and data.get("streams", "auto") == "auto":
        tree["data"] = {**data, "streams": default_streams(batch)}
    if isinstance(tree.get("schedule"), Mapping):
        schedules = (_section(recipe, "schedule"), _section(above, "schedule"))
        tree["schedule"] = _merged_in_one_unit(WARM_UPS, *schedules)
    if "epochs" in tree:
        tree["samples"] = _samples_of(tree, dataset_size)
        del tree["epochs"]
    if "warmup_share" in _section(tree, "schedule"):
        schedule, sizes = dict(tree["schedule"]), _sizes(tree)
        given = {"warmup_share": schedule.pop("warmup_share")}
        share = cfg.parse(ScheduleKeys, given, prefix="schedule").warmup_share or 0.0
        tree["schedule"] = {**schedule, "warmup_steps": round(share * (sizes.samples // sizes.batch_size))}
    return tree


def _merged_in_one_unit(names: tuple[str, str], recipe: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe merged with its overrides, where one budget has two names: a name that the overrides give replaces
    either one of the recipe, and a null there removes the recipe's of that name.
    """
    replaced = {name for name in names if name in above}
    if any(above[name] is not None for name in replaced):
        replaced = set(names)
    merged = cfg.merge({key: value for key, value in recipe.items() if key not in replaced}, above)
    if all(merged.get(name) is not None for name in names):
        raise UserError(
            f"Both {names[0]} and {names[1]} are given, which are two ways to say the same: give one of them."
        )
    return {key: value for key, value in merged.items() if key not in names or value is not None}


def _samples_of(tree: Mapping[str, Any], dataset_size: int | None) -> int:
    """The number of samples in the tree's `epochs` of whole batches."""
    count, batch = cfg.parse(RecipeKeys, {"epochs": tree["epochs"]}).epochs or 0.0, _sizes(tree).batch_size
    config = cfg.parse(DataConfig, _section(tree, "data"), prefix="data")
    try:
        n = load_mixture(config).epoch_samples
    except UserError as error:
        if dataset_size is None:
            raise UserError(f"epochs = {count:g}: the size of an epoch is not known. {error}") from error
        n = dataset_size
    # The same layout of an epoch as in `make_layout`: streams of equal length, whole batches.
    steps = n // config.streams // max(1, batch // config.streams)
    if steps < 1:
        check_captions(config)  # else it is refused after this
        raise UserError(
            f"An epoch of {n:,} samples does not fill one batch (batch_size = {batch}): lower batch_size "
            "(and data.streams, which must divide it)."
        )
    return max(1, round(count * steps)) * batch


@section
class _Sizes:
    """The numbers with which budgets are computed."""

    batch_size: int = Field(ge=1)
    samples: int = Field(default=1, ge=1)


def _sizes(tree: Mapping[str, Any]) -> _Sizes:
    return cfg.parse(_Sizes, {key: tree[key] for key in ("batch_size", "samples") if key in tree})


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name, {})
    return value if isinstance(value, Mapping) else {}
