"""Real engines, real weights, end to end: what a user is told is what is true."""

import io

import jsonschema
import pytest
import yaml
from rich.console import Console

from assay.explain import explain
from assay.gate import check
from assay.records import Status
from assay.verdict import verify

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]

CONFIGS = [
    *("smollm2_135m", "smollm2_135m_vllm", "smollm2_135m_cyllama"),
    *("faults_32", "faults_32+rope_theta", "qwen3_omni"),
    *("whisper_base", "hibari_tts", "hibari_tts+speech_last_word"),
]


@pytest.fixture(scope="module", autouse=True)
def made(workspace):
    """All runs at once, so that one works while another waits for its server; what fails is told by its own test."""
    workspace.snakemake(*(f"results/verdicts/{name}.json" for name in CONFIGS), check=False)


def codes(verdict):
    return {caveat.code for caveat in verdict.caveats}


def failed(verdict):
    return {gate.id for gate in verdict.gates if gate.status is Status.FAIL}


def page(workspace, name):
    output = io.StringIO()
    explain(workspace.path / f"results/verdicts/{name}.json", Console(file=output, width=160))
    return output.getvalue()


def test_the_default_engine_passes_on_text_evidence_and_says_so(workspace):
    verdict = workspace.verdict("smollm2_135m")
    assert verdict.verdict is Status.PASS_WITH_CAVEAT, page(workspace, "smollm2_135m")
    assert {"retokenised", "logprobs_missing"} <= codes(verdict)
    assert verdict.coverage.scored == verdict.coverage.planned == 3 * 40


def test_every_verdict_is_valid_by_the_committed_schema_and_follows_from_its_scores(workspace):
    workspace.verdict("smollm2_135m")
    schema = yaml.safe_load((workspace.path / "config/schemas/verdict.schema.yaml").read_text())
    for file in (workspace.path / "results/verdicts").glob("*.json"):
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)
        if not file.stem.startswith("qwen"):
            assert verify(file) == []


def test_a_report_is_made_when_asked_for_and_then_named(workspace):
    workspace.verdict("smollm2_135m")
    assert "report:" not in page(workspace, "smollm2_135m")
    workspace.snakemake("results/reports/smollm2_135m.html")
    text = (workspace.path / "results/reports/smollm2_135m.html").read_text()
    assert text.count('<details class="item ') == 40 and "Pass with caveat" in text
    assert "results/reports/smollm2_135m.html" in page(workspace, "smollm2_135m")


def test_the_embedded_engine_passes_on_full_evidence(workspace):
    verdict = workspace.verdict("faults_32")
    assert verdict.verdict in (Status.PASS, Status.PASS_WITH_CAVEAT), page(workspace, "faults_32")
    assert verdict.evidence.level_counts["E0"] == verdict.coverage.planned
    planted = [control for control in verdict.controls.positive if control.got != "not_applicable"]
    assert len(planted) >= 7
    assert all(control.got is Status.FAIL for control in planted)


def test_a_planted_fault_fails_beside_its_clean_twin(workspace):
    clean = workspace.verdict("faults_32")
    verdict = workspace.verdict("faults_32+rope_theta")
    assert verdict.verdict is Status.FAIL
    assert {"G-hard", "G-logprob", "G-KL"} <= failed(verdict)
    assert workspace.verdict("faults_32") == clean
    assert "⟨" in page(workspace, "faults_32+rope_theta")


def test_vllm_in_float32_passes_on_full_evidence(workspace):
    verdict = workspace.verdict("smollm2_135m_vllm")
    assert verdict.verdict is Status.PASS, page(workspace, "smollm2_135m_vllm")
    assert verdict.evidence.level_counts["E0"] == verdict.coverage.planned


def test_a_wrong_engine_that_nobody_planted_fails_and_the_page_says_why(workspace):
    verdict = workspace.verdict("smollm2_135m_cyllama")
    assert verdict.verdict is Status.FAIL
    assert "G-struct" in failed(verdict)
    assert "chat template" in page(workspace, "smollm2_135m_cyllama")


def test_a_transcriber_is_judged_by_a_reference_that_pads_as_it_does(workspace):
    verdict = workspace.verdict("whisper_base")
    assert verdict.verdict in (Status.PASS, Status.PASS_WITH_CAVEAT), page(workspace, "whisper_base")
    assert verdict.config.judge_padding == "features"
    assert verdict.coverage.scored == verdict.coverage.planned == 3 * 26
    planted = [control for control in verdict.controls.positive if control.got != "not_applicable"]
    assert len(planted) >= 10 and all(control.got is Status.FAIL for control in planted)


def test_speech_is_spoken_as_the_models_own_package_speaks_it(workspace):
    verdict = workspace.verdict("hibari_tts")
    assert verdict.verdict in (Status.PASS, Status.PASS_WITH_CAVEAT), page(workspace, "hibari_tts")
    for gate in ("G-speaker", "G-waveform"):
        assert {control.got for control in verdict.controls.positive if control.gate == gate} == {Status.FAIL}
    assert verdict.coverage.scored == verdict.coverage.planned == 4 * 20


def test_a_voice_that_swallows_its_last_word_fails_beside_its_clean_twin(workspace):
    verdict = workspace.verdict("hibari_tts+speech_last_word")
    assert verdict.verdict is Status.FAIL
    assert "G-ends" in failed(verdict)
    assert "asked:" in page(workspace, "hibari_tts+speech_last_word")


def test_an_unsupported_config_gets_a_verdict_that_says_why(workspace):
    verdict = workspace.verdict("qwen3_omni")
    assert (verdict.verdict, verdict.coverage.planned) == (Status.UNSUPPORTED, 0)
    assert "omni" in verdict.reason


def test_the_gate_stops_on_a_fail_and_lets_a_caveat_through(workspace):
    workspace.verdict("smollm2_135m")
    workspace.verdict("smollm2_135m_cyllama")
    folder = workspace.path / "results/verdicts"
    assert check([folder / "smollm2_135m.json"]) == []
    (line,) = check([folder / "smollm2_135m.json", folder / "smollm2_135m_cyllama.json"])
    assert line.startswith("smollm2_135m_cyllama: FAIL")
    both = [folder / "smollm2_135m.json", folder / "smollm2_135m_cyllama.json"]
    assert check(both, known_wrong=["smollm2_135m_cyllama"]) == []
    (line,) = check(both, known_wrong=["smollm2_135m", "smollm2_135m_cyllama"])
    assert line.startswith("smollm2_135m: PASS_WITH_CAVEAT, though it is known to be wrong")
    assert check([folder / "smollm2_135m.json"], allowed_caveats=set())
