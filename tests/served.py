"""The embedded engine on a real port, inside the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from assay.embedded.engine import Engine
from assay.embedded.faults import plant
from assay.embedded.hooks import Hooks
from assay.embedded.server import create_app

NAME = "served"


@contextmanager
def served(folder: Path, fault: str | Hooks | None = None) -> Iterator[str]:
    """Serve `folder` in float32, with a fault by name or hooks of the test's own; yield the base URL."""
    hooks = plant(fault) if isinstance(fault, str) else fault or Hooks()
    with Engine(folder, torch.float32, hooks) as engine:
        server = uvicorn.Server(uvicorn.Config(create_app(engine, NAME), port=0, log_level="warning"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
