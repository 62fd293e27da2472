"""The embedded engine on a real port, inside the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fakes import app_server

from assay.embedded.engine import Engine
from assay.embedded.faults import plant
from assay.embedded.hooks import Hooks
from assay.embedded.server import create_app

NAME = "served"


@contextmanager
def served(folder: Path, fault: str | Hooks | None = None) -> Iterator[str]:
    """Serve `folder` in float32, with a fault by name or hooks of the test's own; yield the base URL."""
    hooks = plant(fault) if isinstance(fault, str) else fault or Hooks()
    with Engine(folder, torch.float32, hooks) as engine, app_server(create_app(engine, NAME)) as url:
        yield url
