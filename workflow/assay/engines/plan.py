"""The serve plan: everything about a launch that is known before anything starts."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import assay
from assay.canonical import sha256_json, sha256_weights
from assay.config import (
    FAULT_SEPARATOR,
    PROJECT,
    TREE,
    Arm,
    ArmDevice,
    Bind,
    Config,
    DeviceKind,
    HuggingFaceSource,
    Image,
    MstarSpec,
    OpenAISpec,
    Process,
    Resolved,
    digest_hint,
    floor_arms,
    lookup,
)
from assay.devices.masks import without_masks
from assay.errors import ConfigError
from assay.fingerprint import command_fingerprint
from assay.provenance import LIBRARIES, folder_state, versions
from assay.records import JUDGE
from assay.store import read_json, run_options

SCHEMA_VERSION = "assay/serve/1"
HOST = "127.0.0.1"
RESOURCES = "resources"
LIBRARY = Path(assay.__file__).parents[1]  # the folder that our own modules are imported from
MODELS, CACHES = "/models", "/caches"  # where a container finds them
CONTAINER_PORT = 8000  # in a network of its own
GIB = 2**30

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's, where it is there: ten times as fast

_PLACEHOLDER = re.compile(r"\{(\w+)\}")

_NO_VALUE = {
    "gguf_file": "set model.gguf_file in the family's file",
    "context": "set model.context in the family's file",
    "deployment": "set `deployment` of the config",
    "python": "a container has its own; name it as the image does",
    "tree": "set process.tree in the arm's file",
    "instance_dir": "a container has its own files; use a folder of the image",
    "hub_dir": "it takes a process, and weights from a Hugging Face source",
}


@dataclass(frozen=True)
class Access:
    """What a server needs to use a kind of device."""

    devices: tuple[str, ...] = ()  # device nodes of a container
    cap_add: tuple[str, ...] = ()
    security_opt: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


ACCESS: dict[DeviceKind, Access] = {
    "cpu": Access(),
    # https://rocm.docs.amd.com/projects/ai-ecosystem/en/latest/inference/vllm.html
    "amd": Access(("/dev/kfd", "/dev/dri"), cap_add=("SYS_PTRACE",), security_opt=("seccomp=unconfined",)),
    # The default order is by speed: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables
    "nvidia": Access(env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
}


@dataclass(frozen=True)
class _Chosen:
    """What a plan is made of."""

    config: Config
    resolved: Resolved
    kind: DeviceKind
    device: ArmDevice
    model: dict[str, Any]
    caches: dict[str, str]  # kind -> folder
    gpus: int


@dataclass(frozen=True)
class _Launch:
    """What one launcher adds to a plan."""

    sections: dict[str, Any]
    values: dict[str, str | None]  # of its placeholders; None: it has none
    caches: dict[str, str]  # kind -> folder, as the server sees it


class ServePlan(dict[str, Any]):
    """A serve plan. As text it is for a person: what stands in its way or has to be known of it, then all as YAML."""

    def __str__(self) -> str:
        lines = [f"serve plan of {self['config']}"]
        if self["unsupported"] is not None:
            lines.append(f"UNSUPPORTED: {self['unsupported']}")
        lines += [f"WILL NOT RUN: {reason}" for reason in self.get("refused", [])]
        if self.get("image_by_tag"):
            lines.append(f"IMAGE BY TAG: {self['image_by_tag']} has no digest, and may be another image tomorrow")
        rest = {key: value for key, value in self.items() if key != "refused"}
        return "\n".join([*lines, yaml.dump(rest, Dumper=_DUMPER, sort_keys=False, width=110, allow_unicode=True)])


def serve_plan(config: Config, name: str) -> ServePlan:
    """The serve plan of the config called `name` (or `NAME+FAULT`), JSON-able.

    All of it but `schema_version` and `options_sha256` are the run's effective options: what the outputs depend on.
    Paths are relative to the workflow directory. Left open in `argv`, `env` and `files` is what differs between
    instances, see `fill_instance`: `{port}` (the kernel gives it at start), `{instance_dir}` and `{side_port_NAME}`; of
    a container `{host}` and `{port}`. Which devices it gets is the lease's to say.
    `model.weights_sha256` is null until `complete_plan` has seen the weights: such a plan is to be looked at, not run.
    So is one whose `refused` is not empty: it says what has to be filled in first.

    Args:
        config: the checked configuration.
        name: a config, or a config and a fault.

    Raises:
        ConfigError: unknown name or fault, an arm this site does not offer, or a wrong template in the arm.
    """
    resolved = config.resolve(name)
    if resolved.unsupported is not None:
        return _skipped(resolved, resolved.unsupported)
    entry, family, arm = resolved.served
    if entry.arm not in config.site.arms:
        raise ConfigError(
            f"config '{name}' is served by arm '{entry.arm}', which site '{config.settings.site}' does not offer "
            f"(it has: {', '.join(config.site.arms)}); choose another site, or add the arm to "
            f"config/sites/{config.settings.site}.yaml if its engine runs there"
        )
    if absent := _absent_tree(config, entry.arm, arm):
        return _skipped(resolved, absent)
    chosen = _choose(config, resolved)
    kind, device, model = chosen.kind, chosen.device, chosen.model
    launch = _in_process(chosen, arm.process) if arm.process else _in_container(chosen)
    values = {
        **launch.values,
        "dtype": entry.dtype,
        "threads": str(config.site.threads),
        "served_name": family.model.name,
        "library": within(LIBRARY),
        "context": None if family.model.context is None else str(family.model.context),
        "gpus": str(chosen.gpus),
        "deployment": resolved.deployment,
    }
    fault_argv = ["--fault", resolved.fault.argument] if resolved.fault else []
    environment = {**ACCESS[kind].env, **arm.env, **device.env}
    if chosen.gpus and (masks := environment.keys() - without_masks(environment)):
        raise ConfigError(
            f"config/arms/{entry.arm}.yaml: env.{min(masks)}: which devices a server sees is the lease's to say, and "
            "two masks would pick from one another; take it out"
        )
    filled = {
        where: _fill(text, values, f"config/arms/{entry.arm}.yaml: {where}")
        for where, text in _templates(arm, environment)
    }
    return _sealed(
        {
            "config": name,
            "unsupported": None,
            "refused": _refused(chosen),
            "image_by_tag": _unpinned(chosen.device.image) if config.settings.allow_tag else None,
            "fault": resolved.fault.argument if resolved.fault else None,
            "fault_name": name.partition(FAULT_SEPARATOR)[2] or None,
            "family": entry.family,
            "modality": family.modality,
            "arm": entry.arm,
            "tier": entry.tier,
            "dtype": entry.dtype,
            "site": config.settings.site,
            "device": kind,
            "gpus": chosen.gpus,
            "device_options": _device_options(chosen),
            "model": model,
            **launch.sections,
            "argv": [filled[f"argv[{index}]"] for index in range(len(arm.argv))] + fault_argv,
            "env": {key: filled[f"env.{key}"] for key in environment}
            | {variable: launch.caches[cache] for cache, names in _cache_variables(arm, device) for variable in names},
            "files": {key: filled[f"files.{key}"] for key in arm.files},
            "caches": chosen.caches,
            "needs": {"disk_bytes": _bytes(arm.disk_gib), "shm_bytes": _bytes(_shared(chosen))},
            "host": HOST,
            "threads": config.site.threads,
            "client": _with_request(_client(arm, filled, entry.arm), family.request),
            "identity": arm.identity.model_dump(mode="json"),
            "instances": [
                [
                    item.model_dump(mode="json", exclude_none=True)
                    for item in resolved.passes(number, config.settings.concurrency)
                ]
                for number in range(len(resolved.instances))
            ],
            "sets": resolved.sets,
            "reference": {
                "kind": family.reference.kind,
                "model": resolved.reference,
                "directory": f"{RESOURCES}/{family.reference_model}",
                "judge": family.judge_model,
                **config.judge_options(resolved.reference),
                "floor": resolved.floor,
                "arms": [JUDGE, *floor_arms(resolved.floor)],
            },
            "limits": {"start_limit_s": arm.start_limit_s, "stop_grace_s": arm.stop_grace_s},
        }
    )


def fill_instance(
    plan: Mapping[str, Any], instance_dir: str, side_ports: Mapping[str, int]
) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """`argv`, `env` and `files` of one instance; `{port}` stays open, a port that is taken is given up for another.

    Args:
        plan: a serve plan.
        instance_dir: a folder that no other instance uses.
        side_ports: a port for each name in the plan's `side_ports`.
    """
    values = {"instance_dir": instance_dir, **{f"side_port_{name}": str(port) for name, port in side_ports.items()}}

    def fill(text: str) -> str:
        return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)

    env, files = ({name: fill(text) for name, text in plan[key].items()} for key in ("env", "files"))
    return [fill(word) for word in plan["argv"]], env, files


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
    """The whole environment of a process: `base` with the plan's additions.

    What points Python at our own modules is dropped for a server that has an environment of its own.
    """
    ours = () if plan["environment"]["name"] == PROJECT else ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in base.items() if key not in ours} | plan["env"]


def effective_options(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plan that is hashed as `options_sha256`: all that the outputs depend on."""
    return {key: value for key, value in plan.items() if key not in ("schema_version", "options_sha256")}


