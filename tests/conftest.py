"""What tests share. No test is skipped for want of a source: it is fetched."""

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from processes import FAKE, wait_until
from workspaces import copy_workflow

from assay.engines.server import free_port, listeners

# The same examples in every run, so that a red test is red again; new ones with `--hypothesis-profile explore`.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile("same")

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def fetched():
    """A function that fetches pinned sources, where they are not there yet, and gives the folder that holds them."""

    def get(*names):
        folder = ROOT / "resources"
        folder.mkdir(exist_ok=True)
        with FileLock(folder / ".tests.lock"):  # tests run side by side, and snakemake locks its folder
            missing = [name for name in names if not (folder / name / "manifest.json").is_file()]
            if missing:
                targets = [f"resources/{name}/manifest.json" for name in missing]
                subprocess.run([sys.executable, "-m", "snakemake", "--cores", "2", *targets], cwd=ROOT, check=True)
        return folder

    return get


@pytest.fixture(scope="session")
def workspace(tmp_path_factory):
    """One workspace for all tests of whole runs: what one of them made, the next need not make again."""
    return copy_workflow(tmp_path_factory.mktemp("workspace"))


@pytest.fixture
def stranger():
    """A healthy server that is not ours, and its port."""
    port = free_port(HOST)
    process = subprocess.Popen([sys.executable, str(FAKE), f"--port={port}"])
    assert wait_until(lambda: listeners(HOST, port) == {process.pid})
    yield port
    process.kill()
    process.wait()
