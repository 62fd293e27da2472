"""The document of speech models that are not judged names every config whose reason points to it, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from assay.config import ServedConfig, UnsupportedConfig, parse_entry, read_yaml

ROOT = Path(__file__).parents[2]
DOCUMENT = "docs/speech_models.md"


def drifted(text: str, entries: dict[str, ServedConfig | UnsupportedConfig]) -> set[str]:
    """Configs of the tables that the map does not send there, and those that it does and no table has."""
    told = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    sent = {name for name, entry in entries.items() if DOCUMENT in getattr(entry, "unsupported", "")}
    return told ^ sent


def the_map() -> dict[str, ServedConfig | UnsupportedConfig]:
    return {name: parse_entry(value, name) for name, value in read_yaml(ROOT / "config/configs.yaml").items()}


def test_every_config_that_is_sent_to_the_document_is_in_it():
    assert drifted((ROOT / DOCUMENT).read_text(), the_map()) == set()


def test_a_row_of_a_judged_config_and_a_missing_row_are_found():
    text = (ROOT / DOCUMENT).read_text().replace("| `orpheus` |", "| `hibari_tts` |")
    assert drifted(text, the_map()) == {"orpheus", "hibari_tts"}


def test_every_source_of_a_fact_is_numbered_and_every_number_has_one():
    text = (ROOT / DOCUMENT).read_text()
    listed = {int(number) for number in re.findall(r"^(\d+)\. https://", text, re.MULTILINE)}
    cited = {int(number) for group in re.findall(r"\[([\d, ]+)\]", text) for number in group.split(",")}
    assert cited == listed and listed
