"""Planted faults strike in every run, however few its items."""

import pytest

from assay.verdicts.planted import unanswered


@pytest.mark.parametrize(("items", "struck"), [(1, 1), (3, 1), (15, 1), (16, 2), (40, 5)])
def test_one_request_in_eight_goes_unanswered_and_one_at_least(items, struck):
    rows = {f"item-{number}": {"status": "ok"} for number in range(items)}
    changed = unanswered(rows)
    assert list(changed) == list(rows)
    assert [row["status"] for row in changed.values()].count("http_error") == struck
    assert all(row["status"] == "ok" for row in rows.values()), "the judge's own answers stay as they are"


def test_the_requests_struck_do_not_depend_on_the_order_of_rows():
    rows = {f"item-{number}": {"status": "ok"} for number in range(20)}
    assert unanswered(dict(reversed(rows.items()))) == unanswered(rows)
