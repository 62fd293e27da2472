"""A job that fails is no verdict on a server: its config is ERROR with the cause, until the next run."""

import pytest

from assay.gate import read_verdict
from assay.records import Status

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

NAME = "smollm2_135m"
TARGET = f"results/verdicts/{NAME}.json"
ERROR = f"results/errors/{NAME}.json"
SCRIPT = "workflow/scripts/score.py"
LOG = f"(log: logs/score/{NAME}.log)"
UNWRITTEN = f"results/scores/{NAME}.parquet, results/floors/{NAME}.parquet"


@pytest.fixture(scope="module", autouse=True)
def done(workspace):
    workspace.verdict(NAME)


@pytest.mark.parametrize(
    ("work", "cause"),
    [
        ("raise ValueError", f"rule score failed {LOG}"),
        ("pass", f"rule score ended, and its files did not appear within latency-wait: {UNWRITTEN} {LOG}"),
    ],
    ids=["fails", "writes nothing"],
)
def test_a_config_whose_job_fails_is_an_error_with_its_cause_until_the_next_run(workspace, work, cause):
    (workspace.path / SCRIPT).write_text(f"{work}\n")
    try:
        done = workspace.snakemake("--latency-wait", "0", "--", TARGET, check=False)
    finally:
        workspace.restore(SCRIPT)
    assert done.returncode == 1
    error = read_verdict(workspace.path / ERROR)
    assert (error.verdict, error.reason) == (Status.ERROR, cause)
    assert f"{NAME}: ERROR: {cause}" in done.stdout + done.stderr
    workspace.snakemake(TARGET)
    assert not (workspace.path / ERROR).exists()
