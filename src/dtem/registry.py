"""Registries of methods and integrations: built in, registered by a call, or by an entry point of a package."""

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

from dtem.errors import DtemError


class Registry:
    """Classes by name. Built-in classes and entry points are imported on first use.

    Args:
        kind: what is registered, for error messages.
        built_in: name to ``module:Class``.
        group: the group of entry points to add.
    """

    def __init__(self, kind: str, built_in: dict[str, str], group: str) -> None:
        self.kind = kind
        self.group = group
        self._classes: dict[str, Any] = dict(built_in)
        self._discovered = False

    def register(self, name: str, cls: type) -> None:
        """Add a class. A name that is in use is refused."""
        self._discover()
        if self._classes.get(name, cls) not in (cls, f"{cls.__module__}:{cls.__qualname__}"):
            raise DtemError(f"{self.kind} {name!r} is registered already; choose another name")
        self._classes[name] = cls

    def _discover(self) -> None:
        if self._discovered:
            return
        points: dict[str, str] = {}
        for point in entry_points(group=self.group):
            known = points.get(point.name, self._classes.get(point.name, point.value))
            if known != point.value:
                raise DtemError(
                    f"{self.kind} {point.name!r} is registered already ({known}), and the entry point {point.value!r} "
                    "of another package has the same name; rename that entry point, or uninstall the package"
                )
            points[point.name] = point.value
        self._classes = points | self._classes
        self._discovered = True

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._classes))

    def __len__(self) -> int:
        self._discover()
        return len(self._classes)

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._classes

    def __getitem__(self, name: str) -> Any:
        self._discover()
        if name not in self._classes:
            raise DtemError(f"{self.kind} {name!r} is not known; choose one of: {', '.join(self)}")
        entry = self._classes[name]
        if isinstance(entry, str):
            module, cls = entry.split(":")
            entry = self._classes[name] = getattr(importlib.import_module(module), cls)
        return entry
