"""What every script runs in: a log file that also reaches the terminal, and errors for people."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from assay.errors import AssayError


@contextmanager
def stage(log_file: str | Path, threads: int | None = None) -> Iterator[None]:
    """Log to `log_file` and stderr, errors as `errors_told` tells them.

    Args:
        log_file: the rule's log.
        threads: OMP_NUM_THREADS for libraries imported inside the block; oversubscribed cores cost 4-6 times.
    """
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # bars of libraries would fill a log with one line a tick
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    # Of a job that SLURM queued again, what its earlier start logged is evidence.
    mode = "a" if "SLURM_RESTART_COUNT" in os.environ else "w"
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        handlers=[logging.FileHandler(log_file, mode=mode, encoding="utf-8"), logging.StreamHandler(sys.stderr)],
        force=True,
    )
    for noisy in ("httpx", "httpcore", "transformers", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with errors_told():
        yield


@contextmanager
def errors_told() -> Iterator[None]:
    """Turn an `AssayError` into its message in the log and exit status 1.

    Anything else that is raised is a fault of ours: its traceback goes there.
    """
    log = logging.getLogger("assay")
    try:
        yield
    except AssayError as error:
        log.error(str(error))
        raise SystemExit(1) from None
    except Exception:
        log.exception("this is a fault in Assay, not in your configuration")
        raise SystemExit(1) from None
