"""Stage `serve_config`: a serve plan, completed, once everything in it is known to be possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.client.protocols import client_plan
from assay.config import ClientSpec, parse
from assay.engines.plan import complete_plan
from assay.errors import ConfigError
from assay.samples.lock import load_set
from assay.store import read_json, write_json


def serve_config(plan: Mapping[str, Any], manifest: Path | None, set_paths: Sequence[Path], output: Path) -> None:
    """Complete a serve plan and write it as JSON.

    Args:
        plan: a serve plan (`assay.engines.plan.serve_plan`).
        manifest: `manifest.json` of the weights it serves; None where they are not fetched by us.
        set_paths: Parquet files of its sample sets, schema `items`; none of an unsupported config.
        output: JSON file to write.

    Raises:
        ConfigError: the plan is one to be looked at only, or the arm's client cannot ask for an item of the sets.
    """
    completed = complete_plan(plan, None if manifest is None else read_json(manifest))
    if completed["unsupported"] is None:
        _require_expressible(completed, [item for path in set_paths for item in load_set(path)])
    write_json(output, completed)


def _require_expressible(plan: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if the arm's protocol has no words for some items, before a server is started in vain."""
    client = client_plan(parse(ClientSpec, plan["client"], "the serve plan's client"), f"http://{plan['host']}")
    refused: dict[str, str] = {}
    for item in items:
        try:
            client.exchange(item)
        except ConfigError as error:
            refused[item["item_id"]] = str(error)
    if refused:
        first, why = next(iter(refused.items()))
        raise ConfigError(
            f"config '{plan['config']}': arm '{plan['arm']}' cannot be asked for {len(refused)} of {len(items)} items, "
            f"first '{first}': {why}. Set `sets` of the config in config/configs.yaml"
        )
