"""The `generate` stage: one instance of one config, from its start to the proof that nothing of it is left.

What a server does to itself (does not start, dies, answers nonsense) is data: it is written down and judged. What is
done to us (an interrupt, a full disk) is not: the server is stopped and the exception goes on.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from assay.client.protocols import client_plan
from assay.client.transport import Plan, not_sent, probe_generation, send_set
from assay.config import ClientSpec, parse
from assay.devices.hold import Held, hold
from assay.engines.identity import Identity, changed, measure
from assay.engines.instance import State, cache_states, instance_folder, make_cache_folders
from assay.engines.launch import clear_up, launch
from assay.engines.plan import effective_options
from assay.engines.room import require_room
from assay.engines.server import (
    NOT_STARTED,
    POLL_S,
    Cleanup,
    Death,
    Probe,
    Server,
    StartFailure,
    serve,
)
from assay.engines.tree import wrong_tree
from assay.errors import DeviceError, ServerError, SourceError
from assay.progress import progress
from assay.provenance import provenance
from assay.records import FailureKind, ResponseStatus, served_arm
from assay.samples.lock import load_set
from assay.slurm import allocation
from assay.sources.manifest import verify_weights
from assay.store import atomic_path, read_json, table_from_rows, write_json, write_table

log = logging.getLogger(__name__)

LAST_ANSWERS_S = 2  # requests in flight when the server dies break off by themselves; none is waited for longer

Row = dict[str, Any]


class Send(Protocol):
    """`assay.client.transport.send_set`, or a stand-in for it."""

    def __call__(
        self,
        plan: Plan,
        items: Sequence[Mapping[str, Any]],
        arm: str,
        concurrency: int,
        on_result: Callable[[Row], None] | None = None,
    ) -> Awaitable[list[Row]]: ...


@dataclass(frozen=True)
class Outputs:
    """Files of one instance."""

    responses: Path  # Parquet, schema `responses`
    identity: Path  # JSON: what was served, measured at start and end; how it started; whether it died
    cleanup: Path  # JSON: how it was stopped, and the proof that it is gone
    server_log: Path
    devices: Path  # JSON lines: its devices while it ran; empty where it has none


@dataclass
class _Run:
    """What is learned of one instance while it lives."""

    rows: list[Row] = field(default_factory=list)
    start: Identity | None = None
    end: Identity | None = None
    ready_s: float | None = None
    failure: StartFailure | None = None
    death: Death | None = None
    caches: dict[str, State | None] = field(default_factory=dict)  # before the start
    room: dict[str, int | None] = field(default_factory=dict)  # free bytes before the start, where some are needed
    held: Held = field(default_factory=Held)
    cleanup: Cleanup | None = None  # None: nothing was started


def generate(
    plan_path: Path, set_paths: Sequence[Path], instance: int, outputs: Outputs, send: Send = send_set
) -> None:
    """Start instance number `instance` of a serve plan, walk its passes over all items, stop it, write what was seen.

    Every planned item gets a row for every pass, whatever became of the server.

    Args:
        plan_path: a serve plan (`assay.engines.plan`).
        set_paths: Parquet files of the sample sets, schema `items`.
        instance: index into the plan's `instances`.
        outputs: files to write.
        send: the client.

    Raises:
        ServerError: the plan says the config is unsupported, or the server runs another checkout than the plan's.
        SourceError: the weights are not those of the plan; nothing was started.
        StoreError: a set cannot be read or a result not written; results of earlier runs stay.
        KeyboardInterrupt, SystemExit: interrupted; the server is stopped and `outputs.cleanup` written first.
    """
    plan = read_json(plan_path)
    if plan["unsupported"] is not None:
        raise ServerError(f"config '{plan['config']}' is unsupported and cannot be served: {plan['unsupported']}")
    _check_weights(plan["model"])
    items = [item for path in set_paths for item in load_set(path)]
    run = _serve_and_send(plan, items, instance, outputs, send)
    record = provenance("generate", [plan_path, *set_paths], effective_options(plan)) | {"instance": instance}
    write_table(outputs.responses, "responses", table_from_rows("responses", run.rows), record)
    write_json(outputs.identity, _identity_record(plan, instance, run))


def _check_weights(model: Mapping[str, Any]) -> None:
    """Other weights than the plan's would be judged under its name."""
    if model["weights_sha256"] is None:  # not fetched by us
        return
    found = verify_weights(model["directory"])
    if found != model["weights_sha256"]:
        raise SourceError(
            f"{model['directory']} holds weights {found[:12]}, the plan names {model['weights_sha256'][:12]}; run "
            "again, which makes the plan anew"
        )


