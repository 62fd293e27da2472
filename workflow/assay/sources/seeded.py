"""Sources built by our own code from a seed: a registry that each builder's module adds itself to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Builder = Callable[[Path, int, Mapping[str, Any]], None]  # (directory to fill, seed, options)

BUILDERS: dict[str, Builder] = {}
