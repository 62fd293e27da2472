"""One browser for all tests. Without one: a skip, or a failure where CI wants one."""

import pytest
from chromium import chromium, give_up, missing_browser


@pytest.fixture(scope="session")
def session_browser():
    if missing := missing_browser():
        give_up(missing)
    with chromium() as running:
        yield running


@pytest.fixture
def browser(session_browser):
    session_browser.resize(1100, 800)
    return session_browser
