"""The initial temperature of a fine-tuned model: that of the pretrained weights."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from pipeline.objectives import ObjectiveConfig
from pipeline.training.recipe import RunConfig


def starting_objective(run: RunConfig, logit: tuple[float, float | None] | None) -> ObjectiveConfig:
    """The run's objective with the temperature (and bias) of the pretrained weights as its initial values.

    A temperature outside the objective's bounds starts at the nearest bound. Objectives with a fixed temperature keep
    theirs, which is a setting.

    Args:
        run: The run's configuration.
        logit: log(1/tau) and bias of the pretrained weights; None without pretrained weights.
    """
    config = run.objective
    if logit is None or not run.model.pretrained_temperature:
        return config
    names = {field.name for field in fields(config)}
    changes: dict[str, Any] = {}
    if "tau_init" in names:
        tau = math.exp(-logit[0])
        low, high = getattr(config, "tau_min", tau), getattr(config, "tau_max", tau)
        changes["tau_init"] = min(max(tau, low), high)
    if "bias_init" in names and logit[1] is not None:
        changes["bias_init"] = logit[1]
    return replace(config, **changes)


def describe_start(run: RunConfig, logit: tuple[float, float | None] | None) -> str:
    """A log message about the weights a run starts from; empty without pretrained weights."""
    if logit is None:
        return ""
    tau, bias = math.exp(-logit[0]), "" if logit[1] is None else f" and bias {logit[1]:.4g}"
    start = f"Starting from the weights {run.model.pretrained}, whose temperature is {tau:.4g}{bias}"
    if not run.model.pretrained_temperature:
        return f"{start}; the objective starts at its own (model.pretrained_temperature=false)."
    config = starting_objective(run, logit)
    initial = getattr(config, "tau_init", None)
    if initial is None:
        return f"{start}; {config.name} has a fixed temperature, which is a setting: objective.tau."
    if not math.isclose(initial, tau, rel_tol=1e-3):
        return (
            f"{start}; the objective starts at {initial:.4g}, its bound nearest to that (objective.tau_min, tau_max)."
        )
    return f"{start}; the objective starts there."
