"""The fault switch of a server: `--fault NAME[=VALUE]` plants one of the faults that are registered with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from assay.errors import ConfigError

Kind = type[int] | type[float] | type[str]


@dataclass(frozen=True)
class FaultSpec:
    """What a fault is called, takes and does."""

    name: str
    kind: Kind | None  # type of its value; None: it takes none
    description: str
    plant: Callable[[Any], Any]  # value -> hooks

    @property
    def usage(self) -> str:
        """How it is asked for."""
        return f"{self.name}={self.kind.__name__}" if self.kind else self.name


class Switch(dict[str, FaultSpec]):
    """Faults by name."""

    def fault(self, name: str, kind: Kind | None, description: str) -> Callable[[Any], Any]:
        """Register a class of hooks under `name`; it is made with the fault's value, or None."""

        def register(plant: Any) -> Any:
            self[name] = FaultSpec(name, kind, description, plant)
            return plant

        return register

    def plant(self, argument: str) -> Any:
        """The hooks of a fault given as NAME or NAME=VALUE.

        Raises:
            ConfigError: no such fault, or a value that is missing, superfluous or of the wrong type.
        """
        name, equals, text = argument.partition("=")
        spec = self.get(name)
        if spec is None:
            raise ConfigError(f"unknown fault '{name}'; known: {', '.join(sorted(self))}")
        if spec.kind is None:
            if equals:
                raise ConfigError(f"fault '{name}' takes no value (found '{text}')")
            return spec.plant(None)
        try:
            value = spec.kind(text)
        except ValueError:
            value = None
        if value in (None, "") or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"fault '{name}' needs a value: {spec.usage} (found '{argument}')")
        return spec.plant(value)

    def listing(self) -> str:
        """All of them, for a command's help."""
        return "faults:\n" + "\n".join(f"  {spec.usage:32} {spec.description}" for spec in self.values())
