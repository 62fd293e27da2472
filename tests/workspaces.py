"""A workspace: a copy of the committed workflow that shares only fetched resources with the checkout.

Runs happen there, so tests may edit configuration and code, and results of the checkout stay untouched.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from assay.gate import read_verdict

ROOT = Path(__file__).parents[1]
COPIED = ("Snakefile", "workflow", "config", "samplesets", "profiles")


@dataclass(frozen=True)
class Workspace:
    """Where a test runs the workflow."""

    path: Path

    def command(self, *arguments):
        """The snakemake command line for `arguments`."""
        return [sys.executable, "-m", "snakemake", "--cores", "8", *arguments]

    @property
    def env(self):
        """Environment in which the workspace's own copy of the library is imported."""
        return os.environ | {"PYTHONPATH": str(self.path / "workflow"), "OMP_NUM_THREADS": "1"}

    def snakemake(self, *arguments, check=True):
        """Run snakemake to its end; its output is shown when it fails."""
        done = subprocess.run(
            self.command(*arguments), cwd=self.path, env=self.env, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            pytest.fail(f"snakemake {' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
        return done

    def verdict(self, name):
        """Make a verdict and read it."""
        self.snakemake(f"results/verdicts/{name}.json")
        return read_verdict(self.path / f"results/verdicts/{name}.json")

    def planned(self, *arguments):
        """Rule -> number of jobs, from snakemake's own dry-run plan."""
        output = self.snakemake("--dry-run", *arguments)
        text = output.stdout + output.stderr
        if "Nothing to be done" in text:
            return {}
        table = text.split("Job stats:")[1].split("total")[0]
        return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.M)}

    def edit(self, file, old, new):
        """Replace `old` by `new` in a file of the workspace."""
        path = self.path / file
        text = path.read_text()
        assert old in text, f"{file} does not hold {old!r}"
        path.write_text(text.replace(old, new))

    def restore(self, file):
        """Undo edits of one file."""
        shutil.copy(ROOT / file, self.path / file)


def copy_workflow(path):
    """A workspace in the folder `path`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(
                source, path / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "*.parquet")
            )
        else:
            shutil.copy(source, path / name)
    (ROOT / "resources").mkdir(exist_ok=True)
    (path / "resources").symlink_to(ROOT / "resources")
    return Workspace(path)