def within(path: Path) -> str:
    """`path`, from the workflow directory where it lies in there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _sealed(plan: dict[str, Any]) -> ServePlan:
    return ServePlan({"schema_version": SCHEMA_VERSION, **plan, "options_sha256": sha256_json(plan)})


def _templates(arm: Arm, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Key -> template, for every template of an arm."""
    yield from ((f"argv[{index}]", text) for index, text in enumerate(arm.argv))
    yield from ((f"env.{key}", text) for key, text in env.items())
    yield from ((f"files.{key}", text) for key, text in arm.files.items())
    yield "client.model", arm.client.model
    if isinstance(arm.client, OpenAISpec):
        fields = arm.client.extra_body.items()
        yield from ((f"client.extra_body.{key}", text) for key, text in fields if isinstance(text, str))


def _client(arm: Arm, filled: Mapping[str, str], name: str) -> dict[str, Any]:
    """The client of arm `name` with its templates filled in; of several models' protocols only that one's."""
    model = filled["client.model"]
    client = arm.client.model_dump(mode="json") | {"model": model}
    if isinstance(arm.client, OpenAISpec):
        fields = client["extra_body"].items()
        client["extra_body"] = {key: filled.get(f"client.extra_body.{key}", value) for key, value in fields}
    if isinstance(arm.client, MstarSpec):
        what = f"model of client.models in config/arms/{name}.yaml"
        client["models"] = {model: lookup(client["models"], model, what)}
    return client


