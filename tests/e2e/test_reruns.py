"""What reruns when: read from snakemake's own dry-run plan, after a real run."""

import os

import pytest

from assay.gate import read_verdict

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]

NAME = "smollm2_135m"
TARGET = f"results/verdicts/{NAME}.json"
METRICS = "workflow/assay/metrics/text.py"


@pytest.fixture(scope="module", autouse=True)
def done(workspace):
    workspace.verdict(NAME)


def test_nothing_to_do_after_a_run(workspace):
    assert workspace.planned(TARGET) == {}


def test_forcing_score_reruns_exactly_score_and_below(workspace):
    assert workspace.planned(TARGET, "--forcerun", "score") == {"score": 1, "verdict": 1}


def test_an_edited_metric_reruns_exactly_score_and_below(workspace):
    try:
        workspace.edit(METRICS, "REST_FLOOR = 1e-7", "REST_FLOOR = 2e-7")
        assert workspace.planned(TARGET) == {"score": 1, "verdict": 1}
    finally:
        workspace.restore(METRICS)
    assert workspace.planned(TARGET) == {}


def test_comments_formatting_and_touched_files_rerun_nothing(workspace):
    try:
        workspace.edit(METRICS, "REST_FLOOR = 1e-7", "# why\n\n\nREST_FLOOR = 1e-7")
        for script in (workspace.path / "workflow/scripts").glob("*.py"):
            script.touch()
        assert workspace.planned(TARGET) == {}
    finally:
        workspace.restore(METRICS)


def test_an_edited_gate_reruns_the_verdict_alone(workspace):
    file = "workflow/assay/verdicts/margins/shift.py"
    try:
        workspace.edit(file, "KL_ROUNDING = 1e-6", "KL_ROUNDING = 2e-6")
        assert workspace.planned(TARGET) == {"verdict": 1}
    finally:
        workspace.restore(file)


def test_other_log_rules_read_the_logs_again_and_serve_nothing(workspace):
    file = "config/arms/transformers-serve.yaml"
    try:
        workspace.edit(file, "start_limit_s: 300", "start_limit_s: 300\nlog_rules: [vllm]")
        assert workspace.planned(TARGET) == {"facts": 2, "verdict": 1}
    finally:
        workspace.restore(file)


def test_a_changed_server_flag_reruns_from_the_serve_plan_on(workspace):
    file = "config/arms/transformers-serve.yaml"
    try:
        workspace.edit(file, "--cb-block-size=32", "--cb-block-size=16")
        assert workspace.planned(TARGET) == {
            "serve_config": 1,
            "generate": 2,
            "facts": 2,
            "judge": 1,
            "score": 1,
            "verdict": 1,
        }
    finally:
        workspace.restore(file)


def test_a_changed_gate_option_reruns_score_and_verdict(workspace):
    file = "config/configs.yaml"
    old = "smollm2_135m: {family: smollm2_135m, arm: transformers-serve, deployment: false}"
    try:
        workspace.edit(file, old, old.replace("deployment: false", "deployment: false, gates: {kappa: 3}"))
        assert workspace.planned(TARGET) == {"score": 1, "verdict": 1}
    finally:
        workspace.restore(file)


def test_rescoring_keeps_the_options_of_the_run_after_the_configuration_changed(workspace):
    before = read_verdict(workspace.path / TARGET)
    planned = workspace.path / f"results/serve/{NAME}.json"
    recorded, seen = planned.read_bytes(), planned.stat()
    try:
        planned.write_text("{}")  # a later plan, which nothing has run
        workspace.edit("config/sites/embedded.yaml", "threads: 1", "threads: 2")
        workspace.edit("config/families/smollm2_135m.yaml", "smoke: [batch, attention]", "smoke: [batch]")
        rescore = ("--workflow-profile", "profiles/rescore")
        assert workspace.planned(TARGET, *rescore) == {"score": 1, "verdict": 1}
        workspace.snakemake(TARGET, *rescore)
        after = read_verdict(workspace.path / TARGET)
        assert after.reference.floor_arms == before.reference.floor_arms
        assert after.provenance["options"]["run"] == before.provenance["options"]["run"]
        assert after.gates == before.gates
        assert workspace.planned("all", *rescore).keys() == {"all", "score", "verdict"}  # of what was run, no more
        refused = workspace.snakemake("results/verdicts/faults_100.json", *rescore, check=False)
        assert "run it once without the rescore profile" in refused.stderr and refused.returncode
    finally:
        planned.write_bytes(recorded)
        os.utime(planned, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        workspace.restore("config/sites/embedded.yaml")
        workspace.restore("config/families/smollm2_135m.yaml")
    assert workspace.planned(TARGET) == {}
