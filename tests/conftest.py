"""What tests share. No test is skipped for want of a source: it is fetched."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def fetched():
    """A function that fetches pinned sources, where they are not there yet, and gives the folder that holds them."""

    def get(*names):
        missing = [name for name in names if not (ROOT / "resources" / name / "manifest.json").is_file()]
        if missing:
            targets = [f"resources/{name}/manifest.json" for name in missing]
            subprocess.run([sys.executable, "-m", "snakemake", "--cores", "2", *targets], cwd=ROOT, check=True)
        return ROOT / "resources"

    return get
