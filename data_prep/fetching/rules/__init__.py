"""Rules for what may be fetched: each file here is one, and refuses responses by their URL and headers.

A rule is a function with `@rule`, which raises a FetchError with a reason from `data_prep/reasons.py`. It sees every
response and redirect before the body is read, in every worker of every distributor.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from email.message import Message

from data_prep.settings.download_config import GuardConfig

Rule = Callable[[str, Message, GuardConfig], None]
_RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule: a function of URL, headers and settings."""
    _RULES[f"{function.__module__}.{function.__qualname__}"] = function
    return function


def check_response(url: str, headers: Message, guard: GuardConfig) -> None:
    """Apply all rules to a response or a redirect.

    Raises:
        FetchError: A rule refuses it.
    """
    _import_all()
    for name in sorted(_RULES):
        _RULES[name](url, headers, guard)


@functools.cache
def _import_all() -> None:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
