"""The serve plan: everything about a launch that is known before anything starts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import assay
from assay.canonical import sha256_json, sha256_weights
from assay.config import FAULT_SEPARATOR, PROJECT, Arm, Config, Family, MstarSpec, lookup
from assay.errors import ConfigError
from assay.fingerprint import fingerprint
from assay.provenance import LIBRARIES, versions
from assay.records import JUDGE
from assay.store import read_json, run_options

SCHEMA_VERSION = "assay/serve/1"
HOST = "127.0.0.1"
RESOURCES = "resources"
EMBEDDED = Path(assay.__file__).parent / "embedded/__main__.py"

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def serve_plan(config: Config, name: str) -> dict[str, Any]:
    """The serve plan of the config called `name` (or `NAME+FAULT`), JSON-able.

    All of it but `schema_version` and `options_sha256` are the run's effective options: what the outputs depend on.
    Paths are relative to the workflow directory. Only `{port}` is left open in `argv`: the kernel gives it at start.
    `model.weights_sha256` is null until `complete_plan` has seen the weights: such a plan is to be looked at, not run.

    Args:
        config: the checked configuration.
        name: a config, or a config and a fault.

    Raises:
        ConfigError: unknown name or fault, an arm this site does not offer, or a wrong template in the arm.
    """
    resolved = config.resolve(name)
    if resolved.unsupported is not None:
        family = getattr(resolved.entry, "family", None)
        return _sealed({"config": name, "family": family, "unsupported": resolved.unsupported})
    entry, family, arm = resolved.served
    if entry.arm not in config.site.arms:
        raise ConfigError(
            f"config '{name}' is served by arm '{entry.arm}', which site '{config.settings.site}' does not offer "
            f"(it has: {', '.join(config.site.arms)}); choose another site, or add the arm to "
            f"config/sites/{config.settings.site}.yaml if its engine runs there"
        )
    model = _model(family, arm)
    python = _python(arm.environment)
    cache_dir = _expanded(config.site.cache_dir, f"config/sites/{config.settings.site}.yaml: cache_dir")
    values = {
        "python": python,
        "model_dir": model["directory"],
        "gguf_file": model["gguf_file"],
        "dtype": entry.dtype,
        "host": HOST,
        "port": "{port}",
        "threads": str(config.site.threads),
        "served_name": family.model.name,
        "cache_dir": cache_dir,
    }
    fault_argv = ["--fault", resolved.fault.argument] if resolved.fault else []
    filled = {where: _fill(text, values, f"config/arms/{entry.arm}.yaml: {where}") for where, text in _templates(arm)}
    return _sealed(
        {
            "config": name,
            "unsupported": None,
            "fault": resolved.fault.argument if resolved.fault else None,
            "fault_name": name.partition(FAULT_SEPARATOR)[2] or None,
            "family": entry.family,
            "modality": family.modality,
            "arm": entry.arm,
            "tier": entry.tier,
            "dtype": entry.dtype,
            "site": config.settings.site,
            "model": model,
            "environment": {"name": arm.environment, "python": python, **_project_code(arm)},
            "argv": [filled[f"argv[{index}]"] for index in range(len(arm.argv))] + fault_argv,
            "env": {key: filled[f"env.{key}"] for key in arm.env},
            "cache_dir": cache_dir,
            "host": HOST,
            "threads": config.site.threads,
            "client": _client(arm, filled["client.model"], entry.arm),
            "identity": arm.identity.model_dump(mode="json"),
            "instances": [
                [item.model_dump(mode="json") for item in resolved.passes(number, config.settings.concurrency)]
                for number in range(len(resolved.instances))
            ],
            "sets": resolved.sets,
            "reference": {
                "kind": family.reference.kind,
                "model": family.reference_model,
                "directory": f"{RESOURCES}/{family.reference_model}",
                "dtype": family.reference.dtype,
                "arms": [JUDGE, *resolved.floor_arms],
            },
            "limits": {"start_limit_s": arm.start_limit_s, "stop_grace_s": arm.stop_grace_s},
        }
    )


def recorded_plan(name: str, results: str | Path = "results") -> dict[str, Any] | None:
    """The plan that the last run of config `name` was made with, or None if there was none.

    It is read from the outputs: the plan file may have been written anew since. An unsupported config has only that.
    """
    outputs, planned = Path(results, "outputs", name, "0.parquet"), Path(results, "serve", f"{name}.json")
    if outputs.exists():
        return run_options([outputs])
    plan = read_json(planned) if planned.exists() else None
    return plan if plan and plan["unsupported"] is not None else None


def server_environment(plan: Mapping[str, Any], base: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of the server: `base` with the plan's additions.

    What points Python at our own modules is dropped for a server that has an environment of its own.
    """
    ours = () if plan["environment"]["name"] == PROJECT else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in base.items() if key not in ours} | plan["env"]


