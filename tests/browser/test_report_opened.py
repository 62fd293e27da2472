"""A report as its reader has it: opened from a file, in a real browser, with nothing else on the network."""

import pytest
from reports import CLOSE, HOSTILE, LOST, RIGHT, WRONG, write_run
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from assay.report.page import write_report

ANSWERS = {"right": RIGHT, "wrong": WRONG, "close": CLOSE, "lost": LOST, "hostile": RIGHT}
REQUESTS = {
    "close": {
        "messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "a rare word: zebra"}]
    },
    "hostile": {"prompt": HOSTILE},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("run"), ANSWERS, REQUESTS)
    write_report(run.verdict, run.report)
    return run.report


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    return browser


def shown(browser):
    return [item.get_attribute("id") for item in browser.driver.find_elements(By.CSS_SELECTOR, ".item:not([hidden])")]


def test_it_loads_nothing_else_and_says_nothing_in_the_console(opened, page):
    assert opened.requests() == [page.resolve().as_uri()]
    assert opened.console() == []


def test_the_worst_items_come_first(opened):
    assert shown(opened) == ["item-lost", "item-wrong", "item-close", "item-hostile", "item-right"]


def choose(browser, control, value):
    Select(browser.driver.find_element(By.ID, control)).select_by_visible_text(value)


def test_items_are_found_by_text_kind_and_standing(opened):
    find = opened.driver.find_element(By.ID, "find")
    find.send_keys("ZEBRA")
    assert shown(opened) == ["item-close"]
    assert opened.driver.find_element(By.ID, "shown").text == "1 of 5 items"
    find.send_keys(Keys.BACKSPACE * 5)
    choose(opened, "kind", "chat")
    assert shown(opened) == ["item-close"]
    choose(opened, "kind", "all")
    choose(opened, "standing", "no answer")
    assert shown(opened) == ["item-lost"]
    find.send_keys("zebra")
    assert shown(opened) == []
    assert opened.driver.find_element(By.ID, "nothing").is_displayed()


def test_items_open_and_close_by_keyboard(opened):
    item = opened.driver.find_element(By.ID, "item-wrong")
    summary = item.find_element(By.TAG_NAME, "summary")
    passage = item.find_element(By.CSS_SELECTOR, ".passage mark.wrong")
    assert not passage.is_displayed()
    opened.script("arguments[0].focus()", summary)
    opened.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert passage.is_displayed() and passage.text.strip() == "cyan"
    opened.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert not passage.is_displayed()


def test_a_link_to_an_item_opens_it_even_when_it_is_filtered_out(opened):
    opened.driver.find_element(By.ID, "find").send_keys("zebra")
    link = opened.driver.find_element(By.CSS_SELECTOR, "#gate-G-hard a[href='#item-wrong']")
    opened.script("arguments[0].click()", link)
    assert opened.driver.find_element(By.CSS_SELECTOR, "#item-wrong .passage").is_displayed()
    assert len(shown(opened)) == 5


def test_a_link_from_outside_opens_its_item(browser, page):
    browser.open(page, "#item-close")
    assert browser.script("return document.getElementById('item-close').open") is True


def test_a_prompt_that_is_markup_is_shown_and_does_nothing(opened):
    opened.driver.find_element(By.ID, "open").click()
    assert HOSTILE in opened.driver.find_element(By.ID, "item-hostile").text
    assert opened.driver.title == "toy: Fail"
    assert opened.driver.find_elements(By.CSS_SELECTOR, "#list script, #list img") == []


@pytest.mark.parametrize(("width", "dark"), [(360, False), (360, True), (1100, True)])
def test_it_fits_a_phone_and_the_dark(browser, page, width, dark):
    browser.resize(width, 800, dark)
    browser.open(page)
    browser.script("for (const item of document.querySelectorAll('details')) item.open = true")
    assert browser.script("return document.documentElement.scrollWidth") <= width
    colours = browser.script("const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    brightness = [sum(map(int, colour[4:-1].split(","))) for colour in colours]
    assert (brightness[0] > brightness[1]) is dark


def test_without_its_script_everything_is_there(browser, page, tmp_path):
    text = page.read_text()
    bare = tmp_path / "bare.html"
    bare.write_text(text[: text.rindex("<script>")] + text[text.rindex("</script>") + 9 :])
    browser.open(bare)
    assert len(shown(browser)) == 5 and browser.console() == []
