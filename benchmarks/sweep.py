"""What a sweep over many configs costs before and between its jobs, and what Snakemake itself takes.

    python benchmarks/sweep.py 11 111 1111

For each number of configs: a copy of the workflow whose map has that many of them (all alike, on the embedded engine),
and the CPU seconds of `snakemake` when it starts, reads the workflow, builds the graph of all jobs, prints the plan
(`-n`), and finds nothing to do. CPU time, because wall time says more of what else the machine does. Nothing is served.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
CONFIG = {"family": "smollm2_135m", "arm": "embedded", "deployment": False}
# `snakemake` that tells what the graph of jobs took.
TIMED = """
import time
from snakemake.cli import main
from snakemake.workflow import Workflow
build = Workflow._build_dag
def timed(self):
    start = time.process_time()
    build(self)
    print(f"graph_cpu_s {time.process_time() - start}")
Workflow._build_dag = timed
main()
"""


@dataclass(frozen=True)
class Cost:
    """Of one command and everything that it started."""

    cpu_s: float
    peak_mb: float
    output: str


def main(sizes: list[int]) -> None:
    """Measure each number of configs and print one table."""
    print("| configs | jobs | start | parse | graph | graph, and printing the plan | nothing to do | peak MB |")
    print("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="assay-sweep-") as folder:
            print(_row(workspace(Path(folder), size), size), flush=True)


def workspace(folder: Path, size: int) -> Path:
    """A copy of the workflow in `folder` with `size` configs, and everything fetched."""
    for name in ("workflow", "config", "samplesets", "profiles"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.parquet"))
    shutil.copy(ROOT / "Snakefile", folder)
    configs = {f"c{number:05d}": CONFIG for number in range(size)}
    (folder / "config/configs.yaml").write_text(yaml.safe_dump(configs, default_flow_style=None, sort_keys=False))
    return folder


def _row(folder: Path, size: int) -> str:
    start = snakemake(folder, "--version")
    parsed = snakemake(folder, "--list-rules")
    planned = snakemake(folder, "--dry-run", "--quiet", "rules")
    graph = next(float(line.split()[1]) for line in planned.output.splitlines() if line.startswith("graph_cpu_s"))
    jobs = next(line.split()[1] for line in planned.output.splitlines() if line.startswith("total"))
    _make_results(folder)
    nothing = snakemake(folder, "--dry-run", "--quiet", "rules")
    assert "Nothing to be done" in nothing.output, nothing.output[-2000:]
    parse, plan = parsed.cpu_s - start.cpu_s, planned.cpu_s - parsed.cpu_s
    idle = nothing.cpu_s - parsed.cpu_s
    seconds = " | ".join(f"{value:.1f}" for value in (start.cpu_s, parse, graph, plan, idle))
    return f"| {size} | {jobs} | {seconds} | {planned.peak_mb:.0f} |"


def snakemake(folder: Path, *arguments: str) -> Cost:
    """Run snakemake in a workspace."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-c", TIMED, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder / "workflow")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = process.communicate()[0]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"snakemake {' '.join(arguments)}\n{output[-4000:]}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(cpu_s, after.ru_maxrss / 1024, output)


def _make_results(folder: Path) -> None:
    """Every file that the plan would make, empty, and all of one age; without Snakemake's records of how."""
    listed, now = snakemake(folder, "--summary").output, time.time()
    for line in listed.splitlines():
        name = line.split("\t")[0]
        if "/" in name and "\t" in line:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (now, now))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", type=int, help="numbers of configs")
    main(parser.parse_args().configs)
