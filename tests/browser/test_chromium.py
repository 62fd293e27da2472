"""A machine without a browser: a skip with the reason, or a failure where one must be. Logs that see what there is."""

import pytest
from chromium import REQUIRED, give_up, missing_browser


def test_a_machine_without_a_browser_is_told_how_to_get_one(monkeypatch):
    monkeypatch.setattr("chromium.shutil.which", lambda tool: None if tool == "chromedriver" else tool)
    assert missing_browser() == "chromedriver cannot be found; get them with tests/browser/install_browser.sh"


def test_no_browser_is_a_skip_and_where_one_must_be_a_failure(monkeypatch):
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser can be started here: for a test"):
        give_up("for a test")
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="REQUIRE_BROWSER is set and there is no browser"):
        give_up("for a test")


def test_an_error_of_a_page_and_what_it_loads_are_seen(browser, tmp_path):
    page = tmp_path / "page.html"
    (tmp_path / "other.css").write_text("p { color: red }")
    page.write_text("<link rel=stylesheet href=other.css><script>undefined.nothing</script>")
    browser.open(page)
    assert "Cannot read properties of undefined" in browser.console()[0]
    assert [url.rpartition("/")[2] for url in browser.requests()] == ["page.html", "other.css"]
