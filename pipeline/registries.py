"""Registries: what a setting selects by name, from this package and from installed ones."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, TypeVar, cast

from pipeline.config import suggest
from pipeline.errors import UserError

T = TypeVar("T")
Added = TypeVar("Added")


def load_entry_points(group: str, *, what: str) -> None:
    """Import what installed packages offer to a registry; `what` says in a message what that is.

    Raises:
        UserError: One of them cannot be imported.
    """
    for point in importlib.metadata.entry_points(group=group):
        try:
            point.load()
        except UserError:
            raise
        except Exception as error:  # anything may be wrong with a package of a user's own
            raise UserError(
                f"The {what} {point.name!r} ({point.value}, an entry point of {group}) cannot be imported: "
                f"{type(error).__name__}: {error}. Fix or uninstall its package."
            ) from error


@dataclass(eq=False)
class Registry(Generic[T]):
    """Classes that a setting selects by name: those of a package, and those that installed packages add."""

    kind: str
    """What is registered, for messages."""
    _: KW_ONLY
    setting: str
    """The setting that selects one."""
    package: str
    """All its modules are imported before the first look-up, so that one new file there adds a class."""
    group: str
    """Entry points of installed packages (`name = "module"`), whose modules are imported then, too."""
    registered: dict[str, T] = field(default_factory=dict)
    _loaded: bool = False

    def register(self, name: str) -> Callable[[Added], Added]:
        """Class decorator: make a class selectable by a name.

        Raises:
            UserError: Another class has the name.
        """

        def add(item: Added) -> Added:
            present: Any = self.registered.get(name, item)
            old, new = (f"{each.__module__}.{each.__qualname__}" for each in (present, cast(Any, item)))
            if old != new:
                raise UserError(f"{new} is called {name!r}, but the {self.kind} {old} has this name: choose another.")
            self.registered[name] = cast(T, item)
            return item

        return add

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        if not self._loaded:
            path = importlib.import_module(self.package).__path__
            for module in pkgutil.walk_packages(path, prefix=f"{self.package}."):
                importlib.import_module(module.name)
            load_entry_points(self.group, what=self.kind)
            self._loaded = True
        return tuple(sorted(self.registered))

    def known(self, name: str) -> str:
        """The name itself, if it is registered: a validator of the setting.

        Raises:
            UserError: It is not.
        """
        if name not in self.names():
            raise UserError(f"no such {self.kind}. {suggest(name, self.names())}")
        return name

    def __getitem__(self, name: str) -> T:
        if name not in self.names():
            raise UserError(f"{self.setting} = {name!r}: no such {self.kind}. {suggest(name, self.names())}")
        return self.registered[name]