def _serve_and_send(plan: dict[str, Any], items: list[Row], instance: int, outputs: Outputs, send: Send) -> _Run:
    spec = parse(ClientSpec, plan["client"], "the serve plan's client")
    base = dict(os.environ)
    run = _Run(caches=cache_states(plan))
    passes = [
        (served_arm(instance, item["name"]), item["concurrency"], item.get("stream"))
        for item in plan["instances"][instance]
    ]
    make_cache_folders(plan)

    def stopped(cleanup: Cleanup) -> None:
        run.cleanup = cleanup
        # The log outlives a job that is ended from outside; what it was to write does not.
        log.info("the server was stopped (%s) in %g s: %s", cleanup.stopped_by, cleanup.seconds, _left(cleanup))
        write_json(outputs.cleanup, asdict(cleanup))

    try:
        run.room = require_room(plan)
        clear_up(plan)
        with (
            hold(plan, base, outputs.devices) as run.held,
            instance_folder(plan) as folder,
            serve(
                launch(plan, base, folder, run.held),
                outputs.server_log,
                _probe(spec),
                stopped,
                run.held.belong_to,
            ) as server,
        ):
            run.ready_s = server.ready_s
            run.start = measure(server, plan, base)
            if why := wrong_tree(run.start, plan):
                raise ServerError(f"config '{plan['config']}': {why}")
            for arm, concurrency, stream in passes:
                client = client_plan(spec, server.base_url, stream)
                run.rows += asyncio.run(_walk(server, client, items, arm, concurrency, send))
            run.death = server.death()
            if run.death is None:
                run.end = measure(server, plan, base)
    except DeviceError as error:
        run.failure = StartFailure(FailureKind.DEVICES_UNFIT, str(error))
    except StartFailure as failure:
        run.failure = failure
    if run.failure is not None:
        log.error("%s", run.failure)
        if run.cleanup is None:
            _write_nothing_started(outputs)
        why = f"the server never came: {run.failure}"
        run.rows = [row for arm, *_ in passes for row in not_sent(items, arm, why)]
    return run


async def _walk(server: Server, client: Plan, items: list[Row], arm: str, concurrency: int, send: Send) -> list[Row]:
    """One pass: a row for every item, also when the server dies on the way."""
    done: dict[str, Row] = {}
    with progress(arm, len(items)) as advance:

        def on_result(row: Row) -> None:
            done[row["item_id"]] = row
            advance()

        if server.death() is None:
            task = asyncio.ensure_future(send(client, items, arm, concurrency, on_result))
            try:
                while not task.done() and server.death() is None:
                    await asyncio.wait({task}, timeout=POLL_S)
                await asyncio.wait({task}, timeout=LAST_ANSWERS_S)
                if task.done():
                    return task.result()
            finally:
                task.cancel()
    death = server.death()
    why = f"{death.message if death else 'the server was gone'} before this request was answered"
    log.error("%s: %s", arm, why)
    return [*done.values(), *not_sent([item for item in items if item["item_id"] not in done], arm, why)]


def _left(cleanup: Cleanup) -> str:
    outlived = f"; workers outlived it and were ended: {cleanup.orphans}" if cleanup.orphans else ""
    if cleanup.clean:
        return f"nothing of it is left{outlived}"
    return f"left: {cleanup.leftover}, port free: {cleanup.port_free}{outlived}"


def _probe(spec: ClientSpec) -> Probe:
    async def probe(base_url: str) -> str | None:
        row = await probe_generation(client_plan(spec, base_url))
        return None if row["status"] == ResponseStatus.OK else f"{row['status']}: {row['error']}"

    return probe


def _write_nothing_started(outputs: Outputs) -> None:
    """What a server leaves that was never started."""
    for path in (outputs.server_log, outputs.devices):
        with atomic_path(path) as empty:
            empty.touch()
    write_json(outputs.cleanup, asdict(NOT_STARTED))


def _changed(start: Identity, end: Identity, plan: Mapping[str, Any]) -> list[str]:
    """What changed under way; an extension module of another checkout may be loaded late."""
    names = changed(start, end)
    return names if names or wrong_tree(end, plan) is None else ["native"]


def _identity_record(plan: Mapping[str, Any], instance: int, run: _Run) -> dict[str, Any]:
    failure = run.failure
    return {
        "instance": instance,
        "config": plan["config"],
        "arm": plan["arm"],
        "start": asdict(run.start) if run.start else None,
        "end": asdict(run.end) if run.end else None,
        "changed": _changed(run.start, run.end, plan) if run.start and run.end else None,
        "startup": {
            "ready": failure is None,
            "seconds": round(failure.seconds if failure else run.ready_s or 0.0, 3),
            "caches": run.caches,
            "room": run.room,
            "failure": None
            if failure is None
            else {
                "kind": failure.kind,
                "message": str(failure),
                "exit_code": failure.exit_code,
                "log_tail": failure.log_tail,
            },
        },
        "died": asdict(run.death) if run.death else None,
        "devices": run.held.evidence,
        "slurm": allocation(os.environ),
    }
