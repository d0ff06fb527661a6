"""Alternative units for budgets: epochs instead of samples, and warm-up as a fraction of the run.

Both are keys of a recipe (`epochs`, `schedule.warmup_share`) that become `samples` and `schedule.warmup_steps` when the
recipe is read, so that a run's stored configuration always holds plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import config as cfg
from pipeline.data.data_config import DataConfig
from pipeline.data.order.mixture import load_mixture
from pipeline.errors import UserError


def resolve_budget(recipe: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a recipe with its overrides and convert `epochs` and `schedule.warmup_share` to samples and steps.

    The size of an epoch comes from the data's manifests or, if they are missing, from `plan.dataset_size`.

    Args:
        recipe: The recipe's tree.
        above: The overrides' tree; a budget given there replaces the recipe's budget, also one in the other unit.

    Raises:
        UserError: A budget is given in both units in one place, or a value is out of range.
    """
    _one_of("epochs", "samples", recipe, above)
    _one_of("warmup_share", "warmup_steps", _section(recipe, "schedule"), _section(above, "schedule"))
    below = dict(recipe)
    if "samples" in above:
        below.pop("epochs", None)
    if "epochs" in above:
        below.pop("samples", None)
    for given, replaced in (("warmup_steps", "warmup_share"), ("warmup_share", "warmup_steps")):
        if given in _section(above, "schedule") and replaced in _section(below, "schedule"):
            below["schedule"] = {key: value for key, value in below["schedule"].items() if key != replaced}
    tree = cfg.merge(below, above)
    if "epochs" in tree:
        tree["samples"] = _samples_of(tree.pop("epochs"), tree)
    if "warmup_share" in _section(tree, "schedule"):
        schedule = dict(tree["schedule"])
        share = _number(schedule.pop("warmup_share"), "schedule.warmup_share", low=0.0, high=1.0)
        schedule["warmup_steps"] = round(share * (_whole(tree, "samples") // _whole(tree, "batch_size")))
        tree["schedule"] = schedule
    return tree


def _samples_of(epochs: Any, tree: Mapping[str, Any]) -> int:
    """The number of samples in `epochs` epochs of whole batches."""
    count = _number(epochs, "epochs", low=0.0, high=1e6)
    batch = _whole(tree, "batch_size")
    n = _epoch_samples(tree)
    streams = DataConfig.streams if (given := _section(tree, "data").get("streams")) is None else given
    # The same layout of an epoch as in `make_layout`: streams of equal length, whole batches.
    steps = n // streams // max(1, batch // streams) if isinstance(streams, int) and streams > 0 else n // batch
    if steps < 1:
        raise UserError(
            f"An epoch of {n:,} samples does not fill one batch of batch_size = {batch}: lower batch_size (and "
            "data.streams, which must divide it)."
        )
    return max(1, round(count * steps)) * batch


def _epoch_samples(tree: Mapping[str, Any]) -> int:
    """Samples per epoch, from the manifests of `data.sources` or, if these are missing, from `plan.dataset_size`."""
    config = cfg.parse(DataConfig, _section(tree, "data"), prefix="data")
    try:
        return load_mixture(config).epoch_samples
    except UserError as error:
        expected = _section(tree, "plan").get("dataset_size")
        if isinstance(expected, int):
            return expected
        raise UserError(f"epochs = {tree.get('epochs', '')}: the size of an epoch is not known. {error}") from error


def _one_of(name: str, other: str, *trees: Mapping[str, Any]) -> None:
    if any(name in tree and other in tree for tree in trees):
        raise UserError(f"Both {name} and {other} are given, which are two ways to say the same: give one of them.")


def _number(value: Any, name: str, *, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise UserError(f"{name} = {value!r} must be a number above {low:g}, at most {high:g}.")
    return float(value)


def _whole(tree: Mapping[str, Any], name: str) -> int:
    value = tree.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        given = "is required and was not given" if value is None else f"= {value!r} must be a positive whole number"
        raise UserError(f"{name} {given}.")
    return value


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = tree.get(name, {})
    return value if isinstance(value, Mapping) else {}
