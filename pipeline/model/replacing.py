"""Put modules of ours in the place of a model's own."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def replace_modules(model: nn.Module, classes: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Replace modules of a model by ones of other classes that have the same parameters, submodules and attributes.

    State dicts, names and hooks stay as they are. `classes` maps modules, without the model itself, to subclasses of
    their classes.
    """
    new: dict[nn.Module, nn.Module] = {}
    for old, kind in classes.items():
        new[old] = kind.__new__(kind)
        new[old].__dict__.update(old.__dict__)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            model.set_submodule(name, new[module])
