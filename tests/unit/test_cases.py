"""The metric vectors are unit tests; the runner itself must be able to say WRONG."""

import json
from pathlib import Path

import pytest

from assay.cases import run_cases
from assay.errors import StoreError

CASES = Path(__file__).parents[1] / "data" / "metric_cases.json"
OTHER_MODALITIES = {"D06"}  # a JUnit report: lanes


@pytest.mark.parametrize("result", run_cases(CASES), ids=lambda result: result.id)
def test_vector(result):
    assert result.outcome == ("not covered" if result.id in OTHER_MODALITIES else "ok"), str(result)


def write(tmp_path, *cases):
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"schema": "metric-cases/1", "cases": cases}))
    return path


def test_a_wrong_expectation_is_told_with_both_values(tmp_path):
    case = {"id": "X1", "metric": "perplexity", "input": {"logprobs": [0.0]}, "expected": 2.0, "tol": 1e-9}
    (result,) = run_cases(write(tmp_path, case))
    assert str(result) == "X1 WRONG got 1.0 / expected 2.0"


def test_unknown_metrics_and_inputs_are_not_covered(tmp_path):
    base = {"id": "X", "expected": 0, "tol": 0}
    path = write(tmp_path, base | {"metric": "psnr", "input": {}}, base | {"metric": "perplexity", "input": {"x": 1}})
    assert [result.outcome for result in run_cases(path)] == ["not covered", "not covered"]


def test_nan_and_none_agree_with_no_number(tmp_path):
    base = {"metric": "tool_call_f1", "tol": 1, "input": {"tp": 1, "fp": 0, "fn": 0}}
    path = write(tmp_path, base | {"id": "X1", "expected": "nan"}, base | {"id": "X2", "expected": None})
    assert [result.outcome for result in run_cases(path)] == ["WRONG", "WRONG"]


def test_a_library_error_is_wrong_and_never_not_covered(tmp_path):
    case = {"id": "X1", "expected": 0.5, "tol": 0}
    served = case | {"metric": "greedy_margin", "input": {"ref_logprobs": {"1": -0.1}, "served": 2}}  # a KeyError
    order = case | {"metric": "tolerance_limit_n", "input": {"quantile": 0.9, "confidence": 0.9, "order": "nth"}}
    first, second = run_cases(write(tmp_path, served, order))
    assert str(first) == "X1 WRONG got KeyError: 2 / expected 0.5"
    assert second.wrong and second.got.startswith("ValueError: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [({"metric": 3}, "`metric`.*: 3"), ({"input": [1]}, r"`input`.*: \[1\]"), ({"tol": "x"}, "`tol`.*: x")],
)
def test_a_case_with_a_value_of_the_wrong_kind_is_refused_by_name(tmp_path, change, message):
    case = {"id": "X1", "metric": "perplexity", "input": {}, "expected": 0, "tol": 0}
    with pytest.raises(StoreError, match=f"case X1: {message}"):
        run_cases(write(tmp_path, case | change))


def test_a_file_without_cases_checks_nothing_and_is_refused(tmp_path):
    with pytest.raises(StoreError, match="holds no case"):
        run_cases(write(tmp_path))


@pytest.mark.parametrize("content", ["[]", '{"schema": "other", "cases": []}', "{"])
def test_a_file_of_another_format_is_refused(tmp_path, content):
    path = tmp_path / "cases.json"
    path.write_text(content)
    with pytest.raises(StoreError, match="cases"):
        run_cases(path)


def test_a_case_without_tolerance_is_refused_by_name(tmp_path):
    with pytest.raises(StoreError, match="tol"):
        run_cases(write(tmp_path, {"id": "X", "metric": "perplexity", "input": {}, "expected": 0}))
