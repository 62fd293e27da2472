"""The page on a verdict: what stands on it and in which order, for every kind of answer, whatever a prompt holds."""

import io
import math
import os
import re
from html.parser import HTMLParser

import pytest
from reports import CLOSE, HOSTILE, LOST, RIGHT, SERVED, WRONG, Answer, write_run, write_verdict
from rich.console import Console

from assay.explain import explain
from assay.gate import read_verdict
from assay.records import Status
from assay.report import tokens
from assay.report.items import Standing
from assay.report.page import (
    COMMON_GATES,
    MODALITIES,
    drawn,
    percent,
    read_case,
    render,
    visible,
    with_code,
    write_report,
)
from assay.report.text import text_items
from assay.report.tokens import Passage, compare, passage
from assay.verdicts.model import Caveat, ConfigInfo, Coverage, Samples, Tool, Verdict
from assay.verdicts.suites import SUITES

ANSWERS = {"right": RIGHT, "wrong": WRONG, "close": CLOSE, "lost": LOST, "hostile": RIGHT}
CHAT = {"messages": [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "which colour?"}]}
REQUESTS = {"close": CHAT, "hostile": {"prompt": HOSTILE}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), ANSWERS, REQUESTS)


@pytest.fixture(scope="module")
def page(run):
    return render(read_verdict(run.verdict), run)


@pytest.fixture(scope="module")
def items(run):
    return {item.item_id: item for item in text_items(read_case(read_verdict(run.verdict), run)).items}


class Elements(HTMLParser):
    """Every element of a page: tag and attributes; raises for one that is closed and was not open."""

    VOID = {"meta", "link", "input", "img", "br", "path", "rect"}

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.words.append(data)


class Digits:
    """A tokenizer in which an id is its own text."""

    @staticmethod
    def decode(ids, skip_special_tokens):
        return "".join(map(str, ids))


# --- items -------------------------------------------------------------------------------------------------------


def test_every_planned_item_is_there_and_stands_as_it_was_judged(items):
    assert {key: item.worst.standing for key, item in items.items()} == {
        "right": Standing.SAME,
        "wrong": Standing.WRONG,
        "close": Standing.CLOSE,
        "lost": Standing.UNANSWERED,
        "hostile": Standing.SAME,
    }


def test_the_first_divergence_is_marked_in_both_answers(items):
    view = items["wrong"].view.answers
    assert (view.served.before, view.served.token.strip()) == ("red", "cyan")
    assert (view.reference.before, view.reference.token.strip()) == ("red", "green")
    assert items["right"].view.answers.served == items["right"].view.answers.reference == Passage("red green blue </s>")


def test_each_diverging_token_has_its_margin_and_what_the_reference_prefers(items):
    first, second = items["wrong"].view.answers.tokens
    assert (first.pos, first.text, first.rank, first.over) == (1, "cyan", 2, True)
    assert first.margin == pytest.approx(3.0, abs=1e-6)
    assert [(one.text, one.served) for one in first.alternatives[:3]] == [
        ("green", False),
        ("cyan", True),
        ("red", False),
    ]
    assert first.alternatives[0].probability == pytest.approx(0.904837, abs=1e-6)  # exp(-0.1)
    assert (second.pos, second.margin) == (2, pytest.approx(0.25, abs=1e-6))
    assert not items["close"].view.answers.tokens[0].over


def test_a_served_token_far_down_the_list_is_told_with_its_probability():
    row = {"token_id": 9, "pos": 0, "lp_judge": -8.0, "lp_judge_max": -0.5, "judge_rank": 83, "path": "ids"}
    row |= {"judge_top_ids": list(range(8)), "judge_top_lp": [-0.5 - k for k in range(8)]}
    (token,) = compare(tokens.Answer(None, [row]), tokens.Answer(None, []), Digits(), math.inf).tokens
    assert [one.text for one in token.alternatives] == ["0", "1", "2", "3", "4", "9"]
    assert token.alternatives[-1].served and token.alternatives[-1].probability == pytest.approx(math.exp(-8))
    assert (token.rank, token.margin, token.over) == (83, 7.5, False)


def test_an_item_without_an_answer_says_why_and_still_shows_the_reference(items):
    item = items["lost"]
    assert item.worst.notes[0] == "HTTP 500" and item.worst.score is None
    assert item.view.answers.served is None and item.view.answers.reference.before == "red green blue </s>"


def test_only_so_many_tokens_are_shown_and_the_others_are_counted(tmp_path, monkeypatch):
    ids = (2, *[5] * 20, 1)
    margins = (0.0, *[0.1 * k for k in range(1, 21)], 0.0)
    monkeypatch.setattr("reports.IDEAL", [2, *[3] * 20, 1])
    run = write_run(tmp_path, {"long": Answer(ids, margins)})
    (item,) = text_items(read_case(read_verdict(run.verdict), run)).items
    assert [token.pos for token in item.view.answers.tokens] == list(range(13, 21)) and item.view.answers.unshown == 12


def test_a_character_of_several_tokens_is_marked_whole():
    parts = [b"a", "é".encode()[:1], "é".encode()[1:], b"b"]

    def decode(ids):
        return b"".join(parts[k] for k in ids).decode(errors="replace")

    assert passage([0, 1, 2, 3], 2, decode) == Passage("a", "é", "b")
    assert passage([0, 1, 2, 3], 3, decode) == Passage("aé", "b", "")
    assert passage([0, 1, 2, 3], None, decode) == Passage("aéb")


# --- page --------------------------------------------------------------------------------------------------------


def test_a_report_is_written_where_its_verdict_says(run):
    write_report(run.verdict, run.report)
    assert run.report == run.results / "reports/toy.html" and run.current_report() == run.report