def effective_options(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plan that is hashed as `options_sha256`: all that the outputs depend on."""
    return {key: value for key, value in plan.items() if key not in ("schema_version", "options_sha256")}


def _sealed(plan: dict[str, Any]) -> dict[str, Any]:
    return {"schema_version": SCHEMA_VERSION, **plan, "options_sha256": sha256_json(plan)}


def _templates(arm: Arm) -> Iterator[tuple[str, str]]:
    """Key -> template, for every template of an arm."""
    yield from ((f"argv[{index}]", text) for index, text in enumerate(arm.argv))
    yield from ((f"env.{key}", text) for key, text in arm.env.items())
    yield "client.model", arm.client.model


def _client(arm: Arm, model: str, name: str) -> dict[str, Any]:
    """The client of arm `name`, its model filled in; of several models' protocols only that one's."""
    client = arm.client.model_dump(mode="json") | {"model": model}
    if isinstance(arm.client, MstarSpec):
        what = f"model of client.models in config/arms/{name}.yaml"
        client["models"] = {model: lookup(client["models"], model, what)}
    return client


def _fill(template: str, values: Mapping[str, str | None], where: str) -> str:
    """`template` with its `{placeholders}` replaced; braces around anything but a word are left alone."""

    def value(match: re.Match[str]) -> str:
        key = match[1]
        if key not in values:
            raise ConfigError(f"{where}: unknown placeholder '{{{key}}}' in '{template}'; known: {', '.join(values)}")
        filled = values[key]
        if filled is None:
            raise ConfigError(f"{where}: '{{{key}}}' has no value for this family: set model.{key} in its file")
        return filled

    return _PLACEHOLDER.sub(value, template)


def complete_plan(plan: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """`plan` with the digest of the weights it serves, from the `manifest.json` of their source."""
    if plan["unsupported"] is not None or manifest is None:
        return dict(plan)
    return _sealed(effective_options(plan) | {"model": plan["model"] | {"weights_sha256": sha256_weights(manifest)}})


def _model(family: Family, arm: Arm) -> dict[str, Any]:
    source = family.model.weights[arm.weights]
    directory = f"{RESOURCES}/{source}"
    gguf = family.model.gguf_file if arm.weights == "gguf" else None
    return {
        "name": family.model.name,
        "source": source,
        "directory": directory,
        "gguf_file": f"{directory}/{gguf}" if gguf else None,
        "weights_sha256": None,
        "context": family.model.context,
    }


def _python(environment: str) -> str:
    if environment != PROJECT:
        return f"{RESOURCES}/environments/{environment}/bin/python"
    # Not resolved: the link's place is what makes it the virtual environment's interpreter.
    python, here = Path(sys.executable), Path.cwd()
    return str(python.relative_to(here)) if python.is_relative_to(here) else str(python)


def _project_code(arm: Arm) -> dict[str, Any]:
    """What serves an arm from the project's own environment, which has no manifest that a rule could depend on."""
    if arm.environment != PROJECT:
        return {}
    if arm.identity.module == assay.__name__:
        return {"versions": versions(LIBRARIES), "code": fingerprint(EMBEDDED)}
    return {"versions": versions({*LIBRARIES, arm.identity.distribution})}


def _expanded(path: str, where: str) -> str:
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise ConfigError(f"{where}: '{path}' uses an environment variable that is not set")
    return expanded
