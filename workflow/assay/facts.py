"""Stage `facts`: what one instance's log says it runs. A stage of its own, so that a new rule serves nothing anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from assay.config import LogRule, parse
from assay.engines.facts import read_log, require_logged_provider, resolve
from assay.errors import ServerError
from assay.store import write_json


def facts(log_path: Path, rules: Mapping[str, Any], output: Path) -> None:
    """Read a server's log and write what it says, JSON.

    `facts` and `unmatched` are as `assay facts --json` prints them. `statements` puts them together, by question;
    `otherwise` are the questions whose answer is not what was asked for. `refused` says that another execution provider
    runs than was asked for, or is null.

    Args:
        log_path: the log.
        rules: FILE/RULE -> rule of config/facts, as data.
        output: file to write.

    Raises:
        StoreError: the log cannot be read, or the file not written.
    """
    parsed = {name: parse(LogRule, rule, f"rule {name}") for name, rule in rules.items()}
    found = read_log(log_path, parsed)
    refused = None
    try:
        require_logged_provider(found.facts)
    except ServerError as error:
        refused = str(error)
    statements = resolve(found.facts, parsed.values())
    write_json(
        output,
        {
            **found.as_json(),
            "statements": {item.question: str(item) for item in statements},
            "otherwise": [item.question for item in statements if item.otherwise],
            "refused": refused,
        },
    )
