"""What tests of launchers share: the fake server to launch, and how it and its processes are looked at."""

import time
from pathlib import Path

import httpx
import psutil

FAKE = Path(__file__).parent / "data" / "fake_server.py"


async def probe(base_url):
    """A generation of the fake server, as `assay.engines.server.serve` wants it."""
    async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=None) as client:  # the start has a limit
        answer = await client.post("/v1/chat/completions", json={"messages": []})
    return None if answer.status_code == 200 else f"HTTP {answer.status_code}"


def alive(pid):
    """Whether there is such a process and it is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, limit_s=20, every_s=0.05):
    """Whether `condition` came true in time."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(every_s)
    return False