def test_a_verdict_names_its_report_and_none_of_a_verdict_before_it(tmp_path):
    run = write_run(tmp_path, {"right": RIGHT})

    def told():
        console = Console(width=300, record=True, file=io.StringIO())
        explain(run.verdict, console, brief=True)
        return f"report: {run.report}" in console.export_text()

    assert not told()
    write_report(run.verdict, run.report)
    assert told()
    os.utime(run.report, ns=(0, 0))
    assert not told()


def test_the_page_is_well_formed(page):
    assert Elements(page).open == []


def test_the_page_says_what_was_decided_and_why(run, page):
    verdict = read_verdict(run.verdict)
    text = " ".join("".join(Elements(page).words).split())
    assert verdict.verdict is Status.FAIL and verdict.reason in text
    assert "4 of 5 planned requests have an answer that could be scored, 1 failed." in text
    for word in ("Toy", "toy-engine", "float32", "5 (smoke)", "No token is clearly wrong", "single_instance"):
        assert word in text


def test_items_are_listed_worst_first(page):
    assert re.findall(r'<details class="item \w+" id="item-(\w+)"', page) == [
        "lost",
        "wrong",
        "close",
        "hostile",
        "right",
    ]


def test_links_inside_the_page_lead_somewhere(page):
    elements = Elements(page).found
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    links = {attributes["href"] for tag, attributes in elements if tag == "a"}
    assert len(ids) == len(set(ids))
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)


def test_a_prompt_or_a_command_that_is_markup_is_text(page):
    tags = [tag for tag, _ in Elements(page).found]
    assert "img" not in tags and tags.count("script") == 1
    assert "&lt;script&gt;document.title" in page


def loads(text):
    """What a page would load from elsewhere."""
    named = [
        value
        for tag, attributes in Elements(text).found
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "poster", "data", "xlink:href") and not value.startswith(("#", "data:"))
    ]
    return named + re.findall(r"@import[^;]*|url\((?!['\"]?data:)[^)]*\)|(?:https?:)?//[\w.]+\.\w+/\S*", text)


def test_the_page_loads_nothing_from_elsewhere(page):
    assert loads(page) == []
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "planted",
    [
        "<script src='https://example.com/x.js'></script>",
        "<link href=style.css>",
        "<style>@import 'x.css';</style>",
        "<style>p { background: url(picture.png) }</style>",
    ],
)
def test_a_page_that_loads_something_is_found(planted):
    assert loads(planted)


def test_a_limit_of_each_item_has_its_unit(page):
    limits = dict(re.findall(r'id="gate-(G-[\w-]+)".*?<dt>limit</dt><dd>(.*?)</dd>', page, re.DOTALL))
    assert limits["G-hard"].endswith("(nat an item)") and "an item" not in limits["G-coverage"]


def test_a_plot_shows_the_floor_the_value_and_the_limit_and_says_so_in_words(page):
    (label,) = re.findall(
        r'<details class="gate[^>]*id="gate-G-logprob".*?<svg[^>]*aria-label="([^"]*)"', page, re.DOTALL
    )
    assert label.startswith("the reference&#39;s harmless changes (2 ways): 10 scores")
    assert re.search(r"; server 0, load: 5 scores, 4 of them 0, .* 1 infinite, value .+, limit .+$", label)


def test_a_floor_is_told_in_the_unit_of_its_scores_not_in_that_of_the_value(page):
    (gate,) = re.findall(r'id="gate-G-hard".*?</details>', page, re.DOTALL)
    assert re.search(r"<dt>floor</dt><dd>largest margin of an item \(nat\): median 0, largest \S+</dd>", gate)


def test_an_unsupported_config_has_a_page_without_gates_or_items(tmp_path, run):
    verdict = Verdict(
        tool=Tool(version="0"),
        config=ConfigInfo(name="other"),
        verdict=Status.UNSUPPORTED,
        reason="No reference yet",
        coverage=Coverage(planned=0, scored=0),
        samples=Samples(planned=0, items_sha256="0"),
    )
    page = render(verdict, run)
    assert "No reference yet" in page and Elements(page).open == []
    assert 'id="gates"' not in page and 'id="items"' not in page


def test_a_caveat_is_explained_once_with_all_that_was_found(tmp_path):
    run = write_run(tmp_path, {"right": RIGHT})
    found = [Caveat(code="killed", detail="server 0"), Caveat(code="killed", detail="server 1", gate="G-hard")]
    write_verdict(run, read_verdict(run.verdict).model_copy(update={"caveats": found}))
    text = " ".join("".join(Elements(render(read_verdict(run.verdict), run)).words).split())
    assert text.count("The server stopped only when killed.") == 1
    assert text.count("server 0server 1") == 1


def test_every_gate_of_every_modality_is_explained():
    explained = {name: {*COMMON_GATES, *modality.gates} for name, modality in MODALITIES.items()}
    assert explained == {name: set(suite.checks) for name, suite in SUITES.items()}


def test_shares_are_told_and_an_unknown_one_is_not_zero():
    assert [percent(share) for share in (None, 0, 0.5, 1, 0.0721, 0.00012)] == [
        "unknown", "0 %", "50.0 %", "100 %", "7.2 %", "0.012 %",
    ]  # fmt: skip


def test_white_space_of_a_token_is_seen():
    assert visible(" a\n\t") == "␣a↵⇥"
    assert [drawn(token) for token in (" a", "a\n", "\n", " ")] == [" a", "a↵\n", "↵", "␣"]


def test_code_in_an_explanation_is_code_and_markup_is_not():
    assert with_code("above `tau_hard` <b>") == "above <code>tau_hard</code> &lt;b&gt;"


def test_a_pass_is_named_for_a_person(page):
    assert SERVED not in re.sub(r"Reason: [^<]*|<code>[^<]*", "", page)
