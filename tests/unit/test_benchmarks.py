"""The scripts under benchmarks/ run on what this code writes."""

import json
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
