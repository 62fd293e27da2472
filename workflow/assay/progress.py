"""Progress of long work: a bar on a terminal, otherwise a log line now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

LOG_EVERY_S = 15


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call once for each of `total` things done."""
    started = shown = time.monotonic()
    count = 0

    def say() -> None:
        nonlocal count, shown
        count += 1
        if count == total or time.monotonic() - shown > LOG_EVERY_S:
            shown = time.monotonic()
            log.info("%s: %d of %d after %.0f s", label, count, total, shown - started)

    if not sys.stderr.isatty():
        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