def _with_request(client: dict[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """A client that sends `request`, the family's fields, along; the arm's own fields win."""
    if "models" in client:
        model = client["models"][client["model"]]
        model["model_kwargs"] = {**request, **model["model_kwargs"]}
    else:
        client["extra_body"] = {**request, **client["extra_body"]}
    return client


def _fill(template: str, values: Mapping[str, str | None], where: str) -> str:
    """`template` with its `{placeholders}` replaced; braces around anything but a word are left alone."""

    def value(match: re.Match[str]) -> str:
        key = match[1]
        if key not in values:
            raise ConfigError(f"{where}: unknown placeholder '{{{key}}}' in '{template}'; known: {', '.join(values)}")
        filled = values[key]
        if filled is None:
            raise ConfigError(f"{where}: '{{{key}}}' has no value here: {_NO_VALUE[key]}")
        return filled

    return _PLACEHOLDER.sub(value, template)


def complete_plan(plan: Mapping[str, Any], manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """`plan` with the digest of the weights it serves, from the `manifest.json` of their source.

    Raises:
        ConfigError: the plan is one to be looked at only; every reason is named.
    """
    if plan["unsupported"] is not None:
        return dict(plan)
    if plan["refused"]:
        raise ConfigError("\n".join(f"config '{plan['config']}' will not run: {reason}" for reason in plan["refused"]))
    if manifest is None:
        return dict(plan)
    return _sealed(effective_options(plan) | {"model": plan["model"] | {"weights_sha256": sha256_weights(manifest)}})


def _skipped(resolved: Resolved, why: str) -> ServePlan:
    return _sealed({"config": resolved.name, "family": resolved.entry.family, "unsupported": why})


def _absent_tree(config: Config, name: str, arm: Arm) -> str | None:
    """Why a config is skipped whose arm is served from a checkout that nobody has given, or None."""
    tree = arm.process.tree if arm.process else None
    if tree is None or tree in config.settings.trees:
        return None
    return (
        f"arm '{name}' is served from checkout '{tree}', and none is given: "
        f"snakemake --config trees='{{{tree}: PATH}}', or `trees` in config/config.yaml"
    )


def _choose(config: Config, resolved: Resolved) -> _Chosen:
    entry, _, arm = resolved.served
    kind: DeviceKind = config.site.device if arm.devices else "cpu"
    device = arm.devices.get(kind, ArmDevice())
    caches = _caches(config, entry.arm, arm, device)
    return _Chosen(
        config=config,
        resolved=resolved,
        kind=kind,
        device=device,
        model=_model(config, resolved),
        caches=caches,
        gpus=0 if kind == "cpu" else resolved.gpus,
    )


def _refused(chosen: _Chosen) -> list[str]:
    """What has to be filled in before a plan may run."""
    config, source = chosen.config, chosen.model["source"]
    pin, found = config.sources[source], []
    if isinstance(pin, HuggingFaceSource) and pin.revision is None:
        found.append(
            f"config/sources.yaml: {source}: revision is null; fill in the 40-digit commit of {pin.repo} "
            f"(git ls-remote https://huggingface.co/{pin.repo} HEAD), and the SHA-256 of its files"
        )
    elif isinstance(pin, HuggingFaceSource) and (unknown := pin.unpinned):
        found.append(f"config/sources.yaml: {source}: files: fill in the SHA-256 of {', '.join(unknown)}")
    reference = _unpinned(chosen.device.image)
    if reference and not config.settings.allow_tag:
        arm = chosen.resolved.served[0].arm
        found.append(
            f"config/arms/{config.variants.get(arm, arm)}.yaml: devices.{chosen.kind}.image.digest is null, and the "
            f"tag of {reference} can move; fill in {digest_hint(reference)}, or set allow_tag: true in "
            "config/config.yaml, which the verdict will say"
        )
    return found


def _unpinned(image: Image | None) -> str | None:
    """`repository:tag` of an image without a digest; None: it has one, or there is no image."""
    return None if image is None or image.digest else f"{image.repository}:{image.tag}"


def _model(config: Config, resolved: Resolved) -> dict[str, Any]:
    _, family, arm = resolved.served
    source = family.model.weights[arm.weights]
    pin = config.sources[source]
    directory = f"{RESOURCES}/{source}"
    gguf = family.model.gguf_file if arm.weights == "gguf" else None
    return {
        "name": family.model.name,
        "source": source,
        "directory": directory,
        "gguf_file": f"{directory}/{gguf}" if gguf else None,
        "hub": {"repo": pin.repo, "revision": pin.revision} if isinstance(pin, HuggingFaceSource) else None,
        "weights_sha256": None,
        "context": family.model.context,
    }


def _cache_variables(arm: Arm, device: ArmDevice) -> Iterator[tuple[str, list[str]]]:
    """Kind of cache -> variables that are set to its folder."""
    yield from arm.caches.items()
    yield from device.caches.items()


def _caches(config: Config, name: str, arm: Arm, device: ArmDevice) -> dict[str, str]:
    """Kind of cache -> its folder: what one build left would be wrong, or slow, for another."""
    root = _expanded(config.site.cache_dir, f"config/sites/{config.settings.site}.yaml: cache_dir")
    image, process = device.image, arm.process
    if image:
        build = image.digest.replace(":", "-") if image.digest else f"tag-{image.tag}"
    else:
        assert process  # the configuration was checked
        build = process.tree or process.environment
    return {kind: f"{root}/{name}/{build}/{kind}" for kind, _ in _cache_variables(arm, device)}


def _in_process(chosen: _Chosen, process: Process) -> _Launch:
    config, model = chosen.config, chosen.model
    _, _, arm = chosen.resolved.served
    tree = _tree(config, process.tree) if process.tree else None
    python = python_of(process.environment, tree)
    return _Launch(
        sections={
            "environment": {"name": process.environment, "python": python, **_project_code(process, arm)},
            "tree": tree,
            "side_ports": process.side_ports,
            "container": None,
        },
        values={
            "python": python,
            "model_dir": model["directory"],
            "gguf_file": model["gguf_file"],
            "host": HOST,
            "port": "{port}",
            "tree": tree["path"] if tree else None,
            "instance_dir": "{instance_dir}",
            "hub_dir": "{instance_dir}/hub" if model["hub"] else None,
            **{f"side_port_{name}": f"{{side_port_{name}}}" for name in process.side_ports},
        },
        caches=chosen.caches,
    )


def _in_container(chosen: _Chosen) -> _Launch:
    site, image, spec = chosen.config.site.container, chosen.device.image, chosen.resolved.served[2].container
    assert site and image and spec  # the configuration was checked
    access, model, caches = ACCESS[chosen.kind], chosen.model, chosen.caches
    weights = f"{MODELS}/{model['source']}"
    inside = {cache: f"{CACHES}/{cache}" for cache in caches}
    return _Launch(
        sections={
            "environment": None,
            "tree": None,
            "side_ports": [],
            "container": {
                "runtime": site.runtime,
                **image.model_dump(mode="json"),
                "mounts": [
                    {"source": model["directory"], "target": weights, "read_only": True},
                    *({"source": caches[cache], "target": inside[cache], "read_only": False} for cache in caches),
                    *(_bind(item, chosen.resolved.served[0].arm) for item in spec.mounts),
                ],
                "devices": list(access.devices),
                "shm_bytes": _bytes(spec.shm_gib),
                "ulimits": dict(spec.ulimits) if site.ulimits else {},
                "ipc_host": spec.ipc_host,
                "host_network": spec.host_network,
                "user": site.user,
                "group_add": site.groups if access.devices else [],
                "cap_add": list(access.cap_add),
                "security_opt": list(access.security_opt),
                "memory_bytes": _bytes(site.memory_gib),
                "pids_limit": site.pids_limit,
                "container_port": CONTAINER_PORT,
            },
        },
        values={
            "python": None,
            "model_dir": weights,
            "gguf_file": model["gguf_file"] and model["gguf_file"].replace(model["directory"], weights, 1),
            "host": "{host}",  # as the port, the launcher's to fill: they follow from the container's network
            "port": "{port}",
            "tree": None,
            "instance_dir": None,
            "hub_dir": None,
        },
        caches=inside,
    )


def _bind(item: Bind, arm: str) -> dict[str, Any]:
    where = f"config/arms/{arm}.yaml: container.mounts: {item.target}"
    return item.model_dump(mode="json") | {"source": _expanded(item.source, where)}


def _device_options(chosen: _Chosen) -> dict[str, Any] | None:
    options = chosen.config.site.devices
    return options.model_dump(mode="json") if chosen.gpus and options else None


def _shared(chosen: _Chosen) -> float | None:
    """What a server needs of the machine's own shared memory [GiB]; a container may have some of its own."""
    arm, site = chosen.resolved.served[2], chosen.config.site.container
    if arm.process:
        return arm.process.shm_gib
    assert arm.container and site  # the configuration was checked
    return arm.container.shm_gib if arm.container.ipc_host or site.runtime == "apptainer" else None


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)


def _tree(config: Config, name: str) -> dict[str, Any]:
    """The checkout called `name`, and how it stands: a plan changes with its commit."""
    where = f"config/config.yaml: trees.{name}"
    path = Path(_expanded(config.settings.trees[name], where)).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{where}: {path} is not a directory; give the path of a checkout")
    state = folder_state(path)
    return {"name": name, "path": str(path.resolve()), "commit": state.commit, "dirty": state.dirty}


def python_of(environment: str, tree: Mapping[str, Any] | None = None) -> str:
    """Interpreter of an environment, by its name."""
    if environment == TREE and tree:
        return f"{tree['path']}/.venv/bin/python"
    if environment != PROJECT:
        return f"{RESOURCES}/environments/{environment}/bin/python"
    return within(Path(sys.executable))  # not resolved: the link's place makes it the virtual environment's interpreter


def _project_code(process: Process, arm: Arm) -> dict[str, Any]:
    """What of an arm no manifest tells that a rule could depend on: our own code, and the project's environment."""
    code = command_fingerprint(arm.argv)
    ours = {} if code is None else {"code": code}
    if process.environment != PROJECT:
        return ours
    return {"versions": versions(LIBRARIES if ours else {*LIBRARIES, arm.identity.distribution}), **ours}


def _expanded(path: str, where: str) -> str:
    expanded = os.path.expandvars(path)
    if "$" in expanded:
        raise ConfigError(f"{where}: '{path}' uses an environment variable that is not set")
    return expanded
