"""A headless Chromium of the tests' own, driven through its ChromeDriver, that looks nothing up in any network."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

REQUIRED = "REQUIRE_BROWSER"  # set by .ci/run
TOOLS = ("chromium", "chromedriver")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",  # root, as in CI, has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
)


def missing_browser() -> str | None:
    """Why there is no browser to test with."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return None
    return f"{' and '.join(missing)} cannot be found; get them with tests/browser/install_browser.sh"


def give_up(missing: str) -> NoReturn:
    """Skip, or fail where a browser must be."""
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set and there is no browser: {missing}")
    pytest.skip(f"no browser can be started here: {missing}")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser, closed at the end."""
    options = Options()
    options.binary_location = shutil.which(TOOLS[0]) or ""
    for argument in ARGUMENTS:
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which(TOOLS[1])))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A page of the browser."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, page: Path, fragment: str = "") -> None:
        """Load a page from its file, with nothing in the logs of the one before it."""
        self.driver.get("about:blank")
        self.console(), self.requests()
        self.driver.get(f"{page.resolve().as_uri()}{fragment}")

    def script(self, code: str, *arguments: object) -> object:
        """Run code in the page; what it returns."""
        return self.driver.execute_script(code, *arguments)

    def console(self) -> list[str]:
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were loaded since it was last asked, data: left out."""
        messages = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        sent = [item["params"]["request"]["url"] for item in messages if item["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Look at pages in a window of this many pixels, in light or dark, without motion."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
