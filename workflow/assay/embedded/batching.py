"""One thread that runs a model for all who ask: requests join and leave between two steps of one batch."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Protocol, Self, TypeVar

import torch


class Waiting(Protocol):
    """A request on its way."""

    @property
    def emit(self) -> Callable[[Any], None]:
        """Tells who waits for it what came, or the exception that stopped it; called from the engine's thread."""


J = TypeVar("J", bound=Waiting)


class Batcher(ABC, Generic[J]):
    """The thread, the requests that wait for it (`_ready`) and those in the batch (`_jobs`). A context manager."""

    def __init__(self) -> None:
        self.error: str | None = None  # what stopped it
        self._waiting: queue.SimpleQueue[J | None] = queue.SimpleQueue()
        self._ready: list[J] = []
        self._jobs: list[J] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @abstractmethod
    def _start(self) -> None:
        """Called once in the thread."""

    @abstractmethod
    def _admit(self) -> None:
        """Move what fits from `_ready` to `_jobs`."""

    @abstractmethod
    def _step(self) -> None:
        """Take every job one step on, and let those go that are done. There may be none."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._waiting.put(None)
        self._thread.join(timeout=5)

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._jobs)

    def submit(self, job: J) -> J:
        """Queue a request."""
        self._waiting.put(job)
        return job

    @torch.inference_mode()
    def _run(self) -> None:
        set_threads()
        self._start()
        try:
            while not self._stop.is_set():
                self._collect()
                self._admit()
                self._step()
        except Exception as error:  # the batch is lost: say so to everyone who waits, and to whoever comes later
            self.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._abandon()

    def _collect(self) -> None:
        """Take in what was submitted; wait for it if there is nothing else to do."""
        idle = not self._jobs and not self._ready
        while idle or not self._waiting.empty():
            job = self._waiting.get()
            if job is None:
                return
            self._ready.append(job)
            idle = False

    def _abandon(self) -> None:
        error = RuntimeError(self.error or "the server is shutting down")
        while not self._waiting.empty():
            if job := self._waiting.get():
                self._ready.append(job)
        for job in [*self._jobs, *self._ready]:
            job.emit(error)


def set_threads() -> None:
    """Take the thread count from OMP_NUM_THREADS, where it is set."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
