"""The scripts under benchmarks/ run on what this code writes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_scoring_is_measured_without_anything_fetched(tmp_path):
    """It reads only what it makes itself: run in an empty folder, with the schemas of today."""
    command = [sys.executable, str(ROOT / "benchmarks/costs.py"), "one", "70"]
    done = subprocess.run(
        command, check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE
    )
    seconds, peak_mb = json.loads(done.stdout)
    assert seconds > 0 and peak_mb > 50


def test_speech_is_measured_stage_by_stage(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "benchmarks/speech.py"),
        "cost",
        "--hours",
        "0.003",
        "--scratch",
        str(tmp_path),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["make", "measure", "score", "verdict"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_launchers_are_measured_and_what_they_add_is_told(tmp_path):
    """Where no engine can be found, without containers; also as a background job, which ignores Ctrl-C."""
    path = {"PATH": str(Path(sys.executable).parent)}
    command = [sys.executable, str(ROOT / "benchmarks/launchers.py"), "--runs", "1", "--engine", str(tmp_path)]
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    done = subprocess.run(
        command, check=True, cwd=tmp_path, env=os.environ | path, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert "n = 1" in done.stdout and "containers are left out" in done.stdout
    rows = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in done.stdout.splitlines() if "│" in line}
    assert rows.keys() == {"bare", "process"}
    start, stop, *over = (float(cell) for cell in rows["process"])
    assert start > 0 and stop > 0 and len(over) == 2


def test_planning_a_sweep_is_measured_and_counts_its_jobs(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks/sweep.py"), "1", "2"]
    done = subprocess.run(command, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    one, two = ([cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[2:])
    assert (one[0], two[0]) == ("1", "2")
    # A config: its plan, two instances (served and read), judged, scores, verdict.
    assert int(two[1]) - int(one[1]) == 1 + 2 * 2 + 1 + 1 + 1
    assert all(math.isfinite(float(cell)) for cell in (*one, *two))  # differences of two runs may be below zero
    assert min(float(row[2]) for row in (one, two)) > 0
